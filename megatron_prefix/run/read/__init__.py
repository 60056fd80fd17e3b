"""The trainer's forward steps, and what a step has to compute for them.

Read suspend.py, read_calls.py, step.py.
"""
