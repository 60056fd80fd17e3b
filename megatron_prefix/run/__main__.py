"""`python -m megatron_prefix.run SCRIPT [ARGUMENTS]`: a script with the prefix schedule."""

from __future__ import annotations

import sys

from megatron_prefix.lab.cli.script import main

if __name__ == "__main__":
    sys.exit(main())
