"""The baseline of `allgather` and `collective`: the bare NCCL calls on the bytes that they move, and nothing else.

Each operation is one call, captured in a graph. `copy_rows` is not a call of NCCL: it copies the rows that a dispatch
gives, expert by expert, which shows how long memory takes for them. LEFT_OUT lists the other work of a dispatch or a
combine; every line quotes it. Sizes are those of the first step's routing, because a captured call has fixed sizes.
Nothing is verified, because nothing is read where it arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from raymoe.config import Case, Job
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.net.nccl_rounds import NcclRounds
from raymoe.workload.clock import OpClock, Work, calls_of
from raymoe.workload.compare.other_systems import skipped_line
from raymoe.workload.inputs import Routing, draws_of
from raymoe.workload.measure import Line, Step, Steps, measure, result_line, runs_of, shape_keys
from raymoe.workload.memory_needed import spec_of
from raymoe.workload.progress import Progress, step_listener
from raymoe.workload.traffic import ExchangeTraffic, Traffic, rows_for

LEFT_OUT = {
    "all_gather": "routing, counts, placement",
    "all_to_all": "routing, counts, packing, own rows, placement",
    "all_to_all_sums": "sums of a rank's experts, sums of ranks",
    "reduce_scatter": "sums of a rank's experts; it rounds at every hop",
    "copy_rows": "routing, counts, everything between ranks",
}
"""The work that each operation leaves out. `all_gather` and `all_to_all_sums` move the bytes of `allgather`, and
`all_to_all` those of `collective`, each way."""


def run_nccl_bare(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """Return the lines of all operations, each cold and warm; for one rank alone, a line that says why not."""
    job = case.job
    if world.size == 1:
        return [skipped_line(case, "one rank has no peer to send to")]
    spec = spec_of(job)
    with closing(NcclBareStep(world, spec, job)) as step:
        steps = Steps(job.steps.warmup, job.steps.count, verify=False, bound=0.0)
        label = f"{case.name}: bare NCCL calls"
        samples = measure(world, steps, step, step_listener(progress, steps.total), label)
        graph, traffic = step.clock.captured, step.traffic
    device = torch.cuda.get_device_name(world.device)
    return [
        result_line(case, op, traffic[op], samples, index)
        | shape_keys(case, job.exchange.backend)
        | {"graph": graph, "l2": l2, "runs": runs_of(spec.tokens, graph, l2)}
        | {"leaves_out": LEFT_OUT[op], "device": device}
        for index, (op, l2) in enumerate((op, l2) for op in LEFT_OUT for l2 in ("cold", "warm"))
    ]


def traffic_by_op(spec: ExchangeSpec, sent: list[list[int]]) -> dict[str, Traffic]:
    """Return the traffic of each operation, if routing sends `sent[s][d]` rows from rank s to rank d.

    >>> spec = ExchangeSpec(tokens=4, hidden=8, experts=4, topk=1, dtype="float32")
    >>> found = traffic_by_op(spec, [[1, 3], [2, 2]])
    >>> found["all_gather"].busiest, found["all_to_all"].busiest, found["copy_rows"].busiest
    (128, 96, 0)
    """
    ranks = len(sent)
    everything = [[spec.tokens] * ranks for _ in range(ranks)]
    return {
        "all_gather": ExchangeTraffic.of(everything, spec.row_bytes).dispatch,
        "all_to_all": ExchangeTraffic.of(sent, spec.row_bytes).dispatch,
        "all_to_all_sums": ExchangeTraffic.of(everything, spec.combine_row_bytes).dispatch,
        "reduce_scatter": ExchangeTraffic.of(everything, spec.combine_row_bytes).dispatch,
        "copy_rows": Traffic(0, 0),
    }


class NcclBareStep:
    """Runs every operation once cold and once warm. All ranks make one, run it together, and close it."""

    def __init__(self, world: World, spec: ExchangeSpec, job: Job) -> None:
        self._world, self._rounds = world, world.shared(NcclRounds)
        ids = draws_of(Routing.of(job), world.rank)[0].ids
        local = spec.local_experts(world.size)
        entries = torch.bincount(ids[ids >= 0] // local, minlength=world.size).tolist()
        mine = (rows_for(ids, world.size, spec.experts), entries)
        answers: list[tuple[list[int], list[int]]] = world.swap(mine, "nccl_bare: rows")  # type: ignore[assignment]
        sent = [rows for rows, _ in answers]
        self.traffic = traffic_by_op(spec, sent)
        received = sum(to_ranks[world.rank] for _, to_ranks in answers)
        works = self._works(spec, sent, received)
        new_stream: Any = torch.cuda.Stream  # has no annotations
        self._stream: torch.cuda.Stream = new_stream(world.device)
        self._stream.wait_stream(torch.cuda.current_stream(world.device))
        with torch.cuda.stream(self._stream):
            for work in works:
                work()  # makes late connections
            self._settle()
            captured, calls = job.steps.graph is not False, calls_of(spec.tokens)
            self.clock = OpClock(world, self._stream, self._settle, captured=captured, calls=calls)
            self._timed = [self.clock.timed(work) for work in works]

    def __call__(self, index: int, *, verify: bool) -> Step:  # noqa: ARG002
        assert not verify, "these calls are not verified"
        with torch.cuda.stream(self._stream):
            return Step(tuple(us for timed in self._timed for us in self.clock.us(timed)))

    def close(self) -> None:
        """Close the graphs. The communicator belongs to the world, and stays."""
        self.clock.close()

    def _settle(self) -> None:
        self._rounds.wait_for_all("nccl_bare")

    def _works(self, spec: ExchangeSpec, sent: list[list[int]], received: int) -> list[Work]:
        """Return the work that each operation of LEFT_OUT enqueues, in that order."""
        rank, ranks, device, rounds = self._world.rank, self._world.size, self._world.device, self._rounds
        peers = [peer for peer in range(ranks) if peer != rank]

        def rows(count: int, row_bytes: int) -> torch.Tensor:
            return torch.zeros(count, row_bytes, dtype=torch.uint8, device=device)

        x, table = rows(spec.tokens, spec.row_bytes), rows(ranks * spec.tokens, spec.row_bytes)
        packed, arriving = rows(ranks * spec.tokens, spec.row_bytes), table.view(ranks, spec.tokens, -1)
        sends = {peer: packed.view(arriving.shape)[peer, : sent[rank][peer]] for peer in peers}
        receives = {peer: arriving[peer, : sent[peer][rank]] for peer in peers}
        leaving, home = (
            rows(ranks * spec.tokens, spec.combine_row_bytes).view(ranks, spec.tokens, -1) for _ in range(2)
        )
        sums, returned = ({peer: blocks[peer] for peer in peers} for blocks in (leaving, home))
        wire: torch.dtype = getattr(torch, spec.combine_wire)
        scattered, addends = home[rank].view(wire), leaving.view(ranks * spec.tokens, -1).view(wire)
        placed, source = rows(received, spec.row_bytes), rows(received, spec.row_bytes)
        return [
            lambda: rounds.all_gather(table, x),
            lambda: rounds.exchange(receives, sends),
            lambda: rounds.exchange(returned, sums),
            lambda: rounds.reduce_scatter(scattered, addends),
            lambda: _copy(placed, source),
        ]


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source)
