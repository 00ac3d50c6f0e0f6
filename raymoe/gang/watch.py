"""Watch a run from the driver: its metrics, and the spans of its trace.

A trace has one clock. The ranks of a host share CLOCK_MONOTONIC, so their spans need no correction among each other.
The driver may be on another host (a head node without GPUs), whose clock began elsewhere. The polls of the ranks then
show the difference: an answer with the rank's time came between two times of the driver. The quickest answer bounds the
error to half of its round trip.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from raymoe.gang import supervisor as sv
from raymoe.gang.gang import Gang
from raymoe.gang.messages import ClockShift, Message, Profiled
from raymoe.gang.metrics import RunMetrics
from raymoe.memory.address import boot_id
from raymoe.workload.progress import Progress, Span

DRIVER = "driver"


def spans_of(progress: Progress, generation: int) -> list[Span]:
    """Return the phases of a block of steps: the block, its verified steps, and the wait for the slowest rank."""
    block = progress.block
    steps = f"steps {block.first} to {block.done - 1}" if block.steps > 1 else f"step {block.first}"
    return [
        Span(steps, block.began, block.ended, generation),
        *(Span(f"verified step {index}", began, ended, generation) for index, began, ended in block.verified),
        Span("wait for all ranks", block.ended, block.met, generation),
    ]


class RunWatch:
    """Everything that the driver reports about a run besides its results."""

    def __init__(self, run: str, ranks: int, cases: int, send: Callable[[Message], None], profile: bool) -> None:
        self._run, self._ranks, self._cases, self._send, self._profile = run, ranks, cases, send, profile
        self._metrics: RunMetrics | None = None
        self._boot_id = boot_id()
        self._shifts: dict[str, ClockShift] = {}
        self._waiting: dict[str, list[Span]] = defaultdict(list)
        self._hosts = {DRIVER: self._boot_id}
        self._since = time.monotonic()

    def connected(self, done: int, generation: int = 0) -> None:
        """Begin to record metrics: this process is connected to Ray, and `done` cases are finished."""
        self._driver_span("connect", generation)
        self._metrics = RunMetrics(self._run, self._ranks)
        self._metrics.cases(done, self._cases)

    def refresh(self) -> None:
        """Keep the gauges alive. The driver calls this in every loop in which it waits."""
        if self._metrics is not None:
            self._metrics.refresh()

    def on(self, event: sv.Event, before: sv.State, after: sv.State) -> None:
        """Note an event of the supervisor, and the end of a phase."""
        if self._metrics is not None:
            self._metrics.on(event, before, after)
        if after.phase is not before.phase or after.generation != before.generation:
            self._driver_span(before.phase.value, before.generation)

    def case_done(self, done: int) -> None:
        if self._metrics is not None:
            self._metrics.cases(done, self._cases)

    def take(self, gang: Gang) -> None:
        """Note what the ranks of a generation have reported, and send the main process the spans."""
        for rank, shift in gang.shifts.items():
            self.clock(rank, gang.locations[rank].boot_id, shift)
        for rank, report in gang.take_reports():
            self.report(rank, gang.generation, report)
        self.send_spans()

    def report(self, rank: int, generation: int, report: Progress | Span) -> None:
        """Note one report of a rank."""
        if isinstance(report, Progress):
            if self._metrics is not None:
                self._metrics.block(rank, report)
            if self._profile:
                self._waiting[f"rank {rank}"] += spans_of(report, generation)
        elif self._profile:
            self._waiting[f"rank {rank}"].append(report)

    def clock(self, rank: int, host: str, shift: ClockShift) -> None:
        """Note the difference of clocks that an answer of a rank shows; keep the most exact one of its host."""
        self._hosts[f"rank {rank}"] = host
        known = self._shifts.get(host)
        if host != self._boot_id and (known is None or shift.error < known.error):
            self._shifts[host] = shift

    def send_spans(self) -> None:
        """Send the main process the spans since the last call."""
        for process, spans in self._waiting.items():
            host = self._hosts.get(process, self._boot_id)
            shift = self._shifts.get(host, ClockShift(0.0, 0.0))
            self._send(Profiled(process, host, tuple(spans), shift))
        self._waiting.clear()

    def _driver_span(self, name: str, generation: int) -> None:
        now = time.monotonic()
        if self._profile:
            self._waiting[DRIVER].append(Span(name, self._since, now, generation))
        self._since = now
