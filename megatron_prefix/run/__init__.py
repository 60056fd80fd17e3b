"""One step of the prefix schedule: Megatron's contract, and the order of a step.

Read schedule.py: a call is made a request (request.py) that takes a route (route.py). A step that
may be shared is read (step_reader.py, read/), planned (planning.py) and run (step_run.py,
execute/). What ranks agree on is in agreement.py.
"""
