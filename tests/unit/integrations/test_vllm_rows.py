"""The part of the vLLM adapter that needs no vLLM: rows to experts and back, as an engine calls it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from raymoe.errors import ConfigError, PeerTimeout
from raymoe.exchange.arguments import Arguments
from raymoe.exchange.backend import Tokens
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import quantise_weight
from raymoe.integrations.vllm_rows import ExpertRowsOfLayer, ExpertWeights, Options
from raymoe.memory.world import World
from tests.unit.moe.gradient_cases import close
from tests.unit.ranks import RankPool
from tests.unit.worlds import wired

EXPERTS, H, K = 6, 16, 2
SPEC = ExchangeSpec(tokens=12, hidden=H, experts=EXPERTS, topk=K, dtype="float32", alignment=1, depth=0)
STEPS = [(5, 2), (1, 0), (0, 12), (0, 0), (12, 12)]
"""The tokens of both ranks in each step."""
SIZES = [8, 1, 12, 1, 12]
"""The tokens of the exchange that captured steps take: the next power of two, at most the largest step."""


def tokens_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(10 * step + rank)
    count = STEPS[step][rank]
    weights, ids = torch.rand(count, EXPERTS, generator=source).topk(K)
    ids[1::4, 1] = -1
    return torch.randn(count, H, generator=source), ids.int(), weights


def apply_expert(x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Apply another map for each expert."""
    return torch.tanh(x * (expert[:, None] + 1))


