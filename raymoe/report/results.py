"""One line of results.jsonl: which keys it has, in which order, and how it is written and read back."""

import json
import math
from collections.abc import Mapping

KEYS = (
    *("run", "generation", "case", "workload", "op", "backend", "transport", "wire", "graph", "pattern", "src", "dst"),
    *("bytes", "ranks", "tokens", "hidden", "experts", "topk", "dtype", "routing", "seed"),
    *("layout", "alignment", "padding", "sms", "beside", "l2", "leaves_out", "skipped"),
    *("samples", "us_p50", "us_p99", "us_min", "us_max", "host_us_p50", "timeline"),
    *("bytes_wire", "gbps_wire", "verified", "max_error", "device", "commit"),
)

LATER_KEYS = frozenset({"beside", "l2", "leaves_out", "skipped", "host_us_p50", "timeline"})
"""Keys that lines of earlier versions do not have. They are read as null."""

Line = dict[str, object]


def complete(measured: Mapping[str, object], *, run: str, generation: int, commit: str | None) -> Line:
    """The whole line in the order of `KEYS`: what a rank measured, what only the driver knows, null for the rest.

    >>> line = complete({"case": "default", "op": "copy"}, run="a-b", generation=0, commit=None)
    >>> list(line) == list(KEYS), line["case"], line["run"], line["hidden"]
    (True, 'default', 'a-b', None)
    >>> complete({"case": "default", "colour": "red"}, run="a-b", generation=0, commit=None)
    Traceback (most recent call last):
    ValueError: a result line of case 'default' has a key that results.jsonl does not: colour
    """
    case = measured.get("case")
    if not isinstance(case, str):
        raise ValueError(f"a result line names no case: {dict(measured)!r}")
    if unknown := sorted(set(measured) - set(KEYS)):
        raise ValueError(
            f"a result line of case {case!r} has a key that results.jsonl does not: {', '.join(map(str, unknown))}"
        )
    for key, value in measured.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"a result line of case {case!r} has {key} = {value}, which JSON cannot hold")
    known = {**measured, "run": run, "generation": generation, "commit": commit}
    return {key: known.get(key) for key in KEYS}


def encode(line: Line) -> str:
    """A line of results.jsonl, line end included; refuses a line that `complete` has not made whole."""
    if list(line) != list(KEYS):
        raise ValueError(f"a result line must have the keys of results.jsonl in their order, found {list(line)}")
    return json.dumps(line, allow_nan=False) + "\n"


def decode(text: str) -> Line:
    """Reads a line back; ValueError when it is none of ours (json.JSONDecodeError is one too)."""
    line = json.loads(text)
    if not isinstance(line, dict) or set(line) | LATER_KEYS != set(KEYS):
        raise ValueError("not a result line of raymoe: its keys are not those of results.jsonl")
    return {key: line.get(key) for key in KEYS}
