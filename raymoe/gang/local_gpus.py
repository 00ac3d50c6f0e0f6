"""Counts the GPUs of this machine without loading CUDA: the process that asks forks later."""

from __future__ import annotations

import os
import re
from pathlib import Path


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """Count the GPUs that a process here may use: the devices of the driver, if CUDA_VISIBLE_DEVICES hides none.

    A container has the devices that it was given. `raymoe doctor` asks CUDA itself.
    """
    there = sum(re.fullmatch(r"nvidia[0-9]+", path.name) is not None for path in devices.iterdir())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return there
    names = [name.strip() for name in chosen.split(",")]
    shown = names[: names.index("-1")] if "-1" in names else names  # CUDA ignores what follows a wrong number
    return min(there, len(list(filter(None, shown))))
