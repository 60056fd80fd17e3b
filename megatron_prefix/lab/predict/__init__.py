"""Bytes of device memory that a position takes, predicted from a model's configuration alone."""
