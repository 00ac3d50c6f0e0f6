"""Which keys mean something only where another key has a certain value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Meaning:
    """`key` means something only where `decider` is one of `values`.

    A section for another workload may stand in a file, so that one file can be the parent of several. A key that is
    `strict` may not: whoever gives an alpha to uniform routing expects something that does not happen.
    """

    key: str
    decider: str
    values: tuple[str, ...]
    strict: bool = False


MEANINGS = (
    Meaning("shape", "workload", ("exchange", "overlap", "layer")),
    Meaning("routing", "workload", ("exchange", "overlap", "layer")),
    Meaning("exchange", "workload", ("exchange", "overlap", "layer")),
    Meaning("p2p", "workload", ("p2p",)),
    Meaning("overlap", "workload", ("overlap",)),
    Meaning("shape.ffn", "workload", ("layer",)),
    Meaning("routing.alpha", "routing.kind", ("zipf",), strict=True),
    Meaning("routing.share", "routing.kind", ("hot",), strict=True),
    Meaning("routing.file", "routing.kind", ("trace",), strict=True),
    Meaning("p2p.pairs", "p2p.pattern", ("pairs",), strict=True),
    Meaning("exchange.output", "exchange.wire.dispatch", ("float8_e4m3",), strict=True),
    Meaning("steps.trace", "workload", ("exchange",), strict=True),
    Meaning("steps.trace", "world.device", ("auto", "cuda"), strict=True),
    Meaning("steps.trace", "exchange.backend", ("auto", "fused"), strict=True),
)


def deciding(plain: dict[str, Any], meaning: Meaning) -> list[Any]:
    """The values that the decider takes, over all cases."""
    swept = plain.get("matrix", {}).get(meaning.decider)
    return list(swept) if swept else [find(plain, meaning.decider)]


def meaningful(plain: dict[str, Any]) -> dict[str, Any]:
    """A job's values without the keys that mean nothing in any of its cases, and without empty mappings.

    >>> meaningful({"workload": "layer", "routing": {"kind": "hot", "alpha": 1.0, "share": 0.5}, "p2p": {}})
    {'workload': 'layer', 'routing': {'kind': 'hot', 'share': 0.5}}
    """
    for meaning in MEANINGS:
        if not set(deciding(plain, meaning)) & set(meaning.values):
            plain = without(plain, meaning.key.split("."))
    return _pruned(plain)


def _pruned(plain: dict[str, Any]) -> dict[str, Any]:
    kept = {key: _pruned(value) if isinstance(value, dict) else value for key, value in plain.items()}
    return {key: value for key, value in kept.items() if value != {}}


def find(plain: dict[str, Any], dotted: str) -> Any:
    """The value of a dotted key, None if it is not there."""
    value: Any = plain
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def without(plain: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """A copy of `plain` without one key; what is not on the way to it is shared. Lists go as a whole.

    >>> without({"p2p": {"bytes": [1, "x"], "pattern": "pairs"}}, ["p2p", "bytes", "1"])
    {'p2p': {'pattern': 'pairs'}}
    """
    first, *rest = path
    inner = plain.get(first)
    if rest and isinstance(inner, dict):
        return {**plain, first: without(inner, rest)}
    return {key: value for key, value in plain.items() if key != first}
