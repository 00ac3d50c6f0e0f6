"""The combinations of a matrix, on plain values."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raymoe.job.scalars import Scalar

MAX_CASES = 1000


def size(matrix: Mapping[str, Sequence[Scalar]]) -> int:
    """How many cases there are."""
    return math.prod(len(values) for values in matrix.values())


def combinations(base: dict[str, Any], matrix: Mapping[str, Sequence[Scalar]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and values of every case: the values of `base`, with one of each key of the matrix put in.

    >>> base = {"shape": {"tokens": 1, "topk": 2}, "workload": "layer"}
    >>> for name, plain in combinations(base, {"workload": ["layer"], "shape.tokens": [128, 512]}):
    ...     print(name, plain["shape"])
    workload=layer,tokens=128 {'tokens': 128, 'topk': 2}
    workload=layer,tokens=512 {'tokens': 512, 'topk': 2}
    """
    short = [key.rpartition(".")[2] for key in matrix]
    labels = [key if short.count(leaf) > 1 else leaf for key, leaf in zip(matrix, short, strict=True)]
    for values in itertools.product(*matrix.values()):
        plain = base
        for key, value in zip(matrix, values, strict=True):
            plain = put(plain, key, value)
        yield ",".join(f"{label}={said(value)}" for label, value in zip(labels, values, strict=True)), plain


def put(plain: dict[str, Any], dotted: str, value: object) -> dict[str, Any]:
    """A copy of `plain` with one key changed; what is not on the way to it is shared."""
    first, _, rest = dotted.partition(".")
    return {**plain, first: put(plain.get(first) or {}, rest, value) if rest else value}


def said(value: Scalar) -> str:
    """A value as YAML says it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
