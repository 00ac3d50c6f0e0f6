"""The interface of a backend: dispatch and combine, their arguments and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import torch

from raymoe.cuda.current import capturing, keep_for_current_stream
from raymoe.errors import CaptureError, ConfigError, DataRefused
from raymoe.exchange.refusal import CAUSE_WORD, NUMBER_WORD, Cause

if TYPE_CHECKING:
    from raymoe.exchange.peer.column_pieces import ColumnPieces

HARMLESS_ERRORS = (ConfigError, CaptureError, DataRefused)
"""Errors that leave no peer inside an operation: mistakes found before it began, and data that all ranks refuse."""

S = TypeVar("S")

# The result of a dispatch.


@dataclass
class Dispatched:
    """The rows for this rank's experts and their metadata, all on the world's device.

    The object owns its metadata, so several results can be in use at once.

    - Layout `expert`: row i is `x[i]`. It lies in the caller's memory, or in the exchange's own, which a dispatch
      overwrites `depth` dispatches later.
    - Layout `rank`: row i is `x[index[i]]`, where `x` is all slots. Rows stay until this rank's next dispatch (or
      `dispatch_send`), and the index of a gap points to a row of zeros.
    - Layout `token`: row i is `x[i]`, one for each token that has experts here, in the order (source rank, token). Its
      experts are `topk_idx[i]`, numbers on this rank, and -1 for those elsewhere; their weights are `weights[i]`. It is
      token `sources[i, 1]` of rank `sources[i, 0]`.
      `expert_offsets` is [0, the number of rows], and `expert_counts` says how often each expert is named.

    `expert_offsets` and `expert_counts` locate the rows of each local expert. Reading them on the device needs no wait:

    >>> from raymoe import Exchange, ExchangeSpec, World
    >>> world = World.open(rank=0, size=1)
    >>> world.wire([world.descriptor()])
    >>> spec = ExchangeSpec(tokens=3, hidden=8, experts=2, topk=1, dtype="float32", alignment=4)
    >>> with world, Exchange(world, spec) as exchange:
    ...     x = torch.arange(3.0)[:, None].repeat(1, 8)
    ...     got = exchange.dispatch(x, torch.tensor([[1], [0], [1]]), torch.ones(3, 1))
    ...     got.expert_offsets.tolist(), got.expert_counts.tolist(), got.x[[0, 4, 5], 0].tolist()
    ([0, 4, 8], [1, 2], [1.0, 0.0, 2.0])
    """

    x: torch.Tensor
    weights: torch.Tensor  # float32[C], zero in gaps; with layout `token` float32[C, K], zero where the id is -1
    expert_offsets: torch.Tensor  # int32[L + 1], multiples of the alignment; a grouped GEMM takes [1:]
    expert_counts: torch.Tensor  # int32[L]
    index: torch.Tensor | None  # int64[C] with layout `rank`
    tokens: int  # T' of the dispatch: the rows of y

    _saved: object
    """The state that the backend saved for the operations that follow, such as the combine: see `saved`."""
    _owner: Backend
    """The backend that made this."""

    scales: torch.Tensor | None = None
    """float32[C, ceil(H / 128)] with output `raw`, strides (1, C rounded up to 4)."""
    site: int = 0
    """The number of the place that called the dispatch, such as a layer; 0: none. All ranks must agree on it."""
    topk_idx: torch.Tensor | None = None
    """int32[C, K] with layout `token`. Rows after the last one that came have -1."""
    sources: torch.Tensor | None = None
    """int32[C, 2] with layout `token`: rank and token. Rows after the last one that came have -1."""
    counted: int | None = None
    """The rows up to the last offset, once the host knows them: see `count`."""
    captured: bool = False
    """Whether a capture made this. Then each replay has rows of its own, and a number of them."""

    def count(self) -> int:
        """Return the number of rows up to the last offset, gaps included. On GPUs the first call waits for the device.

        A capture cannot wait. Of a captured dispatch every call waits, and returns the number of the last replay. Of a
        dispatch whose rows have not been received, the number is unspecified.
        """
        if self.counted is None or self.captured:
            if capturing(self.expert_offsets.device):
                raise CaptureError(
                    "the number of rows was asked for in a capture, which cannot wait; read it on the device"
                )
            # A failed wait may leave any number on the device. The next call on the exchange raises it.
            self.counted = min(max(int(self.expert_offsets[-1]), 0), len(self.weights))
        return self.counted

    def rows_needed(self) -> torch.Tensor:
        """Return the rows that this rank needed, gaps included, as int32[1] on the world's device. Nothing waits.

        It is the last offset where they fit, and above the capacity where they did not. So a captured program can keep
        the most of all ranks and steps, and read it later. With layout `token` it counts tokens.

        If ranks refuse the data for another cause, such as an id out of range, only rows that were placed count: maybe
        none. Of a dispatch whose rows have not been received, or after a failed wait, the number is unspecified.

        >>> from raymoe import Exchange, ExchangeSpec, World
        >>> world = World.open(rank=0, size=1)
        >>> world.wire([world.descriptor()])
        >>> spec = ExchangeSpec(tokens=4, hidden=8, experts=2, topk=1, dtype="float32", alignment=1, capacity=3)
        >>> with world, Exchange(world, spec) as exchange:
        ...     ids, weights = torch.tensor([[1], [0], [1], [1]]), torch.ones(4, 1)
        ...     two, four = (exchange.dispatch(torch.ones(n, 8), ids[:n], weights[:n]) for n in (2, 4))
        >>> two.rows_needed().item(), four.rows_needed().item(), four.expert_offsets.tolist()
        (2, 4, [0, 0, 0])
        """
        refusal = self._owner.refusal_words(self)
        keep_for_current_stream(refusal)  # callers cannot, because they do not see this memory
        cause, number = refusal[CAUSE_WORD : CAUSE_WORD + 1], refusal[NUMBER_WORD : NUMBER_WORD + 1]
        return torch.where(cause == Cause.CAPACITY, number, self.expert_offsets[-1:])

    def exact(self) -> ExactRows:
        """Return views of the rows that came, without the unused rows of the capacity. On GPUs the host waits once.

        Of a captured dispatch it waits at each call, for the views of the last replay.

        `combine` takes results for these rows, or for all C.

        >>> from raymoe import Exchange, ExchangeSpec, World
        >>> world = World.open(rank=0, size=1)
        >>> world.wire([world.descriptor()])
        >>> spec = ExchangeSpec(tokens=64, hidden=8, experts=2, topk=1, dtype="float32", alignment=1)
        >>> with world, Exchange(world, spec) as exchange:
        ...     got = exchange.dispatch(torch.ones(3, 8), torch.tensor([[1], [0], [1]]), torch.ones(3, 1))
        ...     rows = got.exact().x
        ...     y = exchange.combine(2 * rows, got)
        >>> len(got.x), len(rows), y[:, 0].tolist()
        (64, 3, [2.0, 2.0, 2.0])
        """
        there = self.count()
        scales = None if self.scales is None else self.scales[:there]
        if self.index is not None:  # rows stay in their slots
            return ExactRows(self.x, self.weights[:there], self.index[:there], scales)
        topk_idx = None if self.topk_idx is None else self.topk_idx[:there]
        return ExactRows(self.x[:there], self.weights[:there], None, scales, topk_idx)

    def saved(self, kind: type[S]) -> S:
        """Return the state that the backend saved in the dispatch, of the one class that this backend saves."""
        state = self._saved
        if not isinstance(state, kind):
            raise TypeError(f"a dispatch saved {type(state).__name__}, but {kind.__name__} is needed")
        return state


@dataclass(frozen=True)
class ExactRows:
    """Views of a dispatch's rows up to the last offset: n rows, gaps included, which alignment 1 does not have."""

    x: torch.Tensor  # [n, H]; with layout `rank` all slots
    weights: torch.Tensor  # float32[n], or [n, K] with layout `token`
    index: torch.Tensor | None  # int64[n] with layout `rank`
    scales: torch.Tensor | None  # float32[n, ceil(H / 128)] with output `raw`
    topk_idx: torch.Tensor | None = None  # int32[n, K] with layout `token`


