"""The catalogue of canonical plans; rollouts and plans of data-parallel ranks, and their judges."""
