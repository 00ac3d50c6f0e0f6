"""DeepEP in the benchmark: called as it documents, judged right where it does what it documents, else wrong."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.errors import ConfigError  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.workload.compare import deep_ep  # noqa: E402
from raymoe.workload.compare.deep_ep import Hybrid, Version1, Version2  # noqa: E402
from raymoe.workload.inputs import (  # noqa: E402
    Inputs,
    Routing,
)
from tests.unit.deep_ep_stand_in import stand_in  # noqa: E402
from tests.unit.worlds import close, each, wired  # noqa: E402

SIZE, EXPERTS, TOKENS, HIDDEN, TOPK = 2, 8, 30, 16, 3
SPEC = ExchangeSpec(tokens=TOKENS, hidden=HIDDEN, experts=EXPERTS, topk=TOPK, alignment=4)
KINDS = {"v1": Version1, "v2": Version2, "hybrid": Hybrid}


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(deep_ep, "join_default_group", lambda _: "0")
    monkeypatch.setattr(deep_ep._dist, "group", type("group", (), {"WORLD": object()}), raising=False)
    monkeypatch.setitem(sys.modules, "deep_ep", stand_in(SIZE, EXPERTS))


def on_all_ranks(kind: Any, routing: dict[str, Any], spoil: str = "") -> list[list[str | None]]:
    asked = Routing(
        **{"kind": "uniform", "seed": 3, "ranks": SIZE, "tokens": TOKENS, "experts": EXPERTS, "topk": TOPK, **routing}
    )

    def steps(world) -> list[str | None]:
        system = kind(world, SPEC, Inputs(asked, world.rank, HIDDEN, torch.bfloat16))
        said = []
        for index in (0, 8):
            system.take(index, fresh=True)
            system.dispatch()
            if spoil == "row":
                system._came[system._rows_of(0).shape[0] - 1] = 9.0
            if spoil == "lost" and kind is Hybrid:
                system._counts[0] -= 1
            said.append(system.wrong_dispatch())
            system.combine()
            if spoil == "token":
                system._y[3] += 0.5
            said.append(system.wrong_combine())
        return said

    worlds = wired(SIZE)
    answers = each(worlds, steps)
    close(worlds)
    assert all(isinstance(said, list) for said in answers), answers
    return answers


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("routing", [{}, {"kind": "zipf", "alpha": 2.0}, {"masked": 0.3}, {"ragged": True}], ids=str)
def test_what_it_documents_is_judged_right(installed, kind, routing):
    if kind is Hybrid and (routing.get("masked") or routing.get("ragged")):
        for error in each(worlds := wired(SIZE), lambda world: _made(kind, world, routing)):
            assert isinstance(error, ConfigError) and "takes neither" in str(error)
        close(worlds)
        return
    assert on_all_ranks(kind, routing) == [[None] * 4] * SIZE


def _made(kind: Any, world: Any, routing: dict[str, Any]) -> Any:
    asked = Routing(
        **{"kind": "uniform", "seed": 3, "ranks": SIZE, "tokens": TOKENS, "experts": EXPERTS, "topk": TOPK, **routing}
    )
    return kind(world, SPEC, Inputs(asked, world.rank, HIDDEN, torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_row_or_a_token_that_is_another_is_found(installed, kind):
    answers = on_all_ranks(kind, {}, spoil="row")
    assert all("are not those that were sent" in str(said[0]) for said in answers)
    assert any("came home wrong" in str(said[1]) for said in answers)
    for said in on_all_ranks(kind, {}, spoil="token"):
        assert said[0] is None and said[1] == "1 tokens came home wrong"


def test_a_row_that_is_missing_is_found(installed):
    for said in on_all_ranks(Hybrid, {}, spoil="lost"):
        assert "rows" in str(said[0]) and "were sent" in str(said[0])


def test_another_version_says_so(installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    worlds = wired(SIZE)
    for error in each(worlds, lambda world: _made(Version2, world, {})):
        assert isinstance(error, ConfigError) and "has no ElasticBuffer" in str(error)
    close(worlds)
