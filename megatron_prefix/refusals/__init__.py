"""[pure] What the prefix schedule cannot run: one table, which every place that refuses takes its
name and fix from, and `megatron-prefix doctor` prints."""
