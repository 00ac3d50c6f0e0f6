"""Rows of a dispatch by the copy engine: accepted specs and memory. tests/emulator and tests/gpu run them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raymoe.errors import ConfigError
from raymoe.exchange.choice import RankFacts, why_not
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.peer.workspace import Bounds, workspace_layout
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World

SPEC = ExchangeSpec(tokens=8, hidden=64, experts=4, topk=2, transport="copy_engine")


def test_one_workspace_has_blocks_of_one_size() -> None:
    with pytest.raises(
        ConfigError, match="copy engine of 8 rows of 128 bytes and 16 rows of 128 bytes; each needs one"
    ):
        Bounds.of(SPEC, replace(SPEC, tokens=16))
    alike = replace(SPEC, hidden=32, dtype="float32", layout="rank", topk=1)
    bounds = Bounds.of(SPEC, alike)
    bounds.check(alike)
    for other in (replace(SPEC, tokens=4), replace(SPEC, hidden=8)):  # smaller, but their slots have other offsets
        with pytest.raises(ConfigError, match=r"needs block \(.*\) of its workspace, which was made for \(8, 128\)"):
            bounds.check(other)


def test_a_workspace_has_blocks_for_copies_and_parities_for_kernels() -> None:
    by_kernels = replace(SPEC, transport="auto")
    kernels, copies, both = (workspace_layout(Bounds.of(*specs), 2) for specs in
                             ([by_kernels], [SPEC], [by_kernels, SPEC]))  # fmt: skip
    blocks = (2 * 8 + 1) * 128
    assert both.region("dispatch_blocks").nbytes == copies.region("dispatch_blocks").nbytes == blocks
    assert both.region("dispatch_rows").nbytes == kernels.region("dispatch_rows").nbytes == (2 * 2 * 8 + 3) * 128
    assert copies.region("dispatch_rows").nbytes == 3 * 128
    assert "dispatch_blocks" not in {placed.region.name for placed in kernels.placed}


def test_only_staged_between_gpus_takes_the_copy_engine() -> None:
    with World.open(0, 1) as world:
        world.wire([world.descriptor()])
        for backend in ("auto", "host", "collective", "allgather"):
            with pytest.raises(ConfigError, match="only staged, on GPUs, has it: take staged, or leave transport out"):
                Exchange(world, SPEC, backend=backend)
    facts = [RankFacts("a", "NVIDIA H200", (9, 0)), RankFacts("b", "NVIDIA H200", (9, 0))]
    assert why_not("staged", "cuda", SPEC, facts) is None
    said = why_not("staged", "cuda", replace(SPEC, wire="float8_e4m3"), facts)
    assert said is not None and "a copy quantises nothing" in said


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match="transport is 'tma'; it is one of auto, copy_engine"):
        replace(SPEC, transport="tma")
