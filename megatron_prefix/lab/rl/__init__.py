"""GRPO actor updates: advantages, the clipped loss, the trainer, checkpoints and metrics.

Read batches (rollout -> microbatch), loss (microbatch -> loss), then trainer.
"""
