"""Plans that a user wants to run, and their files."""