def wanted(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for k in range(K):
        y += weights[:, k, None] * torch.where(ids[:, k, None] < 0, 0, apply_expert(x, ids[:, k]))
    return y


def run_steps(world: World, exact: bool, weighted: bool, layout: str) -> list[tuple[int, int, int]]:
    """Run all steps; return how many rows came in each, how many experts they had, and how many rows had one."""
    first = world.rank * (EXPERTS // world.size)
    seen = []
    with mock.patch.object(Exchange, "capturable", True):
        rows = ExpertRowsOfLayer(world, replace(SPEC, layout=layout), Options(), exact=exact, first_id=first)
    for step, counts in enumerate(STEPS):
        x, ids, weights = tokens_of(world.rank, step)
        brought = rows.bring(x, ids, weights, max(counts))
        assert brought.ids.dtype == torch.int32 and len(brought.ids) == len(brought.x)
        assert brought.ids.shape == brought.weights.shape and brought.ids.shape[1] == (K if layout == "token" else 1)
        here = brought.ids >= 0
        assert torch.equal(torch.bincount(brought.ids[here] - first, minlength=3), brought.counts.long())
        results = torch.where(here.any(1)[:, None], torch.zeros(len(here), H), torch.nan)
        for k in range(here.shape[1]):
            weight = 1 if weighted else brought.weights[:, k, None]
            results += torch.where(here[:, k, None], weight * apply_expert(brought.x, brought.ids[:, k]), 0)
        out = torch.full_like(x, torch.nan)
        rows.combine(results[:, None], weighted, out)
        close(f"y of step {step}", out, wanted(x, ids, weights).double(), 1e-6)
        seen.append((len(brought.x), int(here.sum()), int(here.any(1).sum())))
    return seen


@pytest.mark.parametrize(
    ("exact", "weighted", "layout"),
    [(True, False, "expert"), (False, True, "expert"), (True, False, "token"), (False, False, "token")],
)
def test_uneven_steps_equal_a_layer_without_ranks(pool: RankPool, exact: bool, weighted: bool, layout: str) -> None:
    by_step = zip(*pool.run(2, run_steps, exact, weighted, layout), strict=True)
    for step, (seen, size) in enumerate(zip(by_step, SIZES, strict=True)):
        assert sum(experts for _, experts, _ in seen) == sum(
            int((tokens_of(rank, step)[1] >= 0).sum()) for rank in range(2)
        )
        static = 2 * size * (1 if layout == "token" else K)
        assert [rows for rows, _, _ in seen] == ([rows for *_, rows in seen] if exact else [static, static])


def multiply_steps(world: World, fp8: bool) -> None:
    """Run the experts of raymoe on all steps, and compare with a layer without ranks."""
    hidden, ffn = (256, 128) if fp8 else (H, 8)
    source = torch.Generator().manual_seed(5)
    gate_up = torch.randn(EXPERTS, 2 * ffn, hidden, generator=source) / hidden**0.5
    down = torch.randn(EXPERTS, hidden, ffn, generator=source) / ffn**0.5
    mine = slice(world.rank * EXPERTS // world.size, (world.rank + 1) * EXPERTS // world.size)
    weights = ExpertWeights(gate_up[mine], down[mine])
    if fp8:
        (of_gate_up, of_down), scales = zip(quantise_weight(gate_up[mine]), quantise_weight(down[mine]), strict=True)
        weights = ExpertWeights(of_gate_up, of_down, scales)
    spec = replace(SPEC, hidden=hidden, alignment=16, dtype="bfloat16" if fp8 else "float32")
    rows = ExpertRowsOfLayer(world, spec, Options(experts="raymoe"), exact=True, first_id=0)
    for step, counts in enumerate(STEPS):
        _, ids, routed = tokens_of(world.rank, step)
        x = torch.randn(len(ids), hidden, generator=source).to(getattr(torch, spec.dtype))
        rows.send(x, ids, routed, max(counts))
        out = torch.full_like(x, torch.nan)
        rows.combine(rows.multiply(weights), True, out)
        y = torch.zeros(x.shape)
        for token, k in (ids >= 0).nonzero().tolist():
            gate, up = (gate_up[ids[token, k]] @ x[token].float()).split(ffn)
            y[token] += routed[token, k] * (down[ids[token, k]] @ (torch.nn.functional.silu(gate) * up))
        if fp8:
            apart, size = float((out.float() - y).norm()), float(y.norm())
            assert apart <= 0.1 * size, (step, apart, size)
        else:
            close(f"y of step {step}", out, y.double(), 1e-5)


@pytest.mark.parametrize("fp8", [False, True])
def test_experts_of_raymoe_equal_a_layer_without_ranks(pool: RankPool, fp8: bool) -> None:
    pool.run(2, multiply_steps, fp8)


def test_experts_may_write_to_the_memory_of_the_output() -> None:
    """vLLM does that where as many rows came as the rank has tokens."""
    (world,) = wired(1)
    with world:
        rows = ExpertRowsOfLayer(world, SPEC, Options(), exact=True, first_id=0)
        x, ids = torch.randn(3, H), torch.tensor([[0, -1], [4, -1], [2, -1]])
        brought = rows.bring(x, ids, torch.full((3, K), 0.5), 3)
        out = torch.empty(3, H)
        out.copy_(brought.x)
        rows.combine(out, True, out)
        close("y", out, 0.5 * x.double(), 1e-6)


def test_what_no_graph_captures_is_refused() -> None:
    (world,) = wired(1)
    with world, pytest.raises(ConfigError, match="the exchange is host, which no CUDA graph captures"):
        ExpertRowsOfLayer(world, SPEC, Options(), exact=False, first_id=0)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"backends": "host"}, "have 'backends'; there are backend, sms, experts, layout, timeout_s"),
        ({"experts": "triton"}, "experts is 'triton'; it is vllm or raymoe"),
        ({"experts": "raymoe", "layout": "token"}, "raymoe's experts take rows expert by expert: leave out layout"),
        ({"backend": "hots"}, "backend is 'hots'; it is one of auto"),
        ({"layout": "rank"}, "layout is 'rank'; it is expert or token"),
        ({"timeout_s": 0}, "timeout_s"),
        (True, "the options of raymoe are True; give a mapping, which may be empty"),
    ],
)
def test_wrong_options_are_refused(chosen: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options.of(chosen)


def test_values_that_are_quantised_already_reach_the_backend() -> None:
    """The methods for layers take a pair as `dispatch` does."""
    spec = ExchangeSpec(4, 128, EXPERTS, K, wire="float8_e4m3", output="raw", depth=0)
    (world,) = wired(1)
    with world:
        exchange = Exchange(world, SPEC)
        exchange._arguments = Arguments(spec, 1, torch.device("cpu"))
        values, scales = torch.randn(4, 128).to(torch.float8_e4m3fn), torch.rand(4, 1)
        tokens = Tokens(values, torch.zeros(4, K, dtype=torch.int32), torch.ones(4, K), None, scales, site=3)
        with mock.patch.object(exchange, "_dispatch") as dispatch:
            exchange.dispatch_unkept(tokens, None)
        checked = dispatch.call_args.args[1]
        assert checked.x.data_ptr() == values.data_ptr() and checked.scales is not None
        assert torch.equal(checked.scales, scales) and checked.site == 3


def test_a_failure_is_seen_without_a_wait() -> None:
    timeout = PeerTimeout("combine", 4, 1, 4, 3, 60.0, 0)
    (world,) = wired(1)
    with world:
        exchange = Exchange(world, SPEC)
        assert exchange.failure() is None
        exchange._workspace = mock.Mock()
        exchange._workspace.error.error.return_value = timeout
        assert exchange.failure() is timeout
        exchange._workspace = None
        exchange._poisoning.error = timeout
        assert exchange.failure() is timeout
        exchange.close()


def test_a_failed_wait_ends_the_process_and_names_the_rank() -> None:
    """Replays of graphs raise nothing, so a thread looks."""
    program = """
        import time
        from types import SimpleNamespace
        from raymoe.errors import PeerTimeout
        from raymoe.integrations.vllm_rows import FailureWatch

        seen = [None, PeerTimeout("combine", 4, 1, 4, 3, 60.0, 0)]
        watch = FailureWatch(SimpleNamespace(rank=0))
        watch.add(SimpleNamespace(failure=lambda: seen.pop(0)))
        time.sleep(60)
    """
    run = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        "cannot go on: rank 0 waited 60.0 s for rank 1 in combine (epoch 4): expected 4, seen 3\n"
    )


def test_the_failure_watch_ends_with_the_world() -> None:
    from raymoe.integrations.vllm_rows import FailureWatch

    (world,) = wired(1)
    with world:
        watch = world.shared(FailureWatch)
        watch.add(Exchange(world, SPEC))
        assert watch._thread.is_alive()
    assert not watch._thread.is_alive()
