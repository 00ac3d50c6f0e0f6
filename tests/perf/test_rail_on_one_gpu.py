"""The work of an exchange between domains on one GPU, beside a rail of a network's rate: what the hop costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.domains.hierarchical_gpu import HierarchicalGpu  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from tests.gpu.ranks import NEEDS_GPU  # noqa: E402
from tests.perf.mirrored import OneRank  # noqa: E402

pytestmark = [*NEEDS_GPU, pytest.mark.perf]

GBPS = 45.0
"""Of a 400 Gb/s port, as in docs/evidence/domains.md."""
PACE_SLACK = 0.03
HOP_US, MEMORY_GBPS = 50.0, 2500.0
"""Of the kernels around the rail and the exchange inside, at most: their launches, and rows at this rate."""


@pytest.fixture
def world() -> Iterator[World]:
    with World.open(0, 1, device="cuda", timeout_s=30) as opened:
        opened.wire([opened.descriptor()])
        yield opened


@pytest.mark.timeout(200)
@pytest.mark.parametrize("tokens", [512, 4096])
@pytest.mark.parametrize("domains", [2, 4])
def test_a_hop_takes_its_network_the_exchange_inside_and_little_more(world: World, domains: int, tokens: int) -> None:
    one = OneRank(world, ExchangeSpec(tokens=tokens, hidden=7168, experts=256, topk=8, alignment=1), domains)
    cycles, rate = one.cycles_at(GBPS)
    between, inside, arrived, y = one.between(), one.inside(), one.tokens_inside(), torch.empty_like(one.x)
    chunked = {chunks: one.between(tokens // chunks) for chunks in (2, 4, 8)}
    one.rail.cycles = 0
    out = torch.empty(one.spec.rows(domains), 7168, dtype=torch.bfloat16, device=world.device)
    out_inside, sums = torch.empty_like(out), torch.empty_like(arrived.x)
    got, got_inside = between.dispatch(one.tokens, out), inside.dispatch(arrived, out_inside)
    between.combine(got.x, got, True, y)
    y_in_one = y.clone()
    came_in = {}
    for chunks, each in chunked.items():
        came = came_in[chunks] = each.dispatch(one.tokens, out_inside)
        each.combine(came.x, came, True, y)
        torch.cuda.synchronize()
        used = int(got.expert_offsets[-1])
        assert torch.equal(came.x[:used], got.x[:used]) and torch.equal(y, y_in_one)
    rows = torch.zeros(domains, tokens, 7168, dtype=torch.bfloat16, device=world.device)
    received = torch.zeros_like(rows)

    def dispatch_by(backend: HierarchicalGpu) -> Callable[[], object]:
        return lambda: backend.dispatch(one.tokens, out)

    def combine_by(chunks: int) -> Callable[[], object]:
        return lambda: chunked[chunks].combine(out_inside, came_in[chunks], True, y)

    us = one.us(
        {
            "inside: dispatch": lambda: inside.dispatch(arrived, out_inside),
            "inside: combine": lambda: inside.combine(got_inside.x, got_inside, True, sums),
            "network: dispatch": one.at(cycles, lambda: one.rail.gather("rows", rows, rows[0])),
            "network: combine": one.at(cycles, lambda: one.rail.swap_all("rows", [received], [rows])),
            "without network: dispatch": one.at(None, lambda: between.dispatch(one.tokens, out)),
            "without network: combine": one.at(None, lambda: between.combine(got.x, got, True, y)),
            "dispatch": one.at(cycles, lambda: between.dispatch(one.tokens, out)),
            "combine": one.at(cycles, lambda: between.combine(got.x, got, True, y)),
        }
        | {f"dispatch in {chunks}": one.at(cycles, dispatch_by(each)) for chunks, each in chunked.items()}
        | {f"combine in {chunks}": one.at(cycles, combine_by(chunks)) for chunks in chunked}
    )
    for each in (between, inside, *chunked.values()):
        each.close(together=True)
    one.close()
    line = {"domains": domains, "tokens": tokens, "gbps": round(rate, 2)} | {name: round(us[name], 1) for name in us}
    print(json.dumps(line))
    assert abs(rate / GBPS - 1) < PACE_SLACK
    row_us = rows[0].nbytes / MEMORY_GBPS / 1e3
    for op, passes in (("dispatch", 2), ("combine", domains + 1)):
        assert us[f"without network: {op}"] < us[f"inside: {op}"] + HOP_US + passes * row_us
        assert us[op] < us[f"network: {op}"] + us[f"without network: {op}"] + HOP_US
