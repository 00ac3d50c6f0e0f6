"""docs/protocol.md names what there is."""

import re
from pathlib import Path

from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.workspace import Bounds, workspace_layout
from tests.explorer.case import Fault

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def test_every_region_and_its_bytes():
    spec = ExchangeSpec(tokens=4096, hidden=7168, experts=256, topk=8)
    layout = workspace_layout(Bounds.of(spec), ranks=4)
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\d,]+) \|$", PAGE, re.MULTILINE)
    told = {name: int(count.replace(",", "")) for name, count in rows}
    assert told == {placed.region.name: placed.region.nbytes for placed in layout.placed}


def test_every_planted_bug():
    assert set(re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", PAGE)) == {fault.name for fault in Fault}
