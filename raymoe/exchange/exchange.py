"""Dispatch and combine for one fixed spec."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from raymoe.errors import CaptureError, ConfigError, RaymoeError
from raymoe.exchange.arguments import Arguments, capturing, leave_untraced, refuse_overlap, refuse_tracing
from raymoe.exchange.backend import Backend, Dispatched, Ids, PendingCombine, SplitBackend, Tokens
from raymoe.exchange.calls import Calls, one_at_a_time
from raymoe.exchange.choice import ExchangeRequest, choose, make_backend
from raymoe.exchange.own_memory import call_marks, own_rows
from raymoe.exchange.poisoning import Poisoning
from raymoe.exchange.slots import SlotExperts, SlotTable
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8
from raymoe.memory.one_process import OfOneProcess
from raymoe.memory.sleeping import SleepingMemory
from raymoe.memory.world import World

if TYPE_CHECKING:
    from raymoe.exchange.backend import EntryPlaces
    from raymoe.exchange.peer.column_pieces import ColumnPieces
    from raymoe.exchange.peer.workspace import Workspace

_HANDLES = itertools.count(1)
_EXCHANGES: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()  # of this process, by handle


class Exchange(OfOneProcess):
    """Sends each token's row to the ranks of its experts, and returns the weighted sum of their results.

    - **Collective.** All ranks of the world make it, with the same spec and backend. All call `dispatch` and `combine`
      in the same order.
    - **Refused data** makes every rank raise `DataRefused` in the same combine, and the next step works. A peer that
      does not answer makes the exchange unusable.
    - **On GPUs** both operations are enqueued on the current stream, and nothing waits. Failures show later, in
      `check`, which waits. Refused data also gives a y of NaN on all ranks.
    - **CUDA graphs.** A captured call may be replayed until `close`. Until then the exchange keeps the call's tensors.
      The operators of `raymoe.moe` keep nothing: the memory pool of `torch.cuda.graph` does.
    - **`sms`** limits the SMs that its kernels take; "auto" means all. Exchanges that may run at the same time, on two
      streams, need limits whose sum fits the GPU. Their kernels wait for kernels of other ranks.
    - **`chunk`** is for GPU ranks in several domains. Rows cross the network in chunks of `chunk` tokens, and the
      exchange inside a domain runs beside that, except in dispatches of backward passes. "auto" takes chunks of at
      least 4 MiB, or one where rows are few.
    - **torch.compile** breaks its graph at each call, and the call runs uncompiled. `raymoe.moe.dispatch` and `combine`
      can be traced, and have gradients.

    A world of one CPU rank, whose experts double their rows:

    >>> from raymoe import Exchange, ExchangeSpec, World
    >>> world = World.open(rank=0, size=1)
    >>> world.wire([world.descriptor()])
    >>> spec = ExchangeSpec(tokens=4, hidden=8, experts=2, topk=2, dtype="float32")
    >>> with world, Exchange(world, spec) as exchange:
    ...     x = torch.ones(2, 8)
    ...     topk_idx, topk_weights = torch.tensor([[0, 1], [1, -1]]), torch.tensor([[0.5, 0.25], [1.0, 0.0]])
    ...     got = exchange.dispatch(x, topk_idx, topk_weights)
    ...     y = exchange.combine(2 * got.x, got)
    >>> y[:, 0].tolist()
    [1.5, 2.0]
    """

    @torch.inference_mode(False)  # torch does not write to inference-mode memory outside that mode
    def __init__(
        self,
        world: World,
        spec: ExchangeSpec,
        backend: str = "auto",
        *,
        workspace: Workspace | None = None,
        sms: int | str = "auto",
        chunk: int | str = "auto",
    ) -> None:
        if capturing(world.device):
            raise CaptureError("an exchange cannot be made inside a capture; make it before, its calls can be captured")
        refuse_tracing("making an exchange")
        if isinstance(spec, ExchangeSpec):  # `choose` refuses others, on all ranks
            spec = spec.counted(world.size)
        self.world, self.spec = world, spec
        world.unclosed.free()
        choice = choose(world, spec, ExchangeRequest(backend, workspace, sms, chunk))
        self.backend = choice.backend
        self.chunks: int | None = choice.chunks(spec.tokens) if world.domains > 1 else None
        """The number of chunks in which rows cross between domains. None in a world of one domain."""
        self._arguments = Arguments(spec, world.size, world.device)
        self._own = own_rows(world, spec)
        self._backend = make_backend(choice, world, spec.over_slots(world.size), workspace)
        self._tables = {} if spec.slots is None else {0: SlotTable(world, spec)}
        """The placement of each call site that has one of its own; 0: that of all others."""
        # For each block of the exchange's own memory, by address: the result whose rows it holds.
        self._holders: dict[int, weakref.ref[Dispatched] | None] = {block.data_ptr(): None for block in self._own}
        self._turn = 0
        self._captured_memory: list[object] = []
        self._poisoning = Poisoning(world)
        self._pending_dispatch: Dispatched | None = None
        self._tokens: Tokens | None = None
        """The input of the pending dispatch."""
        self._pending_combine: PendingCombine | None = None
        self._closed = False
        places = getattr(self._backend, "entry_places", None) if world.domains == 1 else None
        self.entry_places: Callable[[torch.Tensor, torch.Tensor], EntryPlaces] | None = places
        """`EntryBackend.entry_places` where the backend has it, on all ranks or on none."""
        self._workspace: Workspace | None = getattr(self._backend, "workspace", None)
        self._calls: Calls = world.shared(Calls) if self._workspace is None else self._workspace.calls
        name = f"an exchange ({self.backend}) of rank {world.rank} of world {world.name!r}"
        release, at_once = partial(_let_go, self._backend, self._own), world.device.type == "cpu"
        self._forget = world.unclosed.watch(self, name, release, at_once=at_once)
        self.handle = next(_HANDLES)
        """Its number in this process, by which torch's custom operators name it."""
        _EXCHANGES[self.handle] = self
        self._numbers = None if spec.dispatch_wire == FP8 else self._operator_numbers()
        world.shared(SleepingMemory).watch(self)
        self.calls_made = call_marks(world.device)
        """int32[1] that compiled functions change at each call, so that no compiler drops one."""

    @staticmethod
    def of_handle(handle: int) -> Exchange:
        """Return the exchange with this handle."""
        if (exchange := _EXCHANGES.get(handle)) is None:
            raise ConfigError(f"exchange {handle} of this process was dropped; keep it as long as its results are used")
        return exchange

    @property
    def capturable(self) -> bool:
        """Whether calls can be captured in a CUDA graph."""
        return self._backend.capturable

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def in_flight(self) -> str | None:
        """The operation that has begun on the host and not ended; None if there is none."""
        if self._closed:
            return None
        if self._calls.lock.locked():
            return self._calls.current[1]
        if self._pending_dispatch is not None:
            return "dispatch_send"
        return None if self._pending_combine is None else "combine_send"

    @property
    def sms(self) -> int | None:
        """The most SMs that one launch of an operation occupies; None where the backend cannot know."""
        return self._backend.sms

    @one_at_a_time
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: int | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        zero_gaps: bool = True,
    ) -> Dispatched:
        """Send the first `num_tokens` rows of `x[T', H]`, by default all, to the ranks of their experts.

        Where rows cross as fp8, `x` may be quantised already. It is then a pair of values, float8_e4m3fn[T', H], and
        scales, float32[T', ceil(H / 128)].

        With `zero_gaps=False` gaps between experts are unspecified where the spec has padding `zero` too. Products
        without gradients need no zeros.
        """
        self._ready("dispatch")
        named = self._arguments.dispatch(x, topk_idx, topk_weights, num_tokens, zero_gaps)
        tokens = self._over_slots(named)
        got = self._marked(self._dispatch(self._backend.dispatch, tokens, out))
        self._keep_if_captured(named, tokens, got)
        return got

    @one_at_a_time
    def combine(
        self, rows: torch.Tensor, got: Dispatched, weighted: bool = True, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum the experts' results of each token, times the router's weights if `weighted`, into `y[T', H]`."""
        self._ready("combine")
        sent = self._combine(self._backend.combine, rows, got, weighted, out)
        self._keep_if_captured(sent)
        return sent.y

    @one_at_a_time
    def dispatch_send(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: int | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> Dispatched:
        """Send the rows of a dispatch. `dispatch_receive` completes it; enqueue independent work between the two.

        Until then the result holds nothing, and the caller must not change `x`, `topk_idx` or `topk_weights`.
        """
        backend = self._split_backend("dispatch_send")
        named = self._arguments.dispatch(x, topk_idx, topk_weights, num_tokens)
        tokens = self._over_slots(named)
        self._pending_dispatch, self._tokens = self._dispatch(backend.dispatch_send, tokens, out), tokens
        self._keep_if_captured(named, tokens, self._pending_dispatch)
        return self._pending_dispatch

    @one_at_a_time
    def dispatch_receive(self, got: Dispatched) -> Dispatched:
        """Wait for the rows on the device, and copy them to their places. Returns `got`."""
        backend = self._split_backend("dispatch_receive", got)
        assert self._tokens is not None
        with self._poisoning:
            backend.dispatch_receive(got, self._tokens)
        self._pending_dispatch = self._tokens = None
        return self._marked(got)

    @one_at_a_time
    def combine_send(
        self, rows: torch.Tensor, got: Dispatched, weighted: bool = True, out: torch.Tensor | None = None
    ) -> PendingCombine:
        """Send the sums of a combine. The caller must not change `rows` until `combine_receive`."""
        backend = self._split_backend("combine_send")
        self._pending_combine = self._combine(backend.combine_send, rows, got, weighted, out)
        self._keep_if_captured(self._pending_combine)
        return self._pending_combine

    @one_at_a_time
    def combine_receive(self, sent: PendingCombine) -> torch.Tensor:
        """Wait for the ranks' sums on the device, and add them. Returns y."""
        backend = self._split_backend("combine_receive", sent)
        with self._poisoning:
            backend.combine_receive(sent.rows, sent.got, sent.weighted, sent.y)
        self._pending_combine = None
        return sent.y

    # The methods for operators and layers (raymoe/moe). They keep no tensors of captured calls: a capture by torch has
    # a memory pool, which lives as long as its graph. Torch's graph trees refuse tensors of the pool that other code
    # keeps.

    @one_at_a_time
    def dispatch_unkept(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """Dispatch tokens, which are checked here. With slots the ids are those of `slots_of`."""
        self._ready("dispatch")
        return self._marked(self._dispatch(self._backend.dispatch, self._checked(tokens), out))

    def _checked(self, tokens: Tokens) -> Tokens:
        x = tokens.x if tokens.scales is None else (tokens.x, tokens.scales)
        arguments = x, tokens.topk_idx, tokens.topk_weights, tokens.num_tokens, tokens.zero_gaps, tokens.site
        return self._arguments.dispatch(*arguments)

    @one_at_a_time
    def combine_unkept(
        self,
        rows: torch.Tensor,
        got: Dispatched,
        weighted: bool,
        out: torch.Tensor | None = None,
        pieces: ColumnPieces | None = None,
    ) -> torch.Tensor:
        """Combine into `out`, or into new memory. With `pieces`, those of `column_pieces`, beside the last product."""
        self._ready("combine")
        call = self._backend.combine
        if pieces is not None:
            call = partial(self._backend.combine_beside_product, pieces=pieces)  # type: ignore[attr-defined]
        return self._combine(call, rows, got, weighted, out).y

    @property
    def numbers(self) -> list[int]:
        """The numbers that torch's custom operators take: the handle, and the sizes of a dispatch's results.

        The sizes are rows, local experts, words of metadata, and with layout `token` K, else 0. Operators that trace
        look nothing else up.
        """
        if self._numbers is None:
            raise self._no_gradients("gradients")
        return self._numbers

    def _operator_numbers(self) -> list[int]:
        size = self.world.size
        sizes = self.spec.rows(size), self.spec.local_experts(size), self._backend.metadata_words
        return [self.handle, *sizes, self.spec.topk if self.spec.by_token else 0]

    def pack(self, got: Dispatched) -> torch.Tensor:
        """Return the metadata of a dispatch as one int32 tensor, from which `unpack` makes it again."""
        return self._gradient_backend("pack").pack(got)

    def unpack(
        self, metadata: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: Ids, site: int = 0
    ) -> Dispatched:
        """Make the result of a dispatch again, for a combine of `rows`."""
        got = self._gradient_backend("unpack").unpack(metadata, rows, weights, ids)
        got.site = site
        return got

    @one_at_a_time
    def combine_gradients(
        self, rows: torch.Tensor, weights: torch.Tensor, got: Dispatched
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of each token's `rows`, [T', H], and each entry's element of `weights`, float32[T', K]."""
        self._ready("combine")
        backend = self._gradient_backend("combine_gradients")
        rows = self._arguments.combine(rows, got, False, self._backend)
        if not len(weights):  # no rows came; kernels take the address of an empty tensor, 0, for no weights
            weights = weights.new_zeros(1, *weights.shape[1:])
        y = torch.empty(got.tokens, self.spec.hidden, dtype=rows.dtype, device=self.world.device)
        entries = torch.empty(got.tokens, self.spec.topk, dtype=torch.float32, device=self.world.device)
        self._poisoning.site = got.site
        with self._poisoning:
            backend.combine_gradients(rows, weights, got, y, entries)
        return y, entries

    @one_at_a_time
    def refuse(self, got: Dispatched) -> None:
        """Let all ranks refuse the step. Call it instead of combine where the work before it failed on this rank.

        For CPU ranks: all raise DataRefused, this one too, and the next step works. On GPUs no host waits for the other
        ranks' statuses, so they would go on alone.
        """
        from raymoe.exchange.cpu.cpu_backend import CpuBackend
        from raymoe.exchange.token_rows import TokenBackend

        self._ready("combine")
        if self.world.device.type != "cpu" or not isinstance(self._backend, CpuBackend | TokenBackend):
            raise ConfigError(
                f"refuse on rank {self.world.rank}, whose world is on {self.world.device}; only CPU ranks can"
            )
        with self._poisoning:
            self._backend.refuse(got)

    @property
    def keeps_places(self) -> bool:
        """Whether `dispatch_known` can be called."""
        return self._gradient_backend("gradients").keeps_places

    @one_at_a_time
    def dispatch_known(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> None:
        """Send rows of `x[T', H]` to the places that the rows of `got`'s tokens had. Nothing is counted again."""
        self._ready("dispatch")
        backend = self._gradient_backend("dispatch_known")
        x, out = self._arguments.dispatch_known(x, got, out, self._backend)
        refuse_overlap("x", x, out)
        self._poisoning.site = got.site
        with self._poisoning:
            backend.dispatch_known(x, got, out)

    @one_at_a_time
    def dispatch_again(self, tokens: Tokens, got: Dispatched, out: torch.Tensor | None) -> Dispatched:
        """Dispatch the gradients of `got`'s rows with its ids again, where places are not kept.

        All ranks refuse it unless they do so for the same dispatch.
        """
        self._ready("dispatch")
        backend = self._gradient_backend("dispatch_again")
        tokens = self._checked(tokens)
        return self._dispatch(lambda checked, into: backend.dispatch_again(checked, into, got), tokens, out)

    @one_at_a_time
    def check(self) -> None:
        """Wait for the device, then raise what failed on this rank: a failed wait, or refused data, once."""
        if capturing(self.world.device):
            raise CaptureError("check waits for the device, which a capture cannot; call it after the replay")
        self._ready("check")
        with self._poisoning:
            self._backend.check()

    def failure(self) -> RaymoeError | None:
        """Return the failed wait of this rank, if its host can see one now. Nothing waits; any thread may call this.

        It is for programs whose steps are graph replays, which raise nothing. NCCL's waits show in `check` alone.
        """
        if self._poisoning.error is None and self._workspace is not None and not self._closed:
            return self._workspace.error.error()
        return self._poisoning.error

    @one_at_a_time
    def place(self, placement: SlotExperts | torch.Tensor, *, site: int = 0) -> None:
        """Let slots hold the experts of a placement from the next dispatch on. Only with `ExchangeSpec(slots=...)`.

        All ranks call it before the same dispatch, with the same placement: a combine is refused on all ranks where
        their dispatches had different ones. The caller moves the weights. `site` is the number of the only call site,
        such as a layer, that has this placement.

        At first each expert has one slot, in ascending order. On GPUs the host waits for the current stream, and graphs
        that are replayed on it later read the new table.

        >>> from raymoe import Exchange, ExchangeSpec, World
        >>> world = World.open(rank=0, size=1)
        >>> world.wire([world.descriptor()])
        >>> spec = ExchangeSpec(tokens=3, hidden=8, experts=2, topk=1, dtype="float32", alignment=1, slots=3)
        >>> with world, Exchange(world, spec) as exchange:
        ...     exchange.place(torch.tensor([[1, 0, 1]]))
        ...     got = exchange.dispatch(torch.ones(3, 8), torch.tensor([[1], [0], [1]]), torch.ones(3, 1))
        ...     got.expert_counts.tolist()
        [1, 1, 1]
        """
        if capturing(self.world.device):
            raise CaptureError("place was called in a capture; call it before, and replays read what was placed last")
        self._ready("place")
        self._table_of(0)
        if self._pending_dispatch is not None:
            raise ConfigError("place between dispatch_send and dispatch_receive; call it after dispatch_receive")
        table = self._tables.get(site) or SlotTable(self.world, self.spec)
        experts: Any = placement
        table.write(getattr(experts, "experts", experts))
        self._tables[site] = table

    def placement(self, site: int = 0) -> torch.Tensor:
        """Return the expert of each slot, int32[ranks, slots] on the CPU; -1: the slot is empty."""
        return self._table_of(site).experts.clone()

    def slots_of(self, topk_idx: torch.Tensor, site: int = 0) -> torch.Tensor:
        """Return the slot of each entry of a dispatch, as `dispatch_unkept` takes them; the ids where none has any."""
        return self._table_of(site).slots_of(self._arguments.ids(topk_idx)) if self._tables else topk_idx

    def _table_of(self, site: int) -> SlotTable:
        if not self._tables:
            raise ConfigError("a placement on an exchange without slots; make it with ExchangeSpec(slots=...)")
        return self._tables.get(site) or self._tables[0]

    def _over_slots(self, tokens: Tokens) -> Tokens:
        if not self._tables:
            return tokens
        return replace(tokens, topk_idx=self._table_of(tokens.site).slots_of(tokens.topk_idx))

    def _marked(self, got: Dispatched) -> Dispatched:
        """Let the combine of this dispatch compare the ranks' placements."""
        if self._tables:
            self._backend.mark(got, self._table_of(got.site).digest)
        return got

    @one_at_a_time
    def close(self, together: bool = True) -> None:
        """Release memory and connections. Results of dispatch stay valid; graphs of this exchange do not."""
        if not self._closed:
            self._closed = True
            self._forget()
            self._backend.close(together and self._poisoning.error is None and not self.world.closed)
            self._captured_memory.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(together=error is None)

    def _dispatch(
        self, call: Callable[[Tokens, torch.Tensor | None], Dispatched], tokens: Tokens, out: torch.Tensor | None
    ) -> Dispatched:
        into = self._next_own_rows() if out is None else self._arguments.dispatch_out(out)
        if into is not None:
            refuse_overlap("x", tokens.x, into)
        self._poisoning.site = tokens.site
        with self._poisoning:
            got = call(tokens, into)
        got.site = tokens.site
        self._turn += out is None
        if (address := got.x.data_ptr()) in self._holders:
            self._holders[address] = weakref.ref(got)
        return got

    def _combine(
        self,
        call: Callable[[torch.Tensor, Dispatched, bool, torch.Tensor], None],
        rows: torch.Tensor,
        got: Dispatched,
        weighted: bool,
        out: torch.Tensor | None,
    ) -> PendingCombine:
        rows = self._arguments.combine(rows, got, weighted, self._backend)
        if got is self._pending_dispatch:
            raise ConfigError("combine of a dispatch whose rows have not arrived; call dispatch_receive first")
        self._check_held(rows, got)
        if out is None:
            y = torch.empty(got.tokens, self.spec.hidden, dtype=rows.dtype, device=self.world.device)
        else:
            y = self._arguments.combine_out(out, got.tokens)
            refuse_overlap("rows", rows, y)
        self._poisoning.site = got.site
        with self._poisoning:
            call(rows, got, weighted, y)
        return PendingCombine(rows, got, weighted, y)

    def _check_held(self, rows: torch.Tensor, got: Dispatched) -> None:
        """Refuse rows that a later dispatch has overwritten. With layout rank the rows are in the caller's memory."""
        holder = self._holders.get(rows.data_ptr())
        if holder is not None and holder() is not got:
            if rows.data_ptr() != got.x.data_ptr():
                raise ConfigError("rows are in memory that holds the rows of another dispatch; give its result as got")
            raise ConfigError(
                "rows are in the exchange's own memory, which a later dispatch has overwritten; give each dispatch "
                f"memory by out=, or make the exchange with a depth of more than {self.spec.depth}"
            )

    def _keep_if_captured(self, *memory: object) -> None:
        space = self._workspace
        if capturing(self.world.device) if space is None else space.captured:
            self._captured_memory += memory
            for got in memory:
                if isinstance(got, Dispatched):
                    got.captured = True

    def _split_backend(self, op: str, sent: Dispatched | PendingCombine | None = None) -> SplitBackend:
        """Return the backend, if it can split operations and `op` may be called now.

        `sent` is the result of the send; None where `op` is a send.
        """
        self._ready(op, sent)
        if self.spec.by_token:
            raise ConfigError(f"{op} asked for; with layout token operations are not split")
        if not isinstance(self._backend, SplitBackend) and self.world.domains > 1:
            raise ConfigError(f"{op} asked for; between {self.world.domains} domains operations are not split")
        if not isinstance(self._backend, SplitBackend):
            raise ConfigError(f"{op} asked for; {self.backend} cannot split operations: take fused or staged")
        return self._backend

    def _gradient_backend(self, op: str) -> Backend:
        if self.spec.dispatch_wire == FP8:
            raise self._no_gradients(op)
        return self._backend

    def _no_gradients(self, op: str) -> ConfigError:
        return ConfigError(f"{op} of an exchange whose rows cross as {FP8}; gradients need wider rows: leave wire out")

    def _ready(self, op: str, sent: Dispatched | PendingCombine | None = None) -> None:
        """Raise where `op` may not be called now."""
        if self._closed:
            raise ConfigError(f"{op} on rank {self.world.rank}: this exchange is closed; make a new one")
        if self.world.closed:
            raise ConfigError(f"{op} on rank {self.world.rank}: its world is closed; make a new world and exchange")
        if self._poisoning.error is not None:
            raise copy.copy(self._poisoning.error)
        if self.world.halt is not None:
            raise copy.copy(self.world.halt)
        kind = op.partition("_")[0]
        pending = self._pending_dispatch if kind == "dispatch" else self._pending_combine if kind == "combine" else None
        if pending is not sent:
            what = f"{kind}_send has been called" if sent is None else f"that is not the result of the last {kind}_send"
            raise ConfigError(f"{op} on rank {self.world.rank}: {what}; call {kind}_receive with its result next")
        if not self._backend.capturable and capturing(self.world.device):
            raise ConfigError(
                f"{op} by {self.backend} cannot be captured, because the host waits for the row counts; call it "
                "eagerly, or take fused or staged"
            )

    def _next_own_rows(self) -> torch.Tensor | None:
        """Return the exchange's own memory for the rows of this dispatch; None where rows stay in their slots.

        A dispatch that fails takes no turn.
        """
        if self.spec.layout == "rank":
            return None
        if not self._own:
            raise ConfigError("dispatch without out; this exchange has depth 0, so give each dispatch memory by out=")
        return self._own[self._turn % len(self._own)]


leave_untraced(Exchange.dispatch.__code__)  # all guarded calls run this one code object


def _let_go(backend: Backend, own: list[torch.Tensor]) -> None:
    """Close the backend of an exchange that was dropped, then release the rows that its kernels write to."""
    backend.close(together=False)
    own.clear()
