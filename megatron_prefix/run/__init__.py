"""One step of the prefix schedule: Megatron's contract, the step, its executor and messages.

Read schedule.py, then capture.py, step.py, step_run.py, executor.py, losses.py.
"""
