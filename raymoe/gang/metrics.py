"""The metrics of a run: one table of names, units and tags, and the driver's recorder of them.

Ranks know nothing of metrics. They report each block of steps (`raymoe.workload.progress`), and the driver's polls
bring these reports. The driver records them, for three reasons. A rank's loop is never held up. A rank that is killed
loses at most the reports since the last poll. And Ray exports the counts of a driver when the driver leaves.

Ray exports each metric with the prefix `ray_`, and a counter with the suffix `_total`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from raymoe.gang import supervisor as sv
from raymoe.workload.progress import Progress


class Kind(Enum):
    """The kind of a metric."""

    COUNTER = "counter"  # only grows
    GAUGE = "gauge"  # the current value; Ray forgets it soon after the driver ends
    HISTOGRAM = "histogram"  # Ray keeps counts of buckets; its sum is made of their middles, so no mean is exact


@dataclass(frozen=True)
class Metric:
    """A row of the table. `tags` come after `run`, which every metric has."""

    name: str
    kind: Kind
    unit: str
    tags: tuple[str, ...]
    meaning: str

    @property
    def exported(self) -> str:
        """The name in Prometheus. For a histogram it is the stem of `_bucket`, `_count` and `_sum`.

        >>> STEPS.exported, RANK_STATE.exported
        ('ray_raymoe_steps_total', 'ray_raymoe_rank_state')
        """
        return f"ray_{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


STATES = ("placing", "starting", "wiring", "running", "done", "failed", "lost")
"""States of a rank. `failed`: it reported an error. `lost`: its process died or does not answer."""

STEP_BOUNDARIES_S = [5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1.0, 5.0]

_RANK = ("rank",)
_STEPS = ("rank", "verified")  # `true` for steps that were verified, which takes longer, else `false`
_EXCHANGE = ("rank", "backend", "l2", "beside")
_COPY = ("rank", "transport")

STEPS = Metric("raymoe_steps", Kind.COUNTER, "steps", _STEPS, "Steps done, warm-up included.")
STEP_SECONDS = Metric(
    "raymoe_step_seconds",
    Kind.HISTOGRAM,
    "seconds",
    _RANK,
    "Seconds of a step that is not verified: the mean of a block, once a block.",
)
STEPS_SECONDS = Metric("raymoe_steps_seconds", Kind.COUNTER, "seconds", _STEPS, "Seconds of these steps.")
TOKENS = Metric("raymoe_tokens", Kind.COUNTER, "tokens", _RANK, "Tokens of the rank in the steps done.")
IMBALANCE = Metric(
    "raymoe_expert_load_imbalance",
    Kind.GAUGE,
    "ratio",
    _RANK,
    "Rows of the rank's busiest expert, divided by the mean of all experts.",
)
RANK_LOAD = Metric(
    "raymoe_rank_load",
    Kind.GAUGE,
    "ratio",
    _RANK,
    "Rows of the rank's experts, divided by the mean of all ranks.",
)


@dataclass(frozen=True)
class OpMetrics:
    """The metrics of a timed operation. Bytes divided by seconds are what one rank moves while the operation runs."""

    runs: Metric
    seconds: Metric
    nbytes: Metric

    @staticmethod
    def of(op: str, runs: str, tags: tuple[str, ...], moved: str) -> OpMetrics:
        return OpMetrics(
            Metric(f"raymoe_{runs}", Kind.COUNTER, "runs", tags, f"Timed runs of {op}."),
            Metric(f"raymoe_{op}_seconds", Kind.COUNTER, "seconds", tags, f"Seconds of the timed runs of {op}."),
            Metric(
                f"raymoe_{op}_bytes", Kind.COUNTER, "bytes", tags, f"Bytes that the rank {moved} in timed runs of {op}."
            ),
        )


OPS = {
    "dispatch": OpMetrics.of("dispatch", "dispatches", _EXCHANGE, "sent"),
    "combine": OpMetrics.of("combine", "combines", _EXCHANGE, "sent"),
    "copy": OpMetrics.of("copy", "copies", _COPY, "received"),
}

RANK_STATE = Metric("raymoe_rank_state", Kind.GAUGE, "bool", ("rank", "state"), "1 for the state that a rank is in.")
CASES = Metric("raymoe_cases", Kind.GAUGE, "cases", (), "Cases of the run.")
CASES_DONE = Metric("raymoe_cases_done", Kind.GAUGE, "cases", (), "Cases of the run that are done.")
RESTARTS = Metric("raymoe_restarts", Kind.COUNTER, "restarts", (), "Restarts of the gang after a rank was lost.")
PEER_TIMEOUTS = Metric(
    "raymoe_peer_timeouts",
    Kind.COUNTER,
    "timeouts",
    ("rank", "peer"),
    "Waits of a rank for a peer that ran out of time.",
)
REFUSED_STEPS = Metric("raymoe_refused_steps", Kind.COUNTER, "steps", (), "Steps whose data all ranks refused.")
VERIFY_FAILURES = Metric("raymoe_verify_failures", Kind.COUNTER, "steps", (), "Steps whose results were wrong.")

TABLE: tuple[Metric, ...] = (
    *(STEPS, STEPS_SECONDS, STEP_SECONDS, TOKENS, IMBALANCE, RANK_LOAD),
    *(metric for op in OPS.values() for metric in (op.runs, op.seconds, op.nbytes)),
    *(RANK_STATE, CASES, CASES_DONE, RESTARTS, PEER_TIMEOUTS, REFUSED_STEPS, VERIFY_FAILURES),
)

Record = Callable[[float, Mapping[str, str]], None]
"""Adds to a counter, sets a gauge or observes a value, under tags."""


def ray_recorder(metric: Metric) -> Record:
    """Make a metric in this process, which must be connected to Ray."""
    from ray.util.metrics import Counter, Gauge, Histogram

    tags = ("run", *metric.tags)
    instrument: Any
    match metric.kind:
        case Kind.COUNTER:
            instrument = Counter(metric.name, metric.meaning, tag_keys=tags)
            return lambda value, under: instrument.inc(value, tags=dict(under)) if value > 0 else None
        case Kind.GAUGE:
            instrument = Gauge(metric.name, metric.meaning, tag_keys=tags)
            return lambda value, under: instrument.set(value, tags=dict(under))
        case Kind.HISTOGRAM:
            instrument = Histogram(metric.name, metric.meaning, STEP_BOUNDARIES_S, tag_keys=tags)
            return lambda value, under: instrument.observe(value, tags=dict(under))


REFRESH_S = 0.5  # Ray forgets a gauge that is not set again within two export intervals, each 1 s or more


class RunMetrics:
    """Records the metrics of one run."""

    def __init__(self, run: str, ranks: int, make: Callable[[Metric], Record] = ray_recorder) -> None:
        self._run, self._ranks = run, ranks
        self._records = {metric.name: make(metric) for metric in TABLE}
        self._gauges: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self._refreshed_at = time.monotonic()
        self._counted: set[str] = set()  # kinds of failure in this generation that are counted once for all ranks
        self._all_are("placing")

    def refresh(self) -> None:
        """Set every gauge again, if the last time was REFRESH_S ago."""
        now = time.monotonic()
        if now - self._refreshed_at < REFRESH_S:
            return
        self._refreshed_at = now
        for (name, tags), value in self._gauges.items():
            self._records[name](value, dict(tags))

    def cases(self, done: int, all_cases: int) -> None:
        """Record how many cases are done."""
        self._record(CASES, all_cases)
        self._record(CASES_DONE, done)

    def block(self, rank: int, progress: Progress) -> None:
        """Record a block of steps that a rank has done."""
        block, work, of_rank = progress.block, progress.work, {"rank": str(rank)}
        verified = len(block.verified)
        for count, seconds, tag in (
            (block.steps - verified, block.seconds - block.verify_seconds, "false"),
            (verified, block.verify_seconds, "true"),
        ):
            if count:
                self._record(STEPS, count, {**of_rank, "verified": tag})
                self._record(STEPS_SECONDS, seconds, {**of_rank, "verified": tag})
        self._record(STEP_SECONDS, block.step_s, of_rank)
        self._record(TOKENS, block.steps * work.tokens, of_rank)
        if work.imbalance is not None:
            self._record(IMBALANCE, work.imbalance, of_rank)
        if work.rank_load is not None:
            self._record(RANK_LOAD, work.rank_load, of_rank)
        for timed, us in zip(work.ops, block.us, strict=False):
            if (metrics := OPS.get(timed.op)) is None or us <= 0:
                continue  # an operation without metrics, or one that this rank has no part in
            tags = {tag: timed.how.get(tag, "") for tag in metrics.runs.tags} | of_rank
            self._record(metrics.runs, block.steps, tags)
            self._record(metrics.seconds, us / 1e6, tags)
            self._record(metrics.nbytes, block.steps * timed.nbytes, tags)

    def on(self, event: sv.Event, before: sv.State, after: sv.State) -> None:
        """Record what an event meant. One that the supervisor ignored leaves `after` the same object as `before`."""
        if after is before:
            return
        match event:
            case sv.Placed():
                self._all_are("starting")
            case sv.Started():
                self._all_are("wiring")
            case sv.Wired():
                self._all_are("running")
            case sv.Finished(rank):
                self._is(rank, "done")
            case sv.Failed(rank, failure):
                self._is(rank, "failed")
                self._count_failure(rank, failure)
            case sv.Lost(rank) | sv.NotAnswering(rank):
                self._is(rank, "lost")
            case sv.NodeLost() | sv.RayLost():
                self._all_are("lost")
            case sv.Cleared() if after.generation > before.generation:
                self._counted.clear()
                self._record(RESTARTS, 1)
                self._all_are("starting")

    def _count_failure(self, rank: int, failure: sv.Failure) -> None:
        if failure.kind == "PeerTimeout":
            self._record(PEER_TIMEOUTS, 1, {"rank": str(rank), "peer": str(failure.peer)})
            return
        metric = {"DataRefused": REFUSED_STEPS, "WrongResult": VERIFY_FAILURES}.get(failure.kind)
        if metric is not None and failure.kind not in self._counted:  # every rank reports the same step
            self._counted.add(failure.kind)
            self._record(metric, 1)

    def _all_are(self, state: str) -> None:
        for rank in range(self._ranks):
            self._is(rank, state)

    def _is(self, rank: int, state: str) -> None:
        for other in STATES:
            self._record(RANK_STATE, float(other == state), {"rank": str(rank), "state": other})

    def _record(self, metric: Metric, value: float, tags: Mapping[str, str] | None = None) -> None:
        under = {"run": self._run, **(tags or {})}
        if metric.kind is Kind.GAUGE:
            self._gauges[metric.name, frozenset(under.items())] = value
        self._records[metric.name](value, under)
