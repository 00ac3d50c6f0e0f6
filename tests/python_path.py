"""The PYTHONPATH of processes that the tests start: this repository, then the tests' own PYTHONPATH."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def python_path() -> str:
    return os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
