"""One step of the prefix schedule: Megatron's contract, the step, its executor and messages.

Read schedule.py, then step.py, executor.py, losses.py.
"""
