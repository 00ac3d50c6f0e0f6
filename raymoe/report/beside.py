"""Exchanges beside a matrix product: what each costs the other, and what the two save by running at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raymoe.report.columns import Column
from raymoe.report.results import Line
from raymoe.report.ways import us

PRODUCT = "product"


@dataclass(frozen=True)
class Pair:
    """One case's times, in microseconds: an operation and a product, each alone, each beside the other, and both."""

    case: str
    alone: float
    product: float
    beside: float
    product_beside: float
    both: float

    @property
    def saved(self) -> float:
        """Of the time that the two take one after the other, the share that running them at once saves.

        >>> Pair("sms=24", alone=500.0, product=500.0, beside=550.0, product_beside=600.0, both=600.0).saved
        0.4
        """
        return 1 - self.both / (self.alone + self.product)


def pairs_of(lines: Sequence[Line], op: str) -> list[Pair]:
    """The cases that ran this operation beside a product, in their order."""
    wanted = {
        "alone": (op, None),
        "product": (PRODUCT, None),
        "beside": (op, PRODUCT),
        "product_beside": (PRODUCT, op),
        "both": (f"{op}+{PRODUCT}", None),
    }
    of_case: dict[tuple[object, object], dict[tuple[object, object], float]] = {}
    for line in lines:
        if line["workload"] == "overlap" and line["us_p50"]:
            of_case.setdefault((line["run"], line["case"]), {})[line["op"], line["beside"]] = us(line)
    return [
        Pair(str(case), **{name: times[key] for name, key in wanted.items()})
        for (_, case), times in of_case.items()
        if all(key in times for key in wanted.values())
    ]


def overlaps(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """A table for each operation; its title names the case in which both are done first."""
    for op in ("dispatch", "combine"):
        pairs = pairs_of(lines, op)
        if not pairs:
            continue
        best = min(pairs, key=lambda pair: pair.both)
        yield (
            f"{op} beside a product, us: alone, beside, slower by; both are done first with {best.case}",
            [
                Column("case", [pair.case for pair in pairs]),
                *_slowed(op, [(pair.alone, pair.beside) for pair in pairs]),
                *_slowed(PRODUCT, [(pair.product, pair.product_beside) for pair in pairs]),
                Column("both", [f"{pair.both:,.1f}" for pair in pairs], right=True),
                Column("saved", [f"{pair.saved:.0%}" for pair in pairs], right=True),
            ],
        )


def _slowed(name: str, times: Sequence[tuple[float, float]]) -> Iterator[Column]:
    yield Column(name, [f"{alone:,.1f}" for alone, _ in times], right=True)
    yield Column("beside", [f"{beside:,.1f}" for _, beside in times], right=True)
    yield Column("slower", [f"{beside / alone - 1:+.0%}" for alone, beside in times], right=True)
