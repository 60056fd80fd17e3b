"""Memory policy `offload`: saved tensors of inner segments are on the host until their backward.

Read segment.py, transfers.py, pool.py.
"""
