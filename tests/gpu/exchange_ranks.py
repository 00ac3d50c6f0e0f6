"""Functions that ranks run in the tests of exchanges on GPUs. They use only the public interface of `Exchange`, so that
every backend passes the same tests. Most of them run on CPU ranks too."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from raymoe.cuda.graph import Graph
from raymoe.errors import Aborted, CaptureError, ConfigError, DataRefused, PeerTimeout, RaymoeError
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8_BLOCK
from raymoe.memory.world import World
from tests.unit.exchange.exchange_cases import (
    Batch,
    Case,
    Result,
    apply_experts,
    batches,
    expert_major,
    open_exchange,
    result_of,
    run_case,
    run_step,
    spec_of,
)

INVALID_ID = 1_000_000
"""The id in rows after `num_tokens`, which no code may read."""


def run_cases(world: World, cases: list[Case]) -> list[list[Result]]:
    return [run_case(world, case) for case in cases]


def padded(batch: Batch, tokens: int) -> Batch:
    """Return the batch in memory for `tokens` tokens; the rows after `num_tokens` hold NaN and invalid ids."""
    missing = tokens - len(batch.x)
    pad = torch.nn.functional.pad
    return Batch(
        pad(batch.x, (0, 0, 0, missing), value=torch.nan),
        pad(batch.ids, (0, 0, 0, missing), value=INVALID_ID),
        pad(batch.weights, (0, 0, 0, missing), value=torch.nan),
        batch.num_tokens,
    )


class Inputs:
    """Tensors that captured calls read; each replay loads them again."""

    def __init__(self, case: Case, tokens: int, device: torch.device) -> None:
        spec, self.tokens = case.spec, tokens
        self.x = torch.zeros(tokens, spec.hidden, dtype=getattr(torch, spec.dtype), device=device)
        ids = torch.int64 if case.wide_topk_idx else torch.int32
        self.ids = torch.full((tokens, spec.topk), -1, dtype=ids, device=device)
        self.weights = torch.zeros(tokens, spec.topk, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)

    def load(self, batch: Batch) -> None:
        whole = padded(batch, self.tokens)
        self.x.copy_(whole.x)
        self.ids.copy_(whole.ids)
        self.weights.copy_(whole.weights)
        self.count.fill_(batch.num_tokens)

    def dispatch(self, exchange: Exchange) -> Dispatched:
        return exchange.dispatch(self.x, self.ids, self.weights, self.count)


def poison(got: Dispatched, *ys: torch.Tensor) -> None:
    """Poison the results of the last replay, so that they cannot pass for those of the next one; but not slots."""
    if got.index is None:
        got.x.fill_(torch.nan)
    else:
        got.index.fill_(-7)
    got.weights.fill_(torch.nan)
    got.expert_offsets.fill_(-7)
    got.expert_counts.fill_(-7)
    for y in ys:
        y.fill_(torch.nan)


class Captures:
    """Graphs of one exchange: a dispatch, the experts' work, a combine, and all three in one."""

    def __init__(self, world: World, exchange: Exchange, case: Case, tokens: int) -> None:
        self.world, self.exchange, self.case = world, exchange, case
        self.inputs = Inputs(case, tokens, world.device)
        self._pool: Any = torch.cuda.MemPool()  # only captured tensor operations allocate from it
        self.graphs: list[Graph] = []
        self.got: Dispatched
        self.rows: torch.Tensor
        self.y: torch.Tensor

    def whole(self) -> Callable[[], None]:
        return self.capture(lambda: (self._dispatch(), self._experts(), self._combine()))

    def parts(self) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
        return self.capture(self._dispatch), self.capture(self._experts), self.capture(self._combine)

    def capture(self, enqueue: Callable[[], object]) -> Callable[[], None]:
        stream = torch.cuda.current_stream().cuda_stream

        def inside() -> None:
            with torch.cuda.use_mem_pool(self._pool):
                enqueue()

        graph = Graph.capture(self.world.gpu, stream, inside)
        self.graphs.append(graph)
        return lambda: graph.replay(stream)

    def result(self) -> Result:
        self.exchange.check()
        return result_of(self.got, expert_major(self.got), self.y)

    def close(self) -> None:
        for graph in self.graphs:
            graph.close()

    def _dispatch(self) -> None:
        self.got = self.inputs.dispatch(self.exchange)

    def _experts(self) -> None:
        self.rows = apply_experts(self.exchange, self.got, expert_major(self.got))

    def _combine(self) -> None:
        self.y = self.exchange.combine(self.rows, self.got, weighted=self.case.weighted)


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    if device.type == "cpu":
        return nullcontext()
    new_stream: Any = torch.cuda.Stream
    return torch.cuda.stream(new_stream(device))


