"""The interface of a backend: what dispatch and combine take, what they give back, and the two operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

# What a dispatch gives back.


@dataclass
class Dispatched:
    """Rows for this rank's experts, all of it on the device of the world. Everything but the rows belongs to this
    object, so several may be outstanding.

    With layout `expert`, row i is `x[i]`, in the memory that the caller gave or in the exchange's own, which is
    overwritten `depth` dispatches later. With layout `rank`, row i is `x[index[i]]`, where `x` is all slots: its
    rows stay until this rank's next dispatch (or `dispatch_send`), and gaps point to a row of zeros.

    `expert_offsets` and `expert_counts` say where the rows of each local expert are, without a wait for the device:

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
    weights: torch.Tensor  # float32[C], zero in gaps
    expert_offsets: torch.Tensor  # int32[L + 1], multiples of the alignment; [1:] is what a grouped GEMM takes
    expert_counts: torch.Tensor  # int32[L]
    index: torch.Tensor | None  # int64[C] with layout `rank`
    tokens: int  # T' of the dispatch: the rows of y

    _home: object
    """What the backend that made this needs in order to send rows home."""
    _owner: object
    """That backend."""

    scales: torch.Tensor | None = None
    """float32[C, ceil(H / 128)] with output `raw`, strides (1, C rounded up to 4)."""


# What a backend of an exchange does, on CPUs and on GPUs: both operations whole, on arguments that were checked.


@dataclass(slots=True)
class Tokens:
    """What one rank hands over to a dispatch: on its world's device, of the spec's dtypes and shapes, contiguous."""

    x: torch.Tensor  # [T', H]
    topk_idx: torch.Tensor  # [T', K] int32 or int64, global
    topk_weights: torch.Tensor  # [T', K] float32
    num_tokens: torch.Tensor | None
    """int32[1] on the device: how many of the T' tokens are there. On CPUs it is checked, on GPUs not. None: all."""
    scales: torch.Tensor | None = None
    """float32[T', ceil(H / 128)], of an `x` that is float8_e4m3fn already; only where rows cross so."""


class Backend(Protocol):
    """Operations are collective, in one order on all ranks. On a GPU they are enqueued on the current stream, and
    nothing waits for the device unless the backend says so.

    No operation records gradients, also where tensors require them.

    They raise `ConfigError` where the caller is at fault and no peer was told of the operation, `DataRefused` where all
    ranks refuse a step and the next one works. After any other error the exchange calls nothing but `close`.
    """

    capturable: bool
    """Whether dispatch and combine can be captured in a CUDA graph."""

    @property
    def sms(self) -> int | None:
        """The most multiprocessors that one of its launches occupies; None where that is not ours to say."""

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """Send tokens to the ranks of their experts. Rows are put into `out`, [C, H]; None with layout `rank`. What it
        gives has this backend as its `_owner`."""

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        """Send home the sums of `rows`, [C, H], and write y into `out`, [T', H], all of it."""

    def check(self) -> None:
        """Wait for the device; raise what is wrong: a failed wait, always, or refused data, once."""

    def close(self, together: bool) -> None:
        """Give up memory and connections; `together` if all ranks close now. What was dispatched stays valid."""


@runtime_checkable
class InHalves(Protocol):
    """What a backend has besides if an operation can be enqueued in two halves, with other work between them.

    No other operation of the same kind comes between the halves of one, on any exchange of its workspace.
    """

    def dispatch_send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """Put the rows on their way."""

    def dispatch_receive(self, got: Dispatched, tokens: Tokens) -> None:
        """Wait for rows and put them where they belong. `tokens` are those that `dispatch_send` was given."""

    def combine_send(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        """Put the sums of `rows` on their way."""

    def combine_receive(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        """Wait for the ranks' sums and add them up."""


@dataclass(slots=True)
class Sent:
    """A combine whose sums are on their way."""

    rows: torch.Tensor
    got: Dispatched
    weighted: bool
    y: torch.Tensor
