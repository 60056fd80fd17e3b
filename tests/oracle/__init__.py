"""Random trainers on random models in random layouts: the stock schedule against ours.

The oracle knows the public API and Megatron's contract, and nothing of how a step is run: it must
not share a mistake with what it judges. `python -m tests.oracle --help` runs it by hand.
"""
