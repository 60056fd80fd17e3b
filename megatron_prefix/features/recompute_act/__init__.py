"""Outputs of MLPs' activation functions that are computed again: memory policy recompute_act."""
