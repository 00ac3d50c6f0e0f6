"""Exchanges side by side: for each operation a small table, tokens downwards, backends across."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raymoe.report.columns import SETTINGS, WORD_IN_CASE, Column, byte_size, shares_of_link, show
from raymoe.report.results import Line
from raymoe.report.ways import gave

_ACROSS = ("op", "backend", "transport", "tokens", "sms", "l2", "graph")


@dataclass(frozen=True)
class Group:
    """Lines of one operation that differ in tokens, in backend and in what goes with that, and in the L2 cache."""

    op: str
    setting: str
    """What sets the group apart from others, as `wire float8_e4m3, routing zipf`; empty where nothing does."""
    lines: list[Line]
    told: frozenset[str]

    def label(self, line: Line) -> str:
        """The backend of a line, and whatever else the name of its case tells of it.

        >>> group = Group("dispatch", "", [], frozenset({"backend", "tokens"}))
        >>> group.label({"backend": "fused", "case": "backend=fused,tokens=8,sms=24"})
        'fused sms=24'
        """
        words = [word for word in str(line["case"]).split(",") if "=" in word]
        return " ".join([str(line["backend"]), *(word for word in words if word.partition("=")[0] not in self.told)])


def groups_of(lines: Sequence[Line]) -> list[Group]:
    """The exchanges between GPUs among these lines; none where there is one count of tokens only."""
    lines = [line for line in lines if line["workload"] == "exchange" and line["us_p50"] and line["l2"]]
    if len({line["tokens"] for line in lines}) < 2:
        return []
    differing = [key for key in SETTINGS if key not in _ACROSS and len({line[key] for line in lines}) > 1]
    told = frozenset({"backend", "tokens", *(WORD_IN_CASE.get(key, key) for key in differing)})
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        setting = ", ".join(f"{SETTINGS[key]} {show(key, line[key])}" for key in differing)
        found.setdefault((str(line["op"]), setting), []).append(line)
    return [Group(op, setting, group, told) for (op, setting), group in found.items()]


def tables(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """Title and columns of each table; none where there is one backend only.

    A cell is `us (GB/s, share)`: the median time of the slowest rank, what passed the busiest port in it, and what
    share that is of the most that such links were seen to give, where that is known.
    """
    if len({line["backend"] for line in lines}) < 2:
        return
    for group in groups_of(lines):
        setting = f", {group.setting}" if group.setting else ""
        for l2 in dict.fromkeys(str(line["l2"]) for line in group.lines):
            limits = {most for line in group.lines if (most := gave(line["device"]))}
            share = f", of {limits.pop():.0f}" if len(limits) == 1 else ""
            yield f"{group.op}, {l2} L2{setting}: us (GB/s{share})", _columns(group, l2)


def _columns(group: Group, l2: str) -> list[Column]:
    tokens = sorted({int(str(line["tokens"])) for line in group.lines})
    cells: dict[str, dict[int, str]] = {}
    wire: dict[int, str] = {}
    for line in group.lines:
        if line["l2"] == l2:
            count = int(str(line["tokens"]))
            cells.setdefault(group.label(line), {})[count] = _cell(line)
            wire.setdefault(count, byte_size(line["bytes_wire"]))
    return [
        Column("tokens", [str(count) for count in tokens], right=True),
        Column("on wire", [wire.get(count, "-") for count in tokens], right=True),
        *(Column(label, [row.get(count, "-") for count in tokens], right=True) for label, row in cells.items()),
    ]


def _cell(line: Line) -> str:
    us = float(str(line["us_p50"]))
    [share] = shares_of_link([line])
    of = "" if share is None else f", {share:.0%}"
    rate = "" if line["gbps_wire"] is None else f" ({float(str(line['gbps_wire'])):.0f}{of})"
    return f"{us:,.1f}{rate}"
