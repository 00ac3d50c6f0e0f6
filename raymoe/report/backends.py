"""Compares the backends of a run in one sentence for each workload."""

from __future__ import annotations

from collections.abc import Sequence

from raymoe.report.columns import other_settings
from raymoe.report.measures import integer, us
from raymoe.report.results import Line

COMPARED = ("backend", "transport", "tokens", "sms", "graph", "wire", "chunks")
OPS = ("exchange", "step")  # both operations of an exchange, or a whole layer


def sentences(lines: Sequence[Line]) -> list[str]:
    """Compare the two quickest backends of each workload, at the least and at the most tokens that both have.

    >>> from raymoe.report.results import complete
    >>> def line(backend, tokens, us):
    ...     case = f"backend={backend},tokens={tokens}"
    ...     measured = {"case": case, "workload": "exchange", "op": "exchange", "backend": backend}
    ...     times = {"tokens": tokens, "us_p50": us}
    ...     return complete(measured | times, run="a-b", generation=0, commit=None)
    >>> sentences([line("host", 8, 50.0), line("collective", 8, 45.0), line("host", 512, 100.0)])
    ['exchange: collective is 1.11x as fast as host at 8 tokens a rank']
    >>> sentences([line("host", 8, 50.0), line("collective", 8, 45.0),
    ...            line("host", 512, 100.0), line("collective", 512, 170.0)])
    ['exchange: host is 1.70x as fast as collective at 512 tokens a rank, and 0.90x at 8']
    >>> sentences([line("host", 8, 50.0)])
    []
    """
    groups: dict[tuple[object, ...], dict[int, dict[str, float]]] = {}
    for line in lines:
        alone = line["beside"] is None and not line["leaves_out"] and line["l2"] in ("cold", None)
        if line["op"] in OPS and line["us_p50"] and line["tokens"] and line["verified"] is not False and alone:
            key = line["workload"], line["op"], *other_settings(line, COMPARED)
            times = groups.setdefault(key, {}).setdefault(integer(line, "tokens"), {})
            backend = str(line["backend"])
            times[backend] = min(us(line), times.get(backend, us(line)))
    told: dict[object, str] = {}
    for (workload, op, *_), by_tokens in groups.items():
        sentence = _sentence(by_tokens)
        if sentence is not None:
            told.setdefault(workload, f"{op}: {sentence}")
    return list(told.values())


def _sentence(by_tokens: dict[int, dict[str, float]]) -> str | None:
    several = [tokens for tokens, times in by_tokens.items() if len(times) > 1]
    if not several:
        return None
    most = max(several)
    first, second = sorted(by_tokens[most], key=by_tokens[most].__getitem__)[:2]
    both = [tokens for tokens in several if {first, second} <= by_tokens[tokens].keys()]

    def ratio(tokens: int) -> str:
        return f"{by_tokens[tokens][second] / by_tokens[tokens][first]:.2f}x"

    least = min(both)
    also = f", and {ratio(least)} at {least}" if least != most else ""
    return f"{first} is {ratio(most)} as fast as {second} at {most} tokens a rank{also}"
