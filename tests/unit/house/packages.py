"""Builds this tree's wheel and source distribution, without a network, for the tests of both."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

from tests.python_path import REPOSITORY


def built_wheel(folder: Path, tree: Path = REPOSITORY) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(tree)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def unpacked_sdist(folder: Path) -> Path:
    """Build the source distribution; return the folder that it unpacks to."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    packed = next(folder.glob("*.tar.gz"))
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    return folder / packed.name.removesuffix(".tar.gz")
