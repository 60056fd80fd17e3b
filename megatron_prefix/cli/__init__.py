"""The command line: one file a verb (`HELP`, `EPILOG`, `add_arguments`, `run`), listed in main.py."""
