"""Both schedules run on the same rollouts and are compared."""
