"""Whole groups dealt to data-parallel ranks."""
