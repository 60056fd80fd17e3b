"""Both schedules timed and measured side by side."""
