"""What ranks run whose processes import neither Megatron nor what tests do."""

import os
import time
from pathlib import Path


def rank_and_threads(offset):
    """The rank's number behind `offset`, and how many threads torch has there."""
    import torch

    return offset + int(os.environ.get("RANK", "0")), torch.get_num_threads()


def sleep_and_tell(folder):
    """Writes its process's number into a file with its rank's name, and sleeps."""
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(300)
