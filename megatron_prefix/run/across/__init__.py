"""What ranks settle with one another, and what crosses data-parallel ranks.

Read agreement.py, carried.py, exchanges.py.
"""
