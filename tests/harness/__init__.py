"""Helpers of tests; import them as `tests.harness`."""
