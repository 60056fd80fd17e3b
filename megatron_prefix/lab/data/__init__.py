"""Rollout files: read, write, import, shorten, generate. numpy only.

Read rollouts.py, then checks.py.
"""
