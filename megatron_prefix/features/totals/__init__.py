"""Says at the end of a process how many of its steps were shared, and what that saved."""
