"""What proves, times and shows the schedule: our own trainer, alignments, benchmarks, command line.

It imports the core; nothing in the core imports it.
"""
