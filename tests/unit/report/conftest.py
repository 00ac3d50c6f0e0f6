"""Tests of reports compare errors that name paths, so their folders have short ones."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(short_path: Path) -> Path:
    return short_path