@dataclass(frozen=True)
class EntryPlaces:
    """Where a dispatch put the row of each entry of all ranks: its place among this rank's rows, expert by expert.

    >>> places = torch.tensor([[[5, -1], [-1, 0], [3, 3]]], dtype=torch.int32)
    >>> EntryPlaces(places, torch.tensor([2], dtype=torch.int32)).of_sent(5).tolist()
    [[[-1, -1], [-1, 0], [-1, -1]]]
    """

    places: torch.Tensor
    """int32[R, T, K] by source, token and k; -1: the expert is elsewhere. On CPUs the tokens of other ranks are those
    with experts here alone, one after the other."""
    tokens: torch.Tensor
    """int32[R]: how many tokens each source sent. Places of later ones are unspecified."""

    def of_sent(self, end: int) -> torch.Tensor:
        """Return the places of tokens that were sent, int64[R, T, K]; -1 where none is before `end`."""
        sent = torch.arange(self.places.shape[1], device=self.places.device) < self.tokens[:, None]
        places = self.places.long()
        return torch.where(sent[:, :, None] & (places < end), places, -1)


# The interface of a backend, on CPUs and on GPUs. Its arguments have been checked.


@dataclass(slots=True)
class Tokens:
    """One rank's input of a dispatch: contiguous, on the world's device, with the spec's dtypes and shapes."""

    x: torch.Tensor  # [T', H]
    topk_idx: torch.Tensor  # [T', K] int32 or int64, global
    topk_weights: torch.Tensor  # [T', K] float32
    num_tokens: torch.Tensor | None
    """int32[1] on the device: how many of the T' tokens to send; None: all. Checked on CPUs, not on GPUs."""
    scales: torch.Tensor | None = None
    """float32[T', ceil(H / 128)] for an `x` that is float8_e4m3fn already; only where rows cross as fp8."""
    zero_gaps: bool = True
    """Whether gaps get zeros where the spec has padding `zero`. A backend may write them in any case."""
    site: int = 0
    """The number of the call site, which the result has too."""


