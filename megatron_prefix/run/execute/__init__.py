"""A plan, run: its actions, losses, messages between stages, and memory.

Read executor.py, losses.py, messages.py.
"""
