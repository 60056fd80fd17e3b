"""The catalogue of canonical plans, and the placement of rollouts on data-parallel ranks."""
