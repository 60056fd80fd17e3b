"""Segments become a plan: which rank runs what, when, and what it costs. [pure]"""