KINDS = ("eager", "whole", "parts", "captured dispatch", "smaller")


def replay(world: World, case: Case, kinds: list[str], late_share: float = 0.0) -> list[Result]:
    """Run the steps of a case, each of the kind that `kinds` gives. The first call to the exchange is inside a capture.

    `smaller` is a second graph, for half as many tokens; its batches are cut. `late_share` is the share of steps before
    which this rank is late, by host or by device.
    """
    rng, results = np.random.default_rng((case.seed, world.rank, 5)), []
    with own_stream(world.device), open_exchange(world, case) as exchange:
        full = Captures(world, exchange, case, case.spec.tokens)
        small = Captures(world, exchange, case, smaller(case.spec))
        replay_whole, replay_small = full.whole(), small.whole()
        in_parts = Captures(world, exchange, case, case.spec.tokens)
        dispatch, experts, combine = in_parts.parts()
        for step, kind in enumerate(kinds):
            batch = batches(case, step)[world.rank]
            delay(rng, late_share)
            if kind == "eager":
                results.append(run_step(exchange, case, batch))
                continue
            captures = {"whole": full, "smaller": small}.get(kind, in_parts)
            captures.inputs.load(cut(batch, captures.inputs.tokens))
            poison(captures.got, captures.y, captures.rows)
            if kind == "whole":
                replay_whole()
            elif kind == "smaller":
                replay_small()
            else:
                dispatch()
                delay(rng, late_share)
                experts()
                if kind == "parts":
                    combine()
                else:
                    exchange.combine(in_parts.rows, in_parts.got, weighted=case.weighted, out=in_parts.y)
            results.append(captures.result())
        for captures in (full, small, in_parts):
            captures.close()
    return results


