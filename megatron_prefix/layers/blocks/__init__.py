"""Attention of a segment: blocks run by stock kernels and merged by log-sum-exp.

Read core.py, merge.py, interface.py, kernels.py.
"""
