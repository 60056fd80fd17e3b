"""Quantisation-aware training: which of ModelOpt's quantisers segments can run."""
