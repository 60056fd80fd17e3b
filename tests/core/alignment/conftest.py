"""The CPU platform before Megatron, in all tests, since these are collected first: without it the
import takes two seconds more, and its small functions ask torch.compile."""

import tests.harness.ranks  # noqa: F401
