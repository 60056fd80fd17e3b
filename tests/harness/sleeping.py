"""A rank that only sleeps; its process imports neither Megatron nor what tests do."""

from __future__ import annotations

import os
import time
from pathlib import Path


def sleep_and_tell(folder: str | Path) -> None:
    """Writes its process's number into a file with its rank's name, and sleeps."""
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(300)
