"""Offsets and sizes of regions in a layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec, slots_layout
from raymoe.memory.layout import ALIGNMENT, GRANULE, ITEM_BYTES, Layout, Region

shapes = st.lists(st.integers(1, 50), min_size=1, max_size=3).map(tuple)
regions = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES))), min_size=1, max_size=8).map(
    lambda given: [Region(f"r{i}", shape, dtype) for i, (shape, dtype) in enumerate(given)]
)


@given(regions)
def test_regions_are_aligned_disjoint_and_inside_the_layout(regions: list[Region]) -> None:
    layout = Layout.of(regions)
    end = 0
    for placed in layout.placed:
        assert placed.offset % ALIGNMENT == 0
        assert placed.offset >= end
        end = placed.offset + placed.region.nbytes
    assert end <= layout.nbytes
    assert layout.nbytes % GRANULE == 0
    assert [row["offset"] for row in layout.table()] == [placed.offset for placed in layout.placed]


@given(regions, st.integers(0, 7))
def test_different_layouts_have_different_hashes(regions: list[Region], which: int) -> None:
    assert Layout.of(regions).hash == Layout.of(list(regions)).hash
    which %= len(regions)
    other = list(regions)
    other[which] = Region(regions[which].name, (*regions[which].shape, 2), regions[which].dtype)
    assert Layout.of(regions).hash != Layout.of(other).hash


def test_words_of_different_writers_are_128_bytes_apart() -> None:
    region = Region.words("flag", 5)
    assert region.nbytes == 5 * 128


def test_slots_have_the_size_that_an_exchange_needs() -> None:
    spec = ExchangeSpec(tokens=512, hidden=1024, experts=32, topk=4)
    layout = slots_layout(spec, ranks=4)
    assert layout.region("dispatch_rows").nbytes == (2 * 4 * 512 + 1) * 2048
    assert layout.region("combine_rows").nbytes == 2 * 4 * 512 * 2048
    assert layout.hash != slots_layout(spec, ranks=2).hash
    narrow = slots_layout(ExchangeSpec(512, 12, 32, 4, dtype="float32", wire={"combine": "float16"}), ranks=4)
    assert narrow.region("combine_rows").nbytes == 2 * 4 * 512 * 32


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Layout.of([]), "no regions"),
        (lambda: Layout.of([Region("a", (1,), "int64")] * 2), "region a twice"),
        (lambda: Region("a", (1,), "float8"), "dtype float8"),
        (lambda: Region("a", (3, 0), "int64"), r"shape \(3, 0\)"),
        (lambda: Layout.of([Region("a", (1,), "int64")]).region("b"), "no region b in this layout; it has a"),
    ],
)
def test_impossible_regions_and_layouts_are_refused(make, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
