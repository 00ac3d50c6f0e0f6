"""The small arrays that tell which row goes where. NumPy holds them: at these sizes its calls cost least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


def starts_of(counts: Array) -> Array:
    """Where each of several runs begins when they lie one behind the other, and where the last ends.

    >>> starts_of(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def places_in_runs(counts: Array, starts: Array) -> Array:
    """Where the elements of runs lie, when run i has `counts[i]` of them and begins at `starts[i]`.

    >>> places_in_runs(np.array([2, 1]), np.array([0, 16])).tolist()
    [0, 1, 16]
    """
    shift = starts[: len(counts)] - starts_of(counts)[:-1]
    places: Array = np.arange(int(counts.sum())) + np.repeat(shift, counts)
    return places


@dataclass
class Bags:
    """Sums to take: bag i adds the rows `index[starts[i]:starts[i + 1]]` of some table, in that order."""

    index: Array
    starts: Array
    weights: Array | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def spread(self, where: Array, total: int) -> Bags:
        """`total` bags, all empty but those at `where` (rising), which are these.

        >>> Bags(np.array([5, 6, 7]), np.array([0, 1, 3])).spread(np.array([1, 3]), total=4).starts.tolist()
        [0, 0, 1, 1, 3]
        """
        sizes = np.zeros(total, np.int64)
        sizes[where] = np.diff(self.starts)
        return Bags(self.index, starts_of(sizes), self.weights)
