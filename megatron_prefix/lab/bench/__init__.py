"""Times both schedules and measures their memory."""
