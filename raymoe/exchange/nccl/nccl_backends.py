"""Backends `allgather` and `collective` on GPUs: NCCL moves rows, raymoe's kernels number, place and sum them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing import reductions

from raymoe.cuda.current import CapturedMemory
from raymoe.cuda.launcher import Launcher
from raymoe.errors import ConfigError, RaymoeError
from raymoe.exchange.backend import Dispatched, Ids, Tokens
from raymoe.exchange.nccl.nccl_kernels import RoundKernels, SavedMemory
from raymoe.exchange.nccl.rounds import DispatchRecord
from raymoe.exchange.refusal import CARRIES, SITE_SHIFT, Cause, Refusal, raise_backward, raise_first
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.layout import Layout, Region
from raymoe.memory.wait import Words
from raymoe.memory.world import World
from raymoe.net.nccl_rounds import NcclRounds

_StorageWeakRef: Any = reductions.StorageWeakRef  # torch lacks annotations


@dataclass(frozen=True)
class CombinedGradients:
    """The gradients of weights that a combine of a backward pass returns beside the rows."""

    numbers: torch.Tensor | None
    """float32[C]: the number of each place."""
    out: torch.Tensor | None
    """float32[T', K]: the memory for the numbers of this rank's entries."""


NO_GRADIENTS = CombinedGradients(None, None)


# Backend `allgather`: every rank receives all rows. It is the baseline of a small world.
#
# A dispatch is two all-gathers: one of ids and weights, one of all rows. Every rank picks its own rows. A combine sends
# every rank a block of T sums, and the source adds the blocks in rank order. It reads only the sums of tokens that have
# an expert at the sender. NCCL's reduce-scatter is not used, because it rounds at every hop and in an order of its own.
#
# The host reads nothing from the device, so a graph can hold all of it.


class NcclAllgather:
    """Puts row t of source s into row s*T + t of the table."""

    capturable = True
    keeps_places = True
    sms: int | None = None

    def __init__(self, world: World, spec: ExchangeSpec, rounds: NcclRounds, launcher: Launcher) -> None:
        self._spec, self._rounds, self._launcher = spec, rounds, launcher
        self._kernels = RoundKernels(world, spec, launcher, compact=False)
        self._memory = CapturedMemory(world.device)
        blocks = self._kernels.blocks
        self._arriving, first = blocks.table[:-1], world.rank * spec.tokens
        self._own = blocks.table[first : first + spec.tokens]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self._own_rows = self._own.view(dtype)
        peers = [rank for rank in range(world.size) if rank != world.rank]
        self._sends, self._receives = (
            {rank: block[rank] for rank in peers} for block in (blocks.outgoing, blocks.returned)
        )

    @torch.no_grad()
    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        with self._launcher.ordered("dispatch") as stream, self._memory():
            return self._dispatch(stream, tokens, out)

    @torch.no_grad()
    def dispatch_again(self, tokens: Tokens, out: torch.Tensor | None, forward: Dispatched) -> Dispatched:
        state = forward.saved(SavedMemory)
        with self._launcher.ordered("dispatch") as stream, self._memory():
            got = self._dispatch(stream, tokens, out, state.used_on(stream), forward.site)
            self._kernels.compare_passes(stream, self._kernels.rows_of(got), got.saved(SavedMemory).memory)
            return got

    def _dispatch(
        self,
        stream: int,
        tokens: Tokens,
        out: torch.Tensor | None,
        forward: torch.Tensor | None = None,
        site: int = 0,
    ) -> Dispatched:
        kernels = self._kernels
        saved = kernels.new_memory()
        kernels.write_metadata(stream, tokens, saved, forward, site)
        self._rounds.all_gather(*kernels.metadata(saved))
        got = kernels.new(tokens, out, self)
        got._saved = SavedMemory(saved, stream)
        self._gather(tokens.x)
        kernels.number(stream, got, saved)
        if out is not None:
            kernels.place(stream, got, saved)
        return got

    def _gather(self, x: torch.Tensor) -> None:
        """Gather the rows of all ranks into the table."""
        rows, fewer = len(x), len(x) < self._spec.tokens
        if fewer:
            self._own_rows[:rows].copy_(x)
        self._rounds.all_gather(self._arriving, self._own if fewer else x.view(torch.uint8))

    @torch.no_grad()
    def dispatch_known(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> None:
        state = got.saved(SavedMemory)
        with self._launcher.ordered("dispatch") as stream:
            saved = state.used_on(stream)
            # Ranks that dispatch gather their ids and weights here: all operations of a kind are the same for NCCL.
            self._rounds.all_gather(*self._kernels.write_pass(stream, saved, got.site))
            self._gather(x)
            self._kernels.place(stream, replace(got, x=out), saved)
            self._kernels.compare_passes(stream, out)

    def refusal_words(self, got: Dispatched) -> torch.Tensor:
        return self._kernels.refusal_words(got.saved(SavedMemory).memory)

    def mark(self, got: Dispatched, digest: torch.Tensor) -> None:
        with self._launcher.ordered("dispatch") as stream:
            self._kernels.mark(got.saved(SavedMemory).used_on(stream), digest)

    @torch.no_grad()
    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        self._combine(rows, got, weighted, out)

    def _combine(
        self,
        rows: torch.Tensor,
        got: Dispatched,
        weighted: bool,
        out: torch.Tensor,
        gradients: CombinedGradients = NO_GRADIENTS,
    ) -> None:
        state = got.saved(SavedMemory)
        with self._launcher.ordered("combine") as stream:
            saved = state.used_on(stream)
            self._kernels.sum_entries(stream, rows, saved, weighted, gradients.numbers, got.site)
            if self._sends:
                self._rounds.exchange(self._receives, self._sends)
            self._kernels.sum_ranks(stream, saved, out, gradients.out)

    @property
    def metadata_words(self) -> int:
        return self._kernels.metadata_words

    def pack(self, got: Dispatched) -> torch.Tensor:
        return self._kernels.packed(got.saved(SavedMemory).memory, got)

    def unpack(self, metadata: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: Ids) -> Dispatched:  # noqa: ARG002
        return self._kernels.unpacked(metadata, weights, ids, self)

    @torch.no_grad()
    def combine_gradients(
        self, rows: torch.Tensor, weights: torch.Tensor, got: Dispatched, out: torch.Tensor, out_weights: torch.Tensor
    ) -> None:
        self._combine(rows, got, False, out, CombinedGradients(weights.contiguous(), out_weights))

    def check(self) -> None:
        """Wait for the device, then raise for the first refused step, the same on all ranks."""
        self._rounds.wait_for_all("check")
        passes, statuses = (
            self._kernels.take_refused_passes(self._rounds.read),
            self._kernels.take_refused(self._rounds.read),
        )
        raise_backward(passes)
        if statuses:
            raise_first(statuses, self._spec)

    def refusal_record(self) -> torch.Tensor:
        """Return the words that a refused combine writes where the first one is 0 (domains/hierarchical_gpu.py)."""
        return self._kernels.refused_words

    def backward_record(self) -> torch.Tensor:
        """Return the words that a refused dispatch in a backward pass writes where the first one is 0."""
        return self._kernels.refused_passes

    def mark_passes(self, word: torch.Tensor) -> None:
        self._kernels.mark_passes(word)

    def check_waits(self) -> None:
        """Do nothing: the host alone notices a wait that fails, in `check`."""

    def close(self, together: bool) -> None:
        """Wait for the device, because torch's memory does not wait for other streams. The world owns the rounds."""
        if together:
            with suppress(RaymoeError):  # `check` reports failures; a failed wait has ended the device's work
                self._rounds.wait_for_all("close")
        self._memory.close()


# Backend `collective`: all-to-alls, as a careful user of torch.distributed would write them.
#
# A dispatch gathers the ids and weights of all ranks by an all-gather of a fixed size. From them each rank counts on
# the device how many rows go to each rank. The host waits for these counts once, while rows are packed. The rows
# follow, each once for each (token, destination rank). A combine reuses the counts.
#
# Because of that wait it cannot be captured.

_NUMBER_BITS, _FORM_BITS = 32, 2
_MOST_KNOWN = 64
"""Beside twice the live storages of metadata, how many are noted before those of dead tensors are forgotten."""


@dataclass(frozen=True)
class HostNumbers:
    """The numbers of a dispatch on the host."""

    number: int
    """The dispatch, counted from 1."""
    send_counts: Sequence[int]  # rows to each rank
    receive_counts: Sequence[int]  # rows from each rank

    @classmethod
    def of_record(cls, record: torch.Tensor, ranks: int) -> HostNumbers:
        """Take the numbers from the bytes of a `DispatchRecord`."""
        at, words = DispatchRecord.offsets(), record.view(torch.int32)
        sent, received = (words[at[name] // 4 :][:ranks].tolist() for name in ("rows_to", "rows_from"))
        return cls(int(record.view(torch.int64)[at["number"] // 8]), sent, received)


class NumbersByMetadata:
    """The host's numbers of dispatches, by the storage of their metadata, as long as that lives.

    A combine gets the metadata as a tensor on the device, which the host could read only by waiting for it. Nobody
    writes to metadata, so a storage has one dispatch. Its address is its key: a weak reference leaves it to no other.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, HostNumbers]] = {}
        self._most = _MOST_KNOWN

    def add(self, metadata: torch.Tensor, numbers: HostNumbers) -> None:
        if len(self._known) >= self._most:
            self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
            self._most = 2 * len(self._known) + _MOST_KNOWN
        reference = _StorageWeakRef(metadata.untyped_storage())
        self._known[reference.cdata] = reference, numbers

    def of(self, metadata: torch.Tensor) -> HostNumbers | None:
        """Return the numbers of this metadata; None where the tensor is a copy of it."""
        storage: Any = metadata.untyped_storage()
        known = self._known.get(storage._cdata)
        return None if known is None else known[1]


@dataclass(frozen=True)
class SavedCounts(SavedMemory):
    """The memory that a dispatch saves for its combine, and the numbers on the host."""

    numbers: HostNumbers


class NcclCollective:
    """Puts rows one after the other into their source's block of the table.

    A backward pass counts again: NCCL would hang if ranks sent the rows of different dispatches.

    Ranks that combine different dispatches would send blocks of other sizes than their peers expect, and NCCL would
    hang. So each rank's host announces its combine in shared memory. While the device sums, it compares the
    announcements of all ranks.

    Word (rank, parity) is {combines so far, dispatch, form}. That rank writes it, at every rank, after the word of its
    call site. There are two of each, because a peer may be one combine ahead. The form is whether the combine is
    weighted, plus CARRIES if it returns numbers of entries.
    """

    capturable = False
    keeps_places = False
    sms: int | None = None

    def __init__(self, world: World, spec: ExchangeSpec, rounds: NcclRounds, launcher: Launcher) -> None:
        self._world, self._spec, self._rounds, self._launcher = world, spec, rounds, launcher
        self._kernels = RoundKernels(world, spec, launcher, compact=True)
        blocks, size = self._kernels.blocks, world.size
        self._peers = [rank for rank in range(size) if rank != world.rank]
        self._arriving = blocks.table[:-1].view(size, spec.tokens, -1).unbind()
        self._packed = blocks.packed.unbind()
        self._sums, self._returned = (sums.view(size, -1).unbind() for sums in (blocks.outgoing, blocks.returned))
        self._numbers, self._returned_numbers = blocks.outgoing_numbers.unbind(), blocks.returned_numbers.unbind()
        self._host_counts = launcher.words(1 + 2 * size)
        self._dispatches = self._combines = 0
        self._numbers_of = NumbersByMetadata()
        words = [Region.words(name, 2 * size) for name in ("combines", "sites")]
        self._heap = world.allocate(Layout.of(words), "collective: combines")
        self._words, self._sites = (
            [self._heap.words(name, peer) for peer in range(size)] for name in ("combines", "sites")
        )
        self._differing: list[Refusal] = []

    @torch.no_grad()
    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        with self._launcher.ordered("dispatch") as stream:
            return self._dispatch(stream, tokens, out)

    def dispatch_known(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> None:  # noqa: ARG002
        raise ConfigError("dispatch_known by collective, whose ranks count before they send; call dispatch_again")

    @torch.no_grad()
    def dispatch_again(self, tokens: Tokens, out: torch.Tensor | None, forward: Dispatched) -> Dispatched:
        """Dispatch in a backward pass. The passes of all ranks come with their ids, and a kernel compares them."""
        state = forward.saved(SavedCounts)
        with self._launcher.ordered("dispatch") as stream:
            got = self._dispatch(stream, tokens, out, state.used_on(stream), forward.site)
            self._kernels.compare_passes(stream, self._kernels.rows_of(got), got.saved(SavedCounts).memory)
            return got

    def refusal_words(self, got: Dispatched) -> torch.Tensor:
        return self._kernels.refusal_words(got.saved(SavedCounts).memory)

    def mark(self, got: Dispatched, digest: torch.Tensor) -> None:
        with self._launcher.ordered("dispatch") as stream:
            self._kernels.mark(got.saved(SavedCounts).used_on(stream), digest)

    @torch.no_grad()
    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        self._combine(rows, got, weighted, out)

    @property
    def metadata_words(self) -> int:
        return self._kernels.metadata_words

    def pack(self, got: Dispatched) -> torch.Tensor:
        """Pack what the device needs. The host's numbers stay on the host, and in the dispatch's record."""
        state = got.saved(SavedCounts)
        metadata = self._kernels.packed(state.memory, got)
        self._numbers_of.add(metadata, state.numbers)
        return metadata

    def unpack(self, metadata: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: Ids) -> Dispatched:  # noqa: ARG002
        """Make the result of a dispatch again. For a copy of the metadata the host waits, with a limit."""
        got = self._kernels.unpacked(metadata, weights, ids, self)
        state = got.saved(SavedMemory)
        numbers = self._numbers_of.of(metadata)
        if numbers is None:  # a hook of autograd, for example, moves what a backward pass needs to the CPU and back
            record = self._rounds.read("combine", self._kernels.record_of(state.memory))
            numbers = HostNumbers.of_record(record, self._world.size)
        got._saved = SavedCounts(state.memory, state.stream, numbers)
        return got

    @torch.no_grad()
    def combine_gradients(
        self, rows: torch.Tensor, weights: torch.Tensor, got: Dispatched, out: torch.Tensor, out_weights: torch.Tensor
    ) -> None:
        self._combine(rows, got, False, out, CombinedGradients(weights.contiguous(), out_weights))

    def check(self) -> None:
        """Wait for the device, then raise for the first refused step, the same on all ranks."""
        self._rounds.wait_for_all("check")
        kernels, read = self._kernels, self._rounds.read
        passes, refused, differing = kernels.take_refused_passes(read), kernels.take_refused(read), self._differing
        self._differing = []
        raise_backward(passes)
        for statuses in (refused, differing):
            if statuses:
                raise_first(statuses, self._spec)

    def close(self, together: bool) -> None:
        """Wait for the device, because torch's memory does not wait for other streams. The world owns the rounds."""
        if together:
            with suppress(RaymoeError):  # `check` reports failures; a failed wait has ended the device's work
                self._rounds.wait_for_all("close")
        self._heap.close()

    def _dispatch(
        self,
        stream: int,
        tokens: Tokens,
        out: torch.Tensor | None,
        forward: torch.Tensor | None = None,
        site: int = 0,
    ) -> Dispatched:
        kernels = self._kernels
        saved = kernels.new_memory()
        self._dispatches += 1
        kernels.write_metadata(stream, tokens, saved, forward, site)
        self._rounds.all_gather(*kernels.metadata(saved))
        got = kernels.new(tokens, out, self)  # here, because the device is busy now
        kernels.number(stream, got, saved, self._host_counts)
        kernels.pack(stream, tokens, saved, own=out is None)
        self._rounds.wait("dispatch", lambda: self._host_counts.read(0, 1)[0] >= self._dispatches)
        self._world.waiter.fence()  # orders the load of the dispatch's number before the loads of the counts
        row_counts, size = self._host_counts.read(1, 2 * self._world.size), self._world.size
        send_counts, receive_counts = row_counts[:size], row_counts[size:]
        if self._peers:
            self._rounds.exchange(
                {rank: self._arriving[rank][: receive_counts[rank]] for rank in self._peers},
                {rank: self._packed[rank][: send_counts[rank]] for rank in self._peers},
            )
        if out is not None:
            kernels.place(stream, got, saved, own=tokens.x)
        got._saved = SavedCounts(saved, stream, HostNumbers(self._dispatches, send_counts, receive_counts))
        return got

    def _combine(
        self,
        rows: torch.Tensor,
        got: Dispatched,
        weighted: bool,
        out: torch.Tensor,
        gradients: CombinedGradients = NO_GRADIENTS,
    ) -> None:
        state = got.saved(SavedCounts)
        form = weighted + (0 if gradients.numbers is None else CARRIES)
        self._announce_combine(state.numbers.number, form, got.site)
        with self._launcher.ordered("combine") as stream:
            saved = state.used_on(stream)
            self._kernels.sum_entries(stream, rows, saved, weighted, gradients.numbers, got.site)
            if not self._all_combine_the_same():
                out.fill_(torch.nan)
                if gradients.out is not None:
                    gradients.out.fill_(torch.nan)
                return
            if self._peers:
                self._exchange(state.numbers, gradients.numbers is not None)
            self._kernels.sum_ranks(stream, saved, out, gradients.out)

    def _exchange(self, counts: HostNumbers, entries: bool) -> None:
        """Exchange the sums of a combine, and the numbers of its entries."""
        row, status = self._spec.combine_row_bytes, Refusal.NBYTES
        self._rounds.exchange(
            {rank: self._returned[rank][: counts.send_counts[rank] * row + status] for rank in self._peers},
            {rank: self._sums[rank][: counts.receive_counts[rank] * row + status] for rank in self._peers},
        )
        if entries:
            self._rounds.exchange(
                {rank: self._returned_numbers[rank] for rank in self._peers},
                {rank: self._numbers[rank] for rank in self._peers},
            )

    def _announce_combine(self, number: int, form: int, site: int) -> None:
        """Announce to all ranks which dispatch this rank combines, in which form, and from which call site."""
        self._combines += 1
        word = (self._combines << _NUMBER_BITS | number % (1 << _NUMBER_BITS)) << _FORM_BITS | form
        at = 2 * self._world.rank + self._combines % 2
        for sites in self._sites:
            sites[at] = site
        self._world.waiter.fence()  # orders the sites before the words that announce them
        for words in self._words:
            words[at] = word

    def _announced(self, words: Sequence[Words]) -> list[int]:
        """Return the words of all ranks for this combine."""
        own, turn = words[self._world.rank], self._combines % 2
        return [own[2 * rank + turn] for rank in range(self._world.size)]

    def _combines_begun(self) -> list[int]:
        """Return how many combines each rank has begun, by these words."""
        return [word >> _NUMBER_BITS + _FORM_BITS for word in self._announced(self._words)]

    def _lagging(self) -> tuple[int, int, int]:
        combined = self._combines_begun()
        seen = min(combined)
        return combined.index(seen), seen, self._combines

    def _all_combine_the_same(self) -> bool:
        """Whether all ranks combine one dispatch in one way. All ranks get the same answer."""
        self._rounds.wait("combine", lambda: min(self._combines_begun()) >= self._combines, self._lagging)
        self._world.waiter.fence()  # orders the loads of these words before those of the sites
        words, sites = self._announced(self._words), self._announced(self._sites)
        if len(set(words)) == len(set(sites)) == 1:
            return True
        forms, last = (1 << _FORM_BITS) - 1, (1 << _NUMBER_BITS) - 1
        self._differing = self._differing or [
            Refusal(Cause.NONE, word & forms | site << SITE_SHIFT, word >> _FORM_BITS & last)
            for word, site in zip(words, sites, strict=True)
        ]
        return False
