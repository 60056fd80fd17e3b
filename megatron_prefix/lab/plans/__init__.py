"""The catalogue of canonical plans, and rollouts and plans of data-parallel ranks."""
