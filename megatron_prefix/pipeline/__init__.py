"""The schedule: actions, the planner, its simulator and cost model (all pure), and the executor."""
