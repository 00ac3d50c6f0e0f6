"""The tables of the backends: which kernels each operation launches, in which order, and for which parts."""

from __future__ import annotations

from typing import Any

import pytest

from raymoe.exchange.peer.dispatch import PLACE, ROUTE, SEND
from raymoe.exchange.peer.table import CopyStage
from tests.emulator.machine import Emulator
from tests.emulator.ranks import backend, spec_for, workspaces

REDUCE, SUM = 1, 2
ALL = ROUTE | SEND | PLACE
MANY_COMBINES = {
    "combine_send": [("combine", REDUCE)],
    "combine_receive": [("combine", SUM)],
}
FUSED: dict[str, list[Any]] = MANY_COMBINES | {
    "dispatch": [("dispatch", ALL)],
    "dispatch_send": [("dispatch", ROUTE | SEND)],
    "dispatch_receive": [("dispatch", PLACE)],
    "dispatch_again": [("dispatch again", ALL)],
    "dispatch_known": [("dispatch known", SEND | PLACE)],
    "dispatch_beside": [],
    "combine": [("combine", REDUCE | SUM)],
    "combine_beside_product": [],
    "combine_gradients": [("combine gradients", REDUCE | SUM)],
}
STAGED: dict[str, list[Any]] = MANY_COMBINES | {
    "dispatch": [("dispatch", ROUTE), ("alltoallv", SEND), ("dispatch", PLACE)],
    "dispatch_send": [("dispatch", ROUTE), ("alltoallv", SEND)],
    "dispatch_receive": [("dispatch", PLACE)],
    "dispatch_again": [("dispatch again", ROUTE), ("alltoallv", SEND), ("dispatch again", PLACE)],
    "dispatch_known": [("alltoallv", SEND), ("dispatch known", PLACE)],
    "dispatch_beside": [],
    "combine": [("combine", REDUCE), ("combine", SUM)],
    "combine_beside_product": [],
    "combine_gradients": [("combine gradients", REDUCE), ("combine gradients", SUM)],
}
COPIES = [("pack", SEND), "copies", ("announce", SEND | PLACE)]
TABLES: dict[str, dict[str, list[Any]]] = {
    "fused": FUSED,
    "chunks": FUSED,
    "staged": STAGED,
    "copied": STAGED
    | {
        "dispatch": [("dispatch", ROUTE), *COPIES, ("dispatch", PLACE)],
        "dispatch_send": [("dispatch", ROUTE), ("pack", SEND)],
        "dispatch_beside": ["copies", ("announce", SEND)],
        "dispatch_receive": [("announce", PLACE), ("dispatch", PLACE)],
        "dispatch_again": [("dispatch again", ROUTE), *COPIES, ("dispatch again", PLACE)],
        "dispatch_known": [],
    },
    "ll": FUSED
    | {
        "dispatch": [("dispatch_ll", None)],
        "dispatch_again": [("dispatch_ll again", None)],
        "dispatch_known": [],
        "combine": [("combine_ll", None)],
        "combine_gradients": [("combine gradients ll_statuses", REDUCE | SUM)],
    },
}
BUILDS = {
    "AGAIN_ROUTED": "again",
    "KNOWN_ROUTING": "known",
    "CARRIES": "gradients",
    "LL_STATUSES": "ll_statuses",
    "BESIDE_PRODUCT": "beside",
}


def named(stage: Any) -> Any:
    """Name a stage by its kernel and build, with its parts."""
    if isinstance(stage, CopyStage):
        return "copies"
    builds = [BUILDS[name] for name, _ in stage.source.defines if name in BUILDS]
    return " ".join([stage.source.stem, *builds]), getattr(stage.params, "parts", None)


@pytest.mark.parametrize("kind", TABLES)
def test_each_operation_has_the_launches_of_its_backend(kind: str) -> None:
    spec = spec_for(kind)
    with Emulator(2) as emulator:
        (space, _) = workspaces(emulator, spec)
        made = backend(kind, space, spec)
    assert {name: [named(stage) for stage in stages] for name, stages in vars(made.table).items()} == TABLES[kind]

    assert made.keeps_places == bool(TABLES[kind]["dispatch_known"])
    chunked = {
        "CHUNKED_ROWS" in dict(stage.source.defines) for stage in made.table.launches() if "dispatch" in named(stage)[0]
    }
    assert chunked == {kind == "chunks"}


def test_rows_of_several_pieces_have_a_combine_beside_their_product() -> None:
    with Emulator(2) as emulator:
        beside = [("combine beside", REDUCE | SUM)]
        for hidden, dtype, found in (
            (2048, "bfloat16", []),
            (2064, "bfloat16", beside),
            (2072, "bfloat16", []),
            (2064, "float32", []),
        ):
            spec = spec_for("fused", hidden=hidden, dtype=dtype)
            (space, _) = workspaces(emulator, spec)
            stages = backend("fused", space, spec).table.combine_beside_product
            assert [named(stage) for stage in stages] == found
            assert all(stage.shape.early for stage in stages)


def test_rows_that_cross_as_fp8_are_pushed_by_dispatch_and_keep_no_places() -> None:
    spec = spec_for("staged", wire="float8_e4m3", hidden=264)
    with Emulator(2) as emulator:
        (space, _) = workspaces(emulator, spec)
        table = backend("staged", space, spec).table
    assert [named(stage) for stage in table.dispatch] == [("dispatch", ROUTE), ("dispatch", SEND), ("dispatch", PLACE)]
    assert table.dispatch_known == ()


def test_operations_with_the_same_stage_share_its_launch() -> None:
    spec = spec_for("staged")
    with Emulator(2) as emulator:
        (space, _) = workspaces(emulator, spec)
        made = backend("staged", space, spec)
        (_, move, place), known = made._dispatch.launches, made.later_operation("dispatch_known").launches
        assert made._dispatch_send.launches[-1] is move and made._dispatch_receive.launches == (place,)
        assert known[0] is move and known[1] is not place
