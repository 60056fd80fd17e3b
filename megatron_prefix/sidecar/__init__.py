"""The sidecar: K/V that spans leave for their children, and the gradients they get back.

Read cache.py, arena.py.
"""
