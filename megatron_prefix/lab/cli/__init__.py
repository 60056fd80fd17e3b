"""The command line: one file per verb (`HELP`, `EPILOG`, `add_arguments`, `run`); see main.py."""
