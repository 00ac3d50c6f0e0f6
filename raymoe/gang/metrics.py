"""Ray metrics of a rank: its steps, the seconds per step, its state. Their names begin with `ray_` when scraped.

They are recorded between blocks of steps, never inside a block: one record takes about 2 us.
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge, Histogram

STATES = ("starting", "wiring", "ready", "running", "done", "failed")
STEP_BOUNDARIES_S = [5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0, 5.0]


class RankMetrics:
    """The metrics of one rank of one run."""

    def __init__(self, run: str, rank: int) -> None:
        tags = {"run": run, "rank": str(rank)}
        self._steps = Counter("raymoe_steps", "Steps done.", tag_keys=tuple(tags))
        self._seconds = Histogram("raymoe_step_seconds", "Seconds per step.", STEP_BOUNDARIES_S, tag_keys=tuple(tags))
        self._state = Gauge("raymoe_rank_state", "1 for the state that a rank is in.", tag_keys=(*tags, "state"))
        for metric in (self._steps, self._seconds, self._state):
            metric.set_default_tags(tags)

    def steps(self, count: int, seconds: float) -> None:
        """Record `count` steps that took `seconds` together."""
        if count > 0:
            self._steps.inc(count)
            self._seconds.observe(seconds / count)

    def state(self, now: str) -> None:
        """Record that the rank is in state `now` and in no other."""
        for name in STATES:
            self._state.set(1.0 if name == now else 0.0, tags={"state": name})
