"""Prompts that cross data-parallel ranks: what rollouts of several begin with runs once in the job.

Read step.py, common.py, exchanges.py.
"""
