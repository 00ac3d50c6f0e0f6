"""Launch copies on a stream of their own, with the words that they wait for and write."""

from __future__ import annotations

from dataclasses import replace

import torch

from raymoe.cuda.launch import Kernels, Launch
from raymoe.cuda.structs import Watch
from raymoe.transport.copy_kernel import Ring, Spread, Transfer, copy_launch

DEFAULT = Ring(stages=4, stage_bytes=1024)


class Words:
    """Zeroed words in device memory, 128 bytes apart: counts of operations, credits, signals."""

    def __init__(self, count: int) -> None:
        self._tensor = torch.zeros(count, 16, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()

    def at(self, index: int) -> int:
        return self._tensor[index].data_ptr()

    def __getitem__(self, index: int) -> int:
        return int(self._tensor[index, 0])

    def __setitem__(self, index: int, value: int) -> None:
        self._tensor[index, 0] = value
        torch.cuda.synchronize()

    def ticket(self, index: int) -> int:
        """Return the ticket of an operation: the word after its epoch."""
        return int(self._tensor[index, 1])


class Copies:
    """Makes launches of the copy kernel, each of one transfer."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.stream = torch.cuda.Stream()

    def of(self, into: torch.Tensor, source: torch.Tensor, *, blocks: int = 2, ring: Ring = DEFAULT) -> Launch:
        """Return a plain copy of all of `source`."""
        return copy_launch(self.kernels, [self.transfer(into, source)], Spread(blocks, ring))

    def transfer(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        assert into.nbytes == source.nbytes
        return Transfer(into.data_ptr(), source.data_ptr(), source.nbytes)

    def signalling(self, words: Words, operation: int, signal: int, copied: Launch | None = None) -> Launch:
        """Return a copy that signals; without `copied`, a signal alone."""
        return self._extended(copied, operation=words.at(operation), signal=words.at(signal))

    def waiting(self, words: Words, operation: int, credit: int, watch: Watch, copied: Launch | None = None) -> Launch:
        """Return a copy that waits for its credit; without `copied`, a wait alone."""
        return self._extended(copied, watch=watch, operation=words.at(operation), credit=words.at(credit))

    def _extended(self, copied: Launch | None, watch: Watch | None = None, **fields: object) -> Launch:
        return self.altered(copied or copy_launch(self.kernels, [Transfer(0, 0, 0)]), watch, **fields)

    def altered(self, launch: Launch, watch: Watch | None = None, **fields: object) -> Launch:
        """Return the same launch with other fields of its transfer."""
        params = launch.params
        spread = Spread(max(1, params.movers), Ring(params.stages, params.stage_bytes))
        return copy_launch(self.kernels, [replace(params.transfers[0], **fields)], spread, watch or params.watch)

    def run(self, launch: Launch) -> None:
        """Run a launch after all that torch has enqueued, and wait for it."""
        torch.cuda.synchronize()
        launch(self.stream.cuda_stream)
        self.stream.synchronize()
