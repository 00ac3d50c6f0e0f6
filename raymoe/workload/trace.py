"""Expert ids from a file: what a real router chose, replayed.

The file is a numpy `.npy` array of integers (any integer type, no pickles), of shape

- `[N, K]`: the same ids at every step, or
- `[S, N, K]`: step i, warm-up included, takes entry i mod S,

where K is the job's top-k and N is either T (every rank takes all of them) or R * T (rank r takes rows r*T to (r+1)*T).
-1 means no expert. The weights are drawn at random, as for the other kinds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from raymoe.job.errors import ConfigError, DataRefused


@dataclass(frozen=True)
class TraceShape:
    """What the job says that a trace must hold."""

    ranks: int
    tokens: int
    topk: int
    experts: int


@dataclass(frozen=True)
class Trace:
    """A trace in memory, already checked: `table` is int64[S, N, K]."""

    table: torch.Tensor
    shape: TraceShape

    @classmethod
    def load(cls, path: str, shape: TraceShape) -> Trace:
        """Read and check the whole file. Every rank checks all of it, so that all of them refuse it or none."""
        table = _read(path)
        tokens, topk = table.shape[-2:] if table.ndim in (2, 3) else (0, 0)
        if topk != shape.topk or tokens not in (shape.tokens, shape.ranks * shape.tokens):
            raise ConfigError(
                f"{path}: the job needs ids of shape [{shape.tokens} or {shape.ranks * shape.tokens}, {shape.topk}], "
                f"with or without steps in front, and the file holds {list(table.shape)}: change shape.tokens and "
                "shape.topk, or cut the file"
            )
        table = table.reshape(-1, tokens, topk)
        if table.size == 0:
            raise ConfigError(f"{path}: the trace holds no steps: give at least one")
        low, high = int(table.min()), int(table.max())
        if low < -1 or high >= shape.experts:
            raise DataRefused(
                f"{path}: ids go from {low} to {high}, and with {shape.experts} experts they must be in "
                f"[-1, {shape.experts - 1}]: change shape.experts or the file"
            )
        return cls(torch.from_numpy(table.astype(numpy.int64)), shape)

    def ids(self, rank: int, step: int) -> torch.Tensor:
        """int64[T, K] of a rank at a step."""
        ids = self.table[step % self.table.shape[0]]
        if ids.shape[0] == self.shape.tokens:
            return ids
        return ids[rank * self.shape.tokens : (rank + 1) * self.shape.tokens]


def _read(path: str) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.signedinteger]]:
    way_out = "save the ids with numpy.save, integers of shape [tokens, topk] or [steps, tokens, topk]"
    try:
        table = numpy.load(path, allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"{path}: the trace cannot be read ({error.strerror or error}): {way_out}") from error
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{path}: not a .npy file ({error}): {way_out}") from error
    if not isinstance(table, numpy.ndarray) or not numpy.issubdtype(table.dtype, numpy.integer):
        found = getattr(table, "dtype", type(table).__name__)
        raise ConfigError(f"{path}: the trace holds {found} and must hold integers: {way_out}")
    return table
