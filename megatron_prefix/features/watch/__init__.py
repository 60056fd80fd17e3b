"""The first step of a trainer that nobody knows, watched before any of its steps is shared.

`around.py` says who runs it, `first_step.py` what is looked at, `traces.py` how that is seen.
"""
