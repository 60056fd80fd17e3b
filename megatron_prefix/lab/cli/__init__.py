"""The command line: one file a verb (`HELP`, `EPILOG`, `add_arguments`, `run`); see main.py."""
