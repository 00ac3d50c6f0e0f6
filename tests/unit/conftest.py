"""The fixture that tests of this folder share: four rank processes, started for the first test that needs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks
