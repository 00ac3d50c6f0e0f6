"""Functions that ranks run in tests of limits: rows that are hard to quantise, large heaps, steps to be refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from raymoe.errors import DataRefused, PeerTimeout
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.peer.kernel_result import SavedMetadata
from raymoe.memory.world import World
from tests.gpu.exchange_ranks import Captures, own_stream
from tests.unit.exchange.exchange_cases import Case, Result, apply_experts, batches, open_exchange, run_step
from tests.unit.exchange.exchange_judge import odd_blocks


def odd_rows(world: World, case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Send a row that is hard to quantise to each rank's one expert; return the rows that came and their scales."""
    spec, device = case.spec, world.device
    with open_exchange(world, case) as exchange:
        x = odd_blocks(getattr(torch, spec.dtype)).view(1, -1).to(device)
        ids = torch.arange(spec.experts, device=device)[None]
        got = exchange.dispatch(x, ids, torch.ones(1, spec.topk, device=device))
        exchange.check()
        rows = slice(0, world.size)
        return got.x[rows].cpu(), None if got.scales is None else got.scales[rows].cpu()


def far_rows(world: World, case: Case, steps: int) -> dict[str, Any]:
    """Run steps in which only the first two tokens and the last two go to an expert, on the next rank."""
    spec, device = case.spec, world.device
    dtype, tokens = getattr(torch, spec.dtype), spec.tokens
    sent = torch.tensor([0, 1, tokens - 2, tokens - 1], device=device)
    ids = torch.full((tokens, 1), -1, device=device)
    ids[sent] = (world.rank + 1) % world.size
    weights, x = torch.ones(tokens, 1, device=device), torch.zeros(tokens, spec.hidden, dtype=dtype, device=device)
    equal = []
    with open_exchange(world, case) as exchange:
        for step in range(steps):
            x[sent] = torch.randn(len(sent), spec.hidden, dtype=dtype, device=device)
            got = exchange.dispatch(x, ids, weights)
            y = exchange.combine(got.x, got)
            exchange.check()
            equal.append(torch.equal(y[sent], x[sent]) and int(y.count_nonzero(dim=1).count_nonzero()) == len(sent))
            assert got.expert_counts.tolist() == [len(sent)], step
        backend: Any = exchange._backend
        return {"bytes": backend.workspace.nbytes, "alike": equal}


def combine_differently(world: World, case: Case, difference: str) -> tuple[dict[str, Any], Result]:
    """Let the last rank combine another dispatch than its peers, or without weights; then run a good step."""
    spec, device = case.spec, world.device
    with open_exchange(world, case) as exchange:
        gots = []
        for step in range(2):
            batch = batches(case, step)[world.rank].on(device)
            out = torch.zeros(spec.rows(world.size), spec.hidden, dtype=batch.x.dtype, device=device)
            gots.append(exchange.dispatch(batch.x, batch.ids, batch.weights, out=out))
        is_last = world.rank == world.size - 1
        got = gots[0 if is_last and difference == "dispatch" else 1]
        y = torch.ones(got.tokens, spec.hidden, dtype=got.x.dtype, device=device)
        error_text = ""
        try:
            rows = apply_experts(exchange, got, got.x)
            exchange.combine(rows, got, weighted=not (is_last and difference == "weighted"), out=y)
            exchange.check()
        except DataRefused as error:
            error_text = str(error)
        exchange.check()  # the error is raised once
        found = {"told": error_text, "nan": bool(y.isnan().all())}
        return found, run_step(exchange, case, batches(case, 2)[world.rank])


def replay_differently(world: World, case: Case) -> list[str]:
    """Replay two captured steps in three rounds; return the error of each round.

    In the second round the last rank replays the combine of the first step. Otherwise all combine the last dispatch.
    """
    errors = []
    with own_stream(world.device), open_exchange(world, case) as exchange:
        steps = [Captures(world, exchange, case, case.spec.tokens) for _ in range(2)]
        parts = [each.parts() for each in steps]
        for round_ in range(3):
            for captures, (dispatch, experts, _) in zip(steps, parts, strict=True):
                captures.inputs.load(batches(case, round_)[world.rank])
                dispatch()
                experts()
            is_last = round_ == 1 and world.rank == world.size - 1
            parts[0 if is_last else 1][2]()
            y = steps[0 if is_last else 1].y
            try:
                exchange.check()
                errors.append("" if bool(y.isfinite().all()) else "y is not finite")
            except DataRefused as error:
                errors.append(str(error) if bool(y.isnan().all()) else "y is not NaN")
        for each in steps:
            each.close()
    return errors


def sums_left_out(world: World, case: Case, silent: int) -> tuple[int, int, str, int] | None:
    """Run a combine in which one rank sends its status and no sums; return the wait that the others name."""
    exchange = open_exchange(world, case)
    run_step(exchange, case, batches(case, 0)[world.rank])
    batch = batches(case, 1)[world.rank].on(world.device)
    got = exchange.dispatch(batch.x, batch.ids, batch.weights)
    if world.rank == silent:
        forget_rows(got)
    wait = None
    if world.rank == silent:
        exchange.combine(apply_experts(exchange, got, got.x), got)
        time.sleep(world.timeout_s + 2)
    else:
        with pytest.raises(PeerTimeout) as caught:
            exchange.combine(apply_experts(exchange, got, got.x), got)
            exchange.check()
        wait = (caught.value.rank, caught.value.peer, caught.value.op, caught.value.epoch)
    exchange.close(together=False)
    world.abort("the test is over")  # closing waits for no peer
    return wait


def forget_rows(got: Dispatched) -> None:
    """Zero the first words of the struct DispatchSummary, so that the combine of this rank finds no tokens."""
    saved = got.saved(SavedMetadata)
    begin, tokens = saved.metadata.at["summary"] // 4, saved.metadata.nbytes_of("summary") // 4
    saved.memory[begin : begin + tokens - 4] = 0  # the last 16 bytes are a status


def steps_of(world: World, cases: list[Case]) -> list[list[Result]]:
    """Return the results of all steps of each case."""
    results = []
    for case in cases:
        with open_exchange(world, case) as exchange:
            results.append([_step(exchange, case, step) for step in range(len(case.routing))])
    return results


def _step(exchange: Exchange, case: Case, step: int) -> Result:
    return run_step(exchange, case, batches(case, step)[exchange.world.rank])