def smaller(spec: ExchangeSpec) -> int:
    return max(1, spec.tokens // 2)


def cut(batch: Batch, tokens: int) -> Batch:
    count = min(batch.num_tokens, tokens)
    return Batch(batch.x[:tokens], batch.ids[:tokens], batch.weights[:tokens], count)


def delay(rng: np.random.Generator, share: float) -> None:
    if rng.random() < share:
        time.sleep(rng.exponential(0.002))
    if rng.random() < share:
        torch.cuda._sleep(int(rng.exponential(2e6)))  # cycles: about a millisecond


def dense_error(inputs: Inputs, y: torch.Tensor) -> torch.Tensor:
    """Return the largest error of y against a dense computation on this rank, relative to the terms, without a wait."""
    x, want = inputs.x.double(), torch.zeros(inputs.x.shape, dtype=torch.float64, device=y.device)
    scale, valid = torch.zeros_like(want), torch.arange(len(x), device=y.device) < inputs.count
    for k in range(inputs.ids.shape[1]):
        expert, weight = inputs.ids[:, k].double()[:, None], inputs.weights[:, k].double()[:, None]
        row = (x * (0.5 + expert / 8) + (expert - 2.25) / 4) * weight
        row = torch.where((valid & (inputs.ids[:, k] >= 0))[:, None], row, 0.0)
        want, scale = want + row, scale + row.abs()
    off = (y.double() - want).abs()
    return torch.where(off == 0, 0.0, off / scale).nan_to_num(nan=torch.inf).max()


def soak(world: World, case: Case, steps: int) -> tuple[float, int]:
    """Mix replays of two graphs and eager steps at random, with late ranks; return the worst error and its step."""
    turns, rng = np.random.default_rng(case.seed), np.random.default_rng((case.seed, world.rank, 7))
    drawn = [batches(case, step)[world.rank].on(world.device) for step in range(len(case.routing))]
    errors: list[torch.Tensor] = []
    with own_stream(world.device), open_exchange(world, case) as exchange:
        full = Captures(world, exchange, case, case.spec.tokens)
        replay_whole = full.whole()
        in_parts = Captures(world, exchange, case, case.spec.tokens)
        dispatch, experts, combine = in_parts.parts()
        for step in range(steps):
            kind, batch = turns.integers(0, 10), drawn[int(turns.integers(len(drawn)))]
            delay(rng, 0.02)
            captures = full if kind < 5 else in_parts
            captures.inputs.load(batch)
            poison(captures.got, captures.y, captures.rows)
            if kind < 5:
                replay_whole()
            elif kind < 9:
                dispatch()
                delay(rng, 0.02)
                experts()
                combine()
            else:
                got = in_parts.inputs.dispatch(exchange)
                exchange.combine(apply_experts(exchange, got, expert_major(got)), got, out=in_parts.y)
            errors.append(dense_error(captures.inputs, captures.y))
            if step % 100 == 99:
                exchange.check()
        exchange.check()
        found = torch.stack(errors)
        for captures in (full, in_parts):
            captures.close()
    return float(found.max()), int(found.argmax())


def with_zeros(batch: Batch) -> Batch:
    """Return the batch with a token of zeros, whose blocks have only 0 to scale by."""
    batch.x[:1] = 0
    return batch


def quantised_steps(world: World, case: Case) -> list[Result]:
    """Run steps whose rows cross as fp8; raw output is multiplied by its scales here."""
    spec, results = case.spec, []
    with open_exchange(world, case) as exchange:
        for step in range(len(case.routing)):
            batch = with_zeros(batches(case, step)[world.rank]).on(world.device)
            got = exchange.dispatch(batch.x, batch.ids, batch.weights, batch.num_tokens)
            x = got.x
            if spec.output == "raw":
                assert got.scales is not None
                if spec.layout == "expert":
                    assert got.scales.shape == (spec.rows(world.size), spec.scales)
                    assert got.scales.stride() == (1, -(-spec.rows(world.size) // 4) * 4)
                values = expert_major(replace(got, x=got.x.view(torch.uint8)))  # torch has no gather for 8-bit floats
                scales = expert_major(replace(got, x=got.scales)).repeat_interleave(FP8_BLOCK, 1)[:, : spec.hidden]
                x = (values.view(got.x.dtype).float() * scales).to(batch.x.dtype)
            y = exchange.combine(apply_experts(exchange, got, x), got, weighted=case.weighted)
            exchange.check()
            results.append(result_of(got, x, y))
    return results


def error_of_spec(world: World, case: Case) -> str:
    """Return the error of an exchange of this spec."""
    with pytest.raises(ConfigError) as caught:
        open_exchange(world, case)
    return str(caught.value)


def sms_of_launches(world: World, case: Case, requested: list[int | str]) -> list[tuple[int | None, int]]:
    """Return the SMs that the launches of an exchange occupy, and those of the GPU, for each `sms` asked for."""
    found = []
    for sms in requested:
        with open_exchange(world, case, sms=sms) as exchange:
            run_step(exchange, case, batches(case, 0)[world.rank])
            found.append((exchange.sms, world.gpu.sms))
    return found


def in_halves(world: World, case: Case, captured: bool) -> list[Result]:
    """Run each operation in two halves, with a matrix product between them."""
    results, size = [], 1024
    with own_stream(world.device), open_exchange(world, case) as exchange:
        captures = Captures(world, exchange, case, case.spec.tokens)
        inputs, work = captures.inputs, torch.eye(size, device=world.device)

        def enqueue() -> None:
            got = exchange.dispatch_send(inputs.x, inputs.ids, inputs.weights, inputs.count)
            torch.mm(work, work)
            captures.got = exchange.dispatch_receive(got)
            captures.rows = apply_experts(exchange, got, expert_major(got))
            sent = exchange.combine_send(captures.rows, got, case.weighted)
            torch.mm(work, work)
            captures.y = exchange.combine_receive(sent)

        enqueue()  # cuBLAS allocates at its first product
        step = captures.capture(enqueue) if captured else enqueue
        for index in range(len(case.routing)):
            inputs.load(batches(case, index)[world.rank])
            poison(captures.got, captures.y)
            step()
            results.append(captures.result())
        captures.close()
    return results


def collect_garbage_inside_captures(world: World, case: Case) -> list[Result]:
    """Capture steps of an exchange while the garbage collector frees the last one, which is closed and in a cycle."""
    results = []
    with own_stream(world.device):
        for index in range(3):
            with open_exchange(world, case) as exchange:
                captures = Captures(world, exchange, case, case.spec.tokens)
                cycle: list[object] = [exchange]
                cycle.append(cycle)
                run_step(exchange, case, batches(case, index)[world.rank])
                step = captures.capture(
                    lambda at=captures: (gc.collect(), at._dispatch(), at._experts(), gc.collect(), at._combine())
                )
                captures.inputs.load(batches(case, index)[world.rank])
                step()
                results.append(captures.result())
                captures.close()
    return results


def repeat_a_step(world: World, case: Case) -> list[bool]:
    """Run the same step several times, with another between; return whether the results are the same bits."""
    same = []
    with open_exchange(world, case) as exchange:
        first = run_step(exchange, case, batches(case, 0)[world.rank])
        for _ in range(3):
            run_step(exchange, case, batches(case, 1)[world.rank])
            again = run_step(exchange, case, batches(case, 0)[world.rank])
            same.append(rows_of(first).tobytes() == rows_of(again).tobytes() and first.y.tobytes() == again.y.tobytes())
    return same


def rows_of(result: Result) -> np.ndarray:
    """Return the rows of all experts, without the gaps between them."""
    starts_and_counts = zip(result.offsets, result.counts, strict=False)  # the last offset is the end
    return np.concatenate([result.x[start : start + count] for start, count in starts_and_counts])


def refuse_and_go_on(world: World, case: Case, fault: tuple[str, int]) -> tuple[dict[str, Any], Result]:
    """Run a step that must be refused between two good ones; return its error and the state of its memory."""
    spec, device = case.spec, world.device
    with open_exchange(world, case) as exchange:
        run_step(exchange, case, batches(case, 0)[world.rank])
        batch, count = batches(case, 1)[world.rank].on(device), None
        if fault[0] == "id" and world.rank == world.size - 1:
            batch.ids[2, 1] = fault[1]
        if fault[0] == "tokens" and world.rank == world.size - 1:
            count = torch.full((1,), fault[1], dtype=torch.int32, device=device)
        rows = spec.rows(world.size)
        guarded = torch.full((rows + 16, spec.hidden), torch.nan, dtype=batch.x.dtype, device=device)
        got = exchange.dispatch(batch.x, batch.ids, batch.weights, count, out=guarded[8 : 8 + rows])
        y = torch.ones_like(batch.x)
        exchange.combine(apply_experts(exchange, got, got.x), got, out=y)
        error_text = ""
        try:
            exchange.check()
        except DataRefused as error:
            error_text = str(error)
        exchange.check()  # the error is raised once
        outside = torch.cat([guarded[:8], guarded[8 + rows :]])
        found = {"told": error_text, "nan": bool(y.isnan().all()), "outside": bool(outside.isnan().all())}
        found["counts"] = got.expert_counts.tolist()
        return found, run_step(exchange, case, batches(case, 2)[world.rank])


def refuse_in_replay(world: World, case: Case) -> list[tuple[str, bool, bool]]:
    """Replay five steps; on rank 0, steps 1 and 3 name an expert that does not exist.

    Return for each step the error, whether all of y is NaN, and whether any of it is.
    """
    found = []
    with own_stream(world.device), open_exchange(world, case) as exchange:
        captures = Captures(world, exchange, case, case.spec.tokens)
        step = captures.whole()
        for index in range(5):
            batch, error_text = batches(case, index)[world.rank], ""
            if index in (1, 3) and world.rank == 0:
                batch.ids[0, 0] = case.spec.experts
            captures.inputs.load(batch)
            poison(captures.got)
            captures.y.fill_(1)  # not NaN, which a refused step must write
            step()
            try:
                exchange.check()
            except DataRefused as error:
                error_text = str(error)
            found.append((error_text, bool(captures.y.isnan().all()), bool(captures.y.isnan().any())))
        captures.close()
    return found


def rows_needed(world: World, case: Case, captured: bool = False) -> list[tuple[int, int, str]]:
    """Keep the most rows that this rank needed so far, without a wait.

    Return for each step the rows needed, the most of all steps so far, and the error.
    """
    found = []
    with own_stream(world.device), open_exchange(world, case) as exchange:
        inputs = Inputs(case, case.spec.tokens, world.device)
        needed, most = torch.zeros(2, 1, dtype=torch.int32, device=world.device)

        def enqueue() -> None:
            got = inputs.dispatch(exchange)
            needed.copy_(got.rows_needed())
            torch.maximum(most, needed, out=most)
            exchange.combine(expert_major(got), got, weighted=case.weighted)

        captures, step = None, enqueue
        if captured:
            enqueue()  # of no tokens: a capture loads no kernel of torch
            captures = Captures(world, exchange, case, case.spec.tokens)
            step = captures.capture(enqueue)
        for index in range(len(case.routing)):
            inputs.load(batches(case, index)[world.rank])
            needed.fill_(-7)
            error_text = ""
            try:
                step()
                exchange.check()
            except DataRefused as error:
                error_text = str(error)
            found.append((int(needed), int(most), error_text))
        if captures is not None:
            captures.close()
    return found


def combine_in_another_order(world: World, case: Case) -> list[np.ndarray]:
    """Run three dispatches into memory of their own, and combine them in another order."""
    with open_exchange(world, replace(case, spec=replace(case.spec, depth=0))) as exchange:
        gots, kept = [], []
        for step in range(3):
            batch = batches(case, step)[world.rank].on(world.device)
            out = torch.full((case.spec.rows(world.size), case.spec.hidden), torch.nan, dtype=batch.x.dtype)
            gots.append(exchange.dispatch(batch.x, batch.ids, batch.weights, out=out.to(world.device)))
            kept.append(batch)
        ys = {}
        for step in (1, 2, 0):
            got = gots[step]
            ys[step] = exchange.combine(apply_experts(exchange, got, got.x), got)
        exchange.check()
        return [ys[step].float().cpu().numpy() for step in range(3)]


def side_by_side(world: World, cases: list[Case], shared: bool) -> list[list[Result]]:
    """Run exchanges of different specs in turns: with one workspace, or each with its own on its own stream."""
    from raymoe.exchange.peer.workspace import Workspace

    results: list[list[Result]] = [[] for _ in cases]
    space = Workspace(world, *map(spec_of, cases)) if shared else None
    sms: int | str = "auto" if shared else 16
    exchanges = [open_exchange(world, case, workspace=space, sms=sms) for case in cases]
    streams = [nullcontext() if shared else own_stream(world.device) for _ in cases]
    for step in range(len(cases[0].routing)):
        pending = []
        for exchange, case, stream in zip(exchanges, cases, streams, strict=True):
            with stream:
                batch = batches(case, step)[world.rank].on(world.device)
                got = exchange.dispatch(batch.x, batch.ids, batch.weights, batch.num_tokens)
                x = expert_major(got)
                pending.append((got, x, exchange.combine(apply_experts(exchange, got, x), got, case.weighted), batch))
        for index, (got, x, y, _) in enumerate(pending):
            exchanges[index].check()
            results[index].append(result_of(got, x, y))
    for exchange in exchanges:
        exchange.close()
    if space is not None:
        space.close()
    return results


def within_groups(world: World, groups: list[list[int]], case: Case) -> tuple[int, list[Result]]:
    """Run an exchange in each group, all at the same time."""
    made = [world.group(ranks) for ranks in groups]
    group = next(each for each in made if each is not None)
    return group.rank, run_case(group, case)


def misuse_errors(world: World, case: Case) -> list[str]:
    """Return the error of each mistake. A good step follows each, so none has left a trace."""
    spec, device, errors = case.spec, world.device, []
    batch = batches(case, 0)[world.rank].on(device)
    wide = torch.zeros(spec.tokens * spec.hidden + 1, dtype=batch.x.dtype, device=device)[1:].view(spec.tokens, -1)
    with own_stream(device), open_exchange(world, case) as exchange:
        n = len(batch.x)
        calls: list[Callable[[], object]] = [
            lambda: exchange.dispatch(batch.x.cpu(), batch.ids, batch.weights),
            lambda: exchange.dispatch(wide[:n], batch.ids, batch.weights),
            lambda: exchange.dispatch(batch.x, batch.ids, batch.weights, torch.ones(1, dtype=torch.int32)),
            lambda: exchange.dispatch(batch.x, batch.ids, batch.weights, n + 1),
            lambda: capture(world, lambda: exchange.dispatch(batch.x, batch.ids, batch.weights, 1)),
            lambda: capture(world, lambda: exchange.dispatch(batch.x[:, :8], batch.ids, batch.weights)),
            lambda: capture(world, lambda: Exchange(world, spec, case.backend.split()[-1])),
            lambda: capture(world, exchange.check),
        ]
        for mistake in calls:
            try:
                mistake()
            except (ConfigError, CaptureError) as error:
                errors.append(str(error))
            run_step(exchange, case, batches(case, 0)[world.rank])
    return errors


def capture(world: World, enqueue: Callable[[], object]) -> None:
    Graph.capture(world.gpu, torch.cuda.current_stream().cuda_stream, lambda: (enqueue(), None)[1]).close()


# Peers that do not come


def lose_rank_1(world: World, case: Case, how: str) -> dict[str, Any]:
    """Let rank 1 be killed, stopped or late at the second step; return which errors the other ranks raise, and when."""
    exchange = open_exchange(world, case)
    run_step(exchange, case, batches(case, 0)[world.rank])
    processes = world.swap(os.getpid(), "processes")
    if world.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(world.timeout_s + 2)
        exchange.close(together=False)
        return {}
    batch = batches(case, 1)[world.rank].on(world.device)
    start = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        exchange.dispatch(batch.x, batch.ids, batch.weights)
        exchange.check()
    waited = time.monotonic() - start
    start = time.monotonic()
    for call in (exchange.check, lambda: exchange.dispatch(batch.x, batch.ids, batch.weights)):
        with pytest.raises(PeerTimeout):
            call()
    again = time.monotonic() - start
    exchange.close(together=False)
    world.abort("the test is over")  # closing waits for no peer
    if how == "stopped" and world.rank == 0:
        os.kill(int(str(processes[1])), signal.SIGKILL)
    return {"peer": caught.value.peer, "rank": caught.value.rank, "waited": waited, "again": again}


def abort_a_wait(world: World, case: Case) -> float | None:
    """Abort a wait of rank 0 for rank 1, which does not come; return the seconds from the abort to the error."""
    exchange = open_exchange(world, case)
    run_step(exchange, case, batches(case, 0)[world.rank])
    if world.rank == 1:
        time.sleep(3.0)
        exchange.close(together=False)
        return None
    aborted_at: list[float] = []

    def stop() -> None:
        time.sleep(0.5)
        aborted_at.append(time.monotonic())
        world.abort("rank 1 died")

    batch, thread = batches(case, 1)[world.rank].on(world.device), threading.Thread(target=stop)
    thread.start()
    error: RaymoeError | None = None
    try:
        exchange.dispatch(batch.x, batch.ids, batch.weights)
        exchange.check()
    except Aborted as caught:
        error = caught
    elapsed = time.monotonic() - aborted_at[0] if aborted_at else -1.0
    thread.join(5)
    assert error is not None
    assert "rank 1 died" in str(error)
    exchange.close(together=False)
    return elapsed
