"""Segments become a plan: which rank runs what, in which order, and what it costs. [pure]

Read actions.py, planner.py, walk.py.
"""
