"""What ranks do in the tests of exchanges on GPUs. Only the public interface of `Exchange` is used, so that every
backend is held to the same; most of it runs on CPU ranks too."""

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

from raymoe.device.graph import Graph
from raymoe.errors import Aborted, CaptureError, ConfigError, DataRefused, PeerTimeout, RaymoeError
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import FP8_BLOCK, ExchangeSpec
from raymoe.memory.world import World
from tests.unit.exchange_cases import (
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

NOT_THERE = 1_000_000
"""The id in rows behind `num_tokens`: whoever reads it has read too far."""


def run_cases(world: World, cases: list[Case]) -> list[list[Result]]:
    return [run_case(world, case) for case in cases]


def padded(batch: Batch, tokens: int) -> Batch:
    """The batch in memory for so many tokens, of which `num_tokens` are there."""
    more = tokens - len(batch.x)
    pad = torch.nn.functional.pad
    return Batch(
        pad(batch.x, (0, 0, 0, more), value=torch.nan),
        pad(batch.ids, (0, 0, 0, more), value=NOT_THERE),
        pad(batch.weights, (0, 0, 0, more), value=torch.nan),
        batch.num_tokens,
    )


class Inputs:
    """Tensors that captured calls read, loaded anew for every replay."""

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
    """What the last replay left must not be taken for what the next one brings. Slots are not ours to write to."""
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
    """Graphs of one exchange: a dispatch, what the experts do, a combine, and all three in one."""

    def __init__(self, world: World, exchange: Exchange, case: Case, tokens: int) -> None:
        self.world, self.exchange, self.case = world, exchange, case
        self.inputs = Inputs(case, tokens, world.device)
        self._pool: Any = torch.cuda.MemPool()  # temporaries of captured tensor operations are nobody else's
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


def replay(world: World, case: Case, kinds: list[str], pace: float = 0.0) -> list[Result]:
    """The steps of a case, each in the way that `kinds` says. The first call to the exchange is inside a capture.

    `smaller` is a second graph, for half as many tokens; its batches are cut. `pace` is the share of steps before which
    this rank is late, by host or by device.
    """
    late, results = np.random.default_rng((case.seed, world.rank, 5)), []
    with own_stream(world.device), open_exchange(world, case) as exchange:
        full = Captures(world, exchange, case, case.spec.tokens)
        small = Captures(world, exchange, case, smaller(case.spec))
        replay_whole, replay_small = full.whole(), small.whole()
        apart = Captures(world, exchange, case, case.spec.tokens)
        dispatch, experts, combine = apart.parts()
        for step, kind in enumerate(kinds):
            batch = batches(case, step)[world.rank]
            delay(late, pace)
            if kind == "eager":
                results.append(run_step(exchange, case, batch))
                continue
            captures = {"whole": full, "smaller": small}.get(kind, apart)
            captures.inputs.load(cut(batch, captures.inputs.tokens))
            poison(captures.got, captures.y, captures.rows)
            if kind == "whole":
                replay_whole()
            elif kind == "smaller":
                replay_small()
            else:
                dispatch()
                delay(late, pace)
                experts()
                if kind == "parts":
                    combine()
                else:
                    exchange.combine(apart.rows, apart.got, weighted=case.weighted, out=apart.y)
            results.append(captures.result())
        for captures in (full, small, apart):
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
    """How far y is off what a rank alone can tell it to be, relative to what was added up; nothing is waited for."""
    x, want = inputs.x.double(), torch.zeros(inputs.x.shape, dtype=torch.float64, device=y.device)
    scale, there = torch.zeros_like(want), torch.arange(len(x), device=y.device) < inputs.count
    for k in range(inputs.ids.shape[1]):
        expert, weight = inputs.ids[:, k].double()[:, None], inputs.weights[:, k].double()[:, None]
        row = (x * (0.5 + expert / 8) + (expert - 2.25) / 4) * weight
        row = torch.where((there & (inputs.ids[:, k] >= 0))[:, None], row, 0.0)
        want, scale = want + row, scale + row.abs()
    off = (y.double() - want).abs()
    return torch.where(off == 0, 0.0, off / scale).nan_to_num(nan=torch.inf).max()


def soak(world: World, case: Case, steps: int) -> tuple[float, int]:
    """Replays of two graphs and eager steps in random turns, ranks late at random; the worst error, and its step."""
    turns, late = np.random.default_rng(case.seed), np.random.default_rng((case.seed, world.rank, 7))
    drawn = [batches(case, step)[world.rank].on(world.device) for step in range(len(case.routing))]
    errors: list[torch.Tensor] = []
    with own_stream(world.device), open_exchange(world, case) as exchange:
        full = Captures(world, exchange, case, case.spec.tokens)
        replay_whole = full.whole()
        apart = Captures(world, exchange, case, case.spec.tokens)
        dispatch, experts, combine = apart.parts()
        for step in range(steps):
            kind, batch = turns.integers(0, 10), drawn[int(turns.integers(len(drawn)))]
            delay(late, 0.02)
            captures = full if kind < 5 else apart
            captures.inputs.load(batch)
            poison(captures.got, captures.y, captures.rows)
            if kind < 5:
                replay_whole()
            elif kind < 9:
                dispatch()
                delay(late, 0.02)
                experts()
                combine()
            else:
                got = apart.inputs.dispatch(exchange)
                exchange.combine(apply_experts(exchange, got, expert_major(got)), got, out=apart.y)
            errors.append(dense_error(captures.inputs, captures.y))
            if step % 100 == 99:
                exchange.check()
        exchange.check()
        found = torch.stack(errors)
        for captures in (full, apart):
            captures.close()
    return float(found.max()), int(found.argmax())


def with_zeros(batch: Batch) -> Batch:
    """The batch with a token of zeros, whose blocks have nothing to be scaled by."""
    batch.x[:1] = 0
    return batch


def quantised_steps(world: World, case: Case) -> list[Result]:
    """Steps whose rows cross as fp8; what was asked for raw is multiplied with its scales here."""
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
                values = expert_major(replace(got, x=got.x.view(torch.uint8)))  # as 8-bit floats they have no gather
                scales = expert_major(replace(got, x=got.scales)).repeat_interleave(FP8_BLOCK, 1)[:, : spec.hidden]
                x = (values.view(got.x.dtype).float() * scales).to(batch.x.dtype)
            y = exchange.combine(apply_experts(exchange, got, x), got, weighted=case.weighted)
            exchange.check()
            results.append(result_of(got, x, y))
    return results


def told_of_spec(world: World, case: Case) -> str:
    """Why there is no exchange of this spec."""
    with pytest.raises(ConfigError) as caught:
        open_exchange(world, case)
    return str(caught.value)


def multiprocessors(world: World, case: Case, asked: list[int | str]) -> list[tuple[int | None, int]]:
    """What the launches of an exchange occupy, and what the GPU has."""
    found = []
    for sms in asked:
        with open_exchange(world, case, sms=sms) as exchange:
            run_step(exchange, case, batches(case, 0)[world.rank])
            found.append((exchange.sms, world.gpu.sms))
    return found


def in_halves(world: World, case: Case, captured: bool) -> list[Result]:
    """Each operation in two halves, a product of matrices between them."""
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

        enqueue()  # cuBLAS makes what it needs at its first product
        step = captures.capture(enqueue) if captured else enqueue
        for index in range(len(case.routing)):
            inputs.load(batches(case, index)[world.rank])
            poison(captures.got, captures.y)
            step()
            results.append(captures.result())
        captures.close()
    return results


def collected_inside(world: World, case: Case) -> list[Result]:
    """Steps of exchanges that are captured while what is left of the last one is collected: in a cycle, closed."""
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


def repeated(world: World, case: Case) -> list[bool]:
    """The same step several times, another between."""
    same = []
    with open_exchange(world, case) as exchange:
        first = run_step(exchange, case, batches(case, 0)[world.rank])
        for _ in range(3):
            run_step(exchange, case, batches(case, 1)[world.rank])
            again = run_step(exchange, case, batches(case, 0)[world.rank])
            same.append(first.x.tobytes() == again.x.tobytes() and first.y.tobytes() == again.y.tobytes())
    return same


def refuse_and_go_on(world: World, case: Case, fault: tuple[str, int]) -> tuple[dict[str, Any], Result]:
    """A step that must be refused between two good ones: what was told, and what became of memory that was given."""
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
        told = ""
        try:
            exchange.check()
        except DataRefused as error:
            told = str(error)
        exchange.check()  # once is enough
        outside = torch.cat([guarded[:8], guarded[8 + rows :]])
        found = {"told": told, "nan": bool(y.isnan().all()), "outside": bool(outside.isnan().all())}
        found["counts"] = got.expert_counts.tolist()
        return found, run_step(exchange, case, batches(case, 2)[world.rank])


def refuse_in_replay(world: World, case: Case) -> list[tuple[str, bool, bool]]:
    """Steps 1 and 3 of five replays name an expert that is not there, on one rank: what was told, and whether y was NaN
    all over or anywhere."""
    found = []
    with own_stream(world.device), open_exchange(world, case) as exchange:
        captures = Captures(world, exchange, case, case.spec.tokens)
        step = captures.whole()
        for index in range(5):
            batch, told = batches(case, index)[world.rank], ""
            if index in (1, 3) and world.rank == 0:
                batch.ids[0, 0] = case.spec.experts
            captures.inputs.load(batch)
            poison(captures.got)
            captures.y.fill_(1)  # NaN is what a refused step must give
            step()
            try:
                exchange.check()
            except DataRefused as error:
                told = str(error)
            found.append((told, bool(captures.y.isnan().all()), bool(captures.y.isnan().any())))
        captures.close()
    return found


def outstanding(world: World, case: Case) -> list[np.ndarray]:
    """Three dispatches into memory of their own, combined in another order."""
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
    """Exchanges of different specs in turns: layers with one workspace, or each with its own on a stream of its own."""
    from raymoe.exchange.workspace import Workspace

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
    """Every group has an exchange of its own, all at the same time."""
    made = [world.group(ranks) for ranks in groups]
    group = next(each for each in made if each is not None)
    return group.rank, run_case(group, case)


def caller_mistakes(world: World, case: Case) -> list[str]:
    """What each of these says; a good step goes between them, so none has left a trace."""
    spec, device, said = case.spec, world.device, []
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
        for wrong in calls:
            try:
                wrong()
            except (ConfigError, CaptureError) as error:
                said.append(str(error))
            run_step(exchange, case, batches(case, 0)[world.rank])
    return said


def capture(world: World, enqueue: Callable[[], object]) -> None:
    Graph.capture(world.gpu, torch.cuda.current_stream().cuda_stream, lambda: (enqueue(), None)[1]).close()


# Peers that do not come


def one_leaves(world: World, case: Case, how: str) -> dict[str, Any]:
    """Rank 1 is killed, stopped or does not come to the second step; what the others are told, and when."""
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
    world.abort("the test is over")  # nothing is waited for on the way out
    if how == "stopped" and world.rank == 0:
        os.kill(int(str(processes[1])), signal.SIGKILL)
    return {"peer": caught.value.peer, "rank": caught.value.rank, "waited": waited, "again": again}


def told_to_stop(world: World, case: Case) -> float | None:
    """Rank 1 does not come; somebody who knows tells rank 0. How long it took to get out."""
    exchange = open_exchange(world, case)
    run_step(exchange, case, batches(case, 0)[world.rank])
    if world.rank == 1:
        time.sleep(3.0)
        exchange.close(together=False)
        return None
    asked: list[float] = []

    def stop() -> None:
        time.sleep(0.5)
        asked.append(time.monotonic())
        world.abort("rank 1 died")

    batch, thread = batches(case, 1)[world.rank].on(world.device), threading.Thread(target=stop)
    thread.start()
    error: RaymoeError | None = None
    try:
        exchange.dispatch(batch.x, batch.ids, batch.weights)
        exchange.check()
    except Aborted as caught:
        error = caught
    took = time.monotonic() - asked[0] if asked else -1.0
    thread.join(5)
    assert error is not None
    assert "rank 1 died" in str(error)
    exchange.close(together=False)
    return took


# Ranks that do not combine the same


def mixed_combines(world: World, case: Case, kind: str) -> dict[str, Any]:
    """Two dispatches are out, of unlike routing. The last rank combines the other one than its peers, or differs in
    `weighted`; then all combine the second."""
    with own_stream(world.device), open_exchange(world, replace(case, spec=replace(case.spec, depth=2))) as exchange:
        gots, rows = [], []
        for step in range(2):
            batch = batches(case, step)[world.rank].on(world.device)
            gots.append(exchange.dispatch(batch.x, batch.ids, batch.weights))
            rows.append(apply_experts(exchange, gots[-1], gots[-1].x))
        last = world.rank == world.size - 1
        which = 1 if kind == "dispatch" and last else 0
        weighted = not (kind == "weighted" and last)
        refused = exchange.combine(rows[which], gots[which], weighted)
        told = ""
        try:
            exchange.check()
        except DataRefused as error:
            told = str(error)
        y = exchange.combine(rows[1], gots[1])
        exchange.check()
        return {"told": told, "nan": bool(refused.isnan().all()), "y": y.float().cpu().numpy()}
