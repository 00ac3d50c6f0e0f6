"""Fixtures that all unit tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulator.build import compiler, runtime
from tests.short_folder import short_base
from tests.unit.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Start four rank processes, for the first test that needs them.

    Some run kernels on the emulator, whose build would take most of a test's time.
    """
    if compiler() is not None:
        runtime()
    with RankPool(4) as ranks:
        yield ranks


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Make a folder at a short path wherever TMPDIR is, because errors shorten long paths."""
    with tempfile.TemporaryDirectory(prefix="rm-", dir=short_base(11)) as folder:
        yield Path(folder)
