"""Fixtures of graphs on the CPU."""

from tests.harness.recorded import cores_in_fp64, recorded_graphs  # noqa: F401
