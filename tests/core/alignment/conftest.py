"""The CPU platform before Megatron, in all tests, since these are collected first.

Megatron's import takes two seconds more without it, and its small functions ask torch.compile.
"""

import tests.harness.ranks  # noqa: F401
