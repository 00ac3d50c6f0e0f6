"""Functions that ranks run in the tests of ranks that do not run the same. Most of them run on CPU ranks too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from raymoe.errors import DataRefused
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.exchange import Exchange
from raymoe.memory.world import World
from tests.gpu.exchange_ranks import own_stream
from tests.unit.exchange.exchange_cases import Batch, Case, apply_experts, batches, open_exchange

# Ranks that do not combine the same


def mixed_combines(world: World, case: Case, kind: str) -> dict[str, Any]:
    """Let the last rank combine another dispatch than its peers, differ in `weighted` or in the call site, or send
    gradients of weights.

    Two dispatches of unlike routing are outstanding. Afterwards all ranks combine the second.
    """
    with own_stream(world.device), open_exchange(world, replace(case, spec=replace(case.spec, depth=2))) as exchange:
        gots, rows = [], []
        for step in range(2):
            batch = batches(case, step)[world.rank].on(world.device)
            gots.append(exchange.dispatch(batch.x, batch.ids, batch.weights))
            rows.append(apply_experts(exchange, gots[-1], gots[-1].x))
        last = world.rank == world.size - 1
        which = 1 if kind == "dispatch" and last else 0
        weighted = not (kind == "weighted" and last)
        gots[which].site = (7 if last else 5) if kind == "site" else 0
        if kind == "gradients" and last:
            refused, entries = exchange.combine_gradients(rows[which], gots[which].weights, gots[which])
            assert entries.isnan().all()
        else:
            refused = exchange.combine(rows[which], gots[which], weighted)
        error_text = ""
        try:
            exchange.check()
        except DataRefused as error:
            error_text = str(error)
        y = exchange.combine(rows[1], gots[1])
        exchange.check()
        return {"told": error_text, "nan": bool(refused.isnan().all()), "y": y.float().cpu().numpy()}


# Ranks whose backward passes differ


def mixed_backward(world: World, case: Case, kind: str) -> dict[str, Any]:
    """Let the last rank run the backward pass of another dispatch than its peers, or of another call site.

    Two dispatches of unlike routing are outstanding. Afterwards all ranks run the passes of both, which must be right.
    """
    device, last = world.device, world.rank == world.size - 1
    with own_stream(device), open_exchange(world, replace(case, spec=replace(case.spec, depth=0))) as exchange:
        sent = [batches(case, step)[world.rank].on(device) for step in range(2)]
        outs = [new_rows(exchange, batch.x.dtype) for batch in sent]
        gots = [
            exchange.dispatch(batch.x, batch.ids, batch.weights, out=out) for batch, out in zip(sent, outs, strict=True)
        ]
        for got in gots:
            got.site = 1
        found: dict[str, Any] = {"told": [], "nan": []}
        for first in (0, 1) if kind == "order" else (0,):
            which = 1 - first if last and kind == "order" else first
            gots[0].site = 7 if last and kind == "site" else 1
            rows = backward_rows(exchange, sent[which], gots[which])
            found["told"].append(refusal_of(exchange))
            found["nan"].append(bool(rows.isnan().all()))
        gots[0].site = 1
        right = []
        for step in (1, 0, 1):
            rows = backward_rows(exchange, sent[step], gots[step])
            exchange.check()
            begins, counts = gots[step].expert_offsets.tolist(), gots[step].expert_counts.tolist()
            right += [
                torch.equal(rows[begin : begin + count], -0.5 * outs[step][begin : begin + count])
                for begin, count in zip(begins, counts, strict=False)
            ]
        found["right"] = all(right)
        return found


def left_out_backward(world: World, case: Case) -> dict[str, Any]:
    """Let the last rank leave its backward pass out, and begin the next step. Then run a step on all ranks."""
    device, last = world.device, world.rank == world.size - 1
    with own_stream(device), open_exchange(world, replace(case, spec=replace(case.spec, depth=0))) as exchange:
        sent = [batches(case, step)[world.rank].on(device) for step in range(2)]
        outs = [new_rows(exchange, batch.x.dtype) for batch in sent]
        got = exchange.dispatch(sent[0].x, sent[0].ids, sent[0].weights, out=outs[0])
        found: dict[str, Any] = {"told": [], "nan": []}
        if last:
            other = exchange.dispatch(sent[1].x, sent[1].ids, sent[1].weights, out=outs[1])
            found["told"].append(refusal_of(exchange))
            y = exchange.combine(outs[1], other)
        else:
            rows = backward_rows(exchange, sent[0], got)
            found["told"].append(refusal_of(exchange))
            found["nan"].append(bool(rows.isnan().all()))
            y, _ = exchange.combine_gradients(outs[0], got.weights, got)
        found["told"].append(refusal_of(exchange))
        found["nan"].append(bool(y.isnan().all()))
        got = exchange.dispatch(sent[1].x, sent[1].ids, sent[1].weights, out=outs[1])
        y = exchange.combine(apply_experts(exchange, got, outs[1]), got)
        exchange.check()
        found["y"] = y.float().cpu().numpy()
        return found


def new_rows(exchange: Exchange, dtype: torch.dtype) -> torch.Tensor:
    """Allocate the rows of a dispatch, all zero."""
    shape = (exchange.spec.rows(exchange.world.size), exchange.spec.hidden)
    return torch.zeros(shape, dtype=dtype, device=exchange.world.device)


def backward_rows(exchange: Exchange, batch: Batch, forward: Dispatched) -> torch.Tensor:
    """Dispatch -0.5 times the rows of a dispatch as its backward pass does. Return the rows that came."""
    x, rows, backend = -0.5 * batch.x, new_rows(exchange, batch.x.dtype), exchange._backend
    if backend.keeps_places:
        backend.dispatch_known(x, forward, rows)
    else:
        backend.dispatch_again(Tokens(x, batch.ids, batch.weights, None), rows, forward)
    return rows


def refusal_of(exchange: Exchange) -> str:
    try:
        exchange.check()
    except DataRefused as error:
        return str(error)
    return ""
