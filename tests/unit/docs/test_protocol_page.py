"""docs/internals/protocol.md lists every region and every injected bug."""

import re
from dataclasses import replace

from raymoe.exchange.peer.workspace import Bounds, workspace_layout
from raymoe.exchange.spec import ExchangeSpec
from tests.explorer.fault import Fault
from tests.python_path import REPOSITORY

PAGE = (REPOSITORY / "docs" / "internals" / "protocol.md").read_text()


def test_the_page_lists_every_region_with_its_bytes():
    """The regions for many tokens, then those that few tokens and the copy engine add."""
    spec = ExchangeSpec(tokens=4096, hidden=7168, experts=256, topk=8)
    expected: dict[str, int] = {}
    for each in (spec, replace(spec, tokens=128), replace(spec, transport="copy_engine")):
        for placed in workspace_layout(Bounds.of(each), ranks=4).placed:
            expected.setdefault(placed.region.name, placed.region.nbytes)
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\d,]+) \|$", PAGE, re.MULTILINE)
    assert {name: int(count.replace(",", "")) for name, count in rows} == expected


def test_the_page_names_every_injected_bug():
    assert set(re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", PAGE)) == {fault.name for fault in Fault}
