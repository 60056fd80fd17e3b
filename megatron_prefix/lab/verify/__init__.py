"""Runs both schedules on the same rollouts and compares them."""
