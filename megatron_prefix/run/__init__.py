"""One step of the prefix schedule: Megatron's contract, and the order of a step.

Read schedule.py: a step is read (read/), planned (planning.py) and run (step_run.py, execute/).
What ranks agree on, and what crosses data-parallel ranks, is in across/.
"""
