"""One step of the prefix schedule: Megatron's contract, the step, its executor and messages.

Read schedule.py, which reads a step (read_calls.py, step.py), plans it (planning.py) and runs it
(step_run.py, executor.py, losses.py).
"""
