"""Segment trees -> order of actions -> one program a rank, and what it costs.

Start with planner.py, then walk.py, which plays and so proves what the planner makes.
"""