@dataclass(slots=True)
class Ids:
    """The routing of a dispatch: the part of `Tokens` that its combine needs."""

    topk_idx: torch.Tensor
    num_tokens: torch.Tensor | None = None


class Backend(Protocol):
    """One implementation of dispatch and combine.

    - Operations are collective, in one order on all ranks. On a GPU they are enqueued on the current stream. Nothing
      waits for the device unless the backend says so.
    - No operation records gradients, even where tensors require them.
    - `ConfigError`: the caller made a mistake, and no peer has seen the operation. `DataRefused`: all ranks refuse the
      step, and the next one works. After any other error the exchange calls only `close`.
    """

    capturable: bool
    """Whether dispatch and combine can be captured in a CUDA graph."""

    @property
    def keeps_places(self) -> bool:
        """Whether it has `dispatch_known`. The same on all ranks."""

    @property
    def sms(self) -> int | None:
        """The most SMs that one of its launches occupies; None where the backend cannot know."""

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """Send tokens to the ranks of their experts.

        Rows go to `out`, [C, H], which is None with layout `rank`. The result's `_owner` is this backend.
        """

    def refusal_words(self, got: Dispatched) -> torch.Tensor:
        """Return why this rank refuses the data of a dispatch: a packed `Refusal`, int32[4] on the world's device.

        It may be a view of saved memory. The dispatch may still be running.
        """

    def mark(self, got: Dispatched, digest: torch.Tensor) -> None:
        """Let the combine of `got` be refused if other ranks' dispatches were marked differently.

        `digest` is int32[1] on the device. All ranks mark a dispatch, at once, or none does.
        """

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        """Return the sums of `rows` to their tokens' ranks, and write all of y to `out`, [T', H].

        `rows` is [n, H], with at least the rows up to the last offset. No other row is read.
        """

    # For gradients: a dispatch as one tensor, and the weights' gradients beside those of rows.

    @property
    def metadata_words(self) -> int:
        """The length of `pack`'s result, the same in every call."""

    def pack(self, got: Dispatched) -> torch.Tensor:
        """Return the metadata of a dispatch that its combine needs, except weights, as int32 on the world's device."""

    def unpack(self, metadata: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: Ids) -> Dispatched:
        """Make the result of a dispatch again, for a combine of `rows`. `weights` are those of the result."""

    def combine_gradients(
        self, rows: torch.Tensor, weights: torch.Tensor, got: Dispatched, out: torch.Tensor, out_weights: torch.Tensor
    ) -> None:
        """Combine `rows` without weights into `out`, and bring `weights`, float32[C], to `out_weights`, [T', K].

        With layout `token` the weights are [C, K], as those of the result.

        An entry without an expert gets zero.
        """

    def dispatch_known(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> None:
        """Send rows of `x`, [T', H], to the places in `out`, [C, H], that `got` gave to the rows of its tokens.

        Nothing is counted, and no ids are sent. `got` does not change. Gaps are as in a dispatch. If ranks do this for
        different dispatches, or sites, all rows are NaN.
        """

    def dispatch_again(self, tokens: Tokens, out: torch.Tensor | None, forward: Dispatched) -> Dispatched:
        """Dispatch in the backward pass of the dispatch `forward`, where the backend keeps no places.

        All ranks publish which of their dispatches `forward` is, and its site. If they differ, all rows are NaN.
        """

    def check(self) -> None:
        """Wait for the device, then raise a failed wait (every time) or refused data (once)."""

    def close(self, together: bool) -> None:
        """Release memory and connections; `together` if all ranks close now. Results of dispatch stay valid."""


@runtime_checkable
class SplitBackend(Protocol):
    """A backend whose operations can be split into a send and a receive, with other work enqueued between them.

    No other operation of the same kind may come between the two, on any exchange of the workspace.
    """

    def dispatch_send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """Send the rows."""

    def dispatch_receive(self, got: Dispatched, tokens: Tokens) -> None:
        """Wait for the rows and copy them to their places. `tokens` are those that `dispatch_send` was given."""

    def combine_send(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        """Send the sums of `rows`."""

    def combine_receive(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        """Wait for the ranks' sums and add them."""


@runtime_checkable
class PieceBackend(Protocol):
    """A backend with a combine beside the product of its rows, in pieces of columns."""

    def column_pieces(self, got: Dispatched) -> ColumnPieces | None:
        """Return what the product needs; None on all ranks where this exchange has no such combine."""

    def combine_beside_product(
        self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor, pieces: ColumnPieces
    ) -> None:
        """Combine as `combine` does, and begin with the pieces of `rows` that the product has stored."""


def column_pieces(got: Dispatched) -> ColumnPieces | None:
    """Return the pieces in which a product can store the rows of a dispatch, for a combine beside it.

    None on all ranks where their exchange has no such combine.
    """
    owner = got._owner
    return owner.column_pieces(got) if isinstance(owner, PieceBackend) else None


class EntryBackend(Protocol):
    """A backend whose metadata of a dispatch say where each entry's row lies."""

    def entry_places(self, metadata: torch.Tensor, topk_idx: torch.Tensor) -> EntryPlaces:
        """Return the places of a dispatch, from what `pack` returned and the ids of this rank."""


@dataclass(slots=True)
class PendingCombine:
    """A combine between its send and its receive."""

    rows: torch.Tensor
    got: Dispatched
    weighted: bool
    y: torch.Tensor
