"""`python -m megatron_prefix` is `megatron-prefix`."""

from __future__ import annotations

import sys

from megatron_prefix.lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
