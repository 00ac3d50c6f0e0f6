"""Time against tokens where there are many: a straight line through what was measured, and how far from it that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raymoe.report.columns import Column
from raymoe.report.results import Line
from raymoe.report.side_by_side import Group, groups_of

FROM_TOKENS = 2048
"""Below, what does not depend on tokens is a large part of the time, and rows travel in another way (`is_few`)."""

LEAST_POINTS = 3
LINEAR = 0.03
"""Of the time: where nothing is further from the line, time is called linear in tokens."""


@dataclass(frozen=True)
class Fit:
    """`us = at_none + each * tokens`, by least squares, and the point that is furthest from it."""

    at_none: float
    each: float
    furthest_us: float
    furthest: float
    """Of the time that was measured there, a share."""

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]]) -> Fit:
        """
        >>> fit = Fit.of([(1024, 112.4), (2048, 214.8), (4096, 419.6)])
        >>> round(fit.at_none, 1), round(fit.each, 3), round(abs(fit.furthest_us), 6), fit.linear
        (10.0, 0.1, 0.0, True)
        >>> Fit.of([(1024, 100.0), (2048, 300.0), (4096, 400.0)]).linear
        False
        """
        mean_tokens = sum(tokens for tokens, _ in points) / len(points)
        mean_us = sum(us for _, us in points) / len(points)
        spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in points)
        each = sum((tokens - mean_tokens) * (us - mean_us) for tokens, us in points) / spread
        at_none = mean_us - each * mean_tokens
        off = [(us - at_none - each * tokens, us) for tokens, us in points]
        furthest, there = max(off, key=lambda pair: abs(pair[0]) / pair[1])
        return cls(at_none, each, furthest, abs(furthest) / there)

    @property
    def linear(self) -> bool:
        return self.furthest <= LINEAR


def fits(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """A table of the lines through the cold times of each operation and backend from FROM_TOKENS on; none where no
    backend was measured at three counts of tokens or more."""
    many = [line for line in lines if line["l2"] == "cold" and int(str(line["tokens"] or 0)) >= FROM_TOKENS]
    rows = [(group, label, fit) for group in groups_of(many) for label, fit in _fits_of(group)]
    if not rows:
        return
    yield (
        f"time against tokens from {FROM_TOKENS} on, cold L2: a straight line, and the largest distance from it",
        [
            Column("op", [", ".join(filter(None, (group.op, group.setting))) for group, _, _ in rows]),
            Column("backend", [label for _, label, _ in rows]),
            Column("us at 0", [f"{fit.at_none:.1f}" for *_, fit in rows], right=True),
            Column("us per 1024", [f"{1024 * fit.each:.2f}" for *_, fit in rows], right=True),
            Column("off by us", [f"{fit.furthest_us:+.1f}" for *_, fit in rows], right=True),
            Column("off by", [f"{fit.furthest:.1%}" for *_, fit in rows], right=True),
            Column("linear", ["yes" if fit.linear else "NO" for *_, fit in rows], right=True),
        ],
    )


def _fits_of(group: Group) -> Iterator[tuple[str, Fit]]:
    points: dict[str, dict[int, float]] = {}
    for line in group.lines:
        points.setdefault(group.label(line), {})[int(str(line["tokens"]))] = float(str(line["us_p50"]))
    for label, by_tokens in points.items():
        if len(by_tokens) >= LEAST_POINTS:
            yield label, Fit.of(sorted(by_tokens.items()))
