"""Rollout files: reading, writing, importing, shortening and generating. numpy only."""
