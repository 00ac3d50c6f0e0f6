"""Dispatch and combine for one fixed spec."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from raymoe.errors import CaptureError, ConfigError, DataRefused, PlacementError, RaymoeError
from raymoe.exchange.arguments import Arguments, capturing, refuse_overlap, refuse_tracing
from raymoe.exchange.backend import Backend, Dispatched, InHalves, Sent, Tokens
from raymoe.exchange.calls import Calls, one_at_a_time
from raymoe.exchange.choice import Wish, choose, make
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World

if TYPE_CHECKING:
    from raymoe.exchange.workspace import Workspace

_HARMLESS = (ConfigError, CaptureError, DataRefused)
"""What leaves no peer in the middle of an operation: a caller's mistake, told before, and data that all refuse."""


class Exchange:
    """Sends each token's row to the ranks of its experts, and brings the weighted sum of their results back.

    Making one is collective: all ranks of the world, the same spec, the same backend. So are `dispatch` and `combine`,
    in one order on all ranks. Data that is refused makes every rank raise `DataRefused` for the same combine, and the
    next step works; a peer that does not answer makes the exchange unusable.

    On GPUs both are enqueued on the current stream and nothing waits, so failures show later: in `check`, which waits,
    and refused data also in y, which is NaN on all ranks. What is captured in a CUDA graph may be replayed until
    `close`; the memory that a captured call made is kept as long.

    `sms` is how many multiprocessors its kernels may take, "auto" all of them. Exchanges that may run at the same time,
    in two streams, need numbers that are together no more than there are: their kernels wait for those of other ranks.

    In a model that torch.compile compiles, its calls stand between graphs and run as they are.

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

    @torch.inference_mode(False)  # memory that is made in inference mode could not be written to outside of it
    def __init__(
        self,
        world: World,
        spec: ExchangeSpec,
        backend: str = "auto",
        *,
        workspace: Workspace | None = None,
        sms: int | str = "auto",
    ) -> None:
        if capturing(world.device):
            raise CaptureError("an exchange was to be made inside a capture; make it before, its calls can be captured")
        refuse_tracing("making an exchange")
        self.world, self.spec = world, spec
        world.unclosed.free()
        wish = Wish(backend, workspace, sms)
        choice = choose(world, spec, wish)
        self.backend = choice.backend
        self._arguments = Arguments(spec, world.size, world.device)
        self._own = _own_rows(world, spec)
        self._backend = make(choice, world, spec, workspace)
        # Whose rows each block of the exchange's own memory holds: that of the last dispatch that was given it.
        self._holders: dict[int, weakref.ref[Dispatched] | None] = {block.data_ptr(): None for block in self._own}
        self._turn = 0
        self._kept: list[object] = []
        self._poison: RaymoeError | None = None
        self._poisoning = _Poisoning(self)
        self._dispatched: Dispatched | None = None
        self._tokens: Tokens | None = None
        """What the dispatch that is in halves was given."""
        self._sent: Sent | None = None
        self._closed = False
        self._workspace: Workspace | None = getattr(self._backend, "workspace", None)
        self._calls: Calls = world.shared(Calls) if self._workspace is None else self._workspace.calls
        name = f"an exchange ({self.backend}) of rank {world.rank} of world {world.name!r}"
        release, at_once = partial(_let_go, self._backend, self._own), world.device.type == "cpu"
        self._forget = world.unclosed.watch(self, name, release, at_once=at_once)

    @property
    def capturable(self) -> bool:
        """Whether calls can be captured in a CUDA graph."""
        return self._backend.capturable

    @property
    def sms(self) -> int | None:
        """The most multiprocessors that one launch of an operation occupies; None where that is not ours to say."""
        return self._backend.sms

    @one_at_a_time
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: int | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> Dispatched:
        """Send the first `num_tokens` rows of `x[T', H]` (all of them unless said) to the ranks of their experts.

        Where rows cross as fp8, `x` may be quantised already: a pair of values, float8_e4m3fn[T', H], and their scales,
        float32[T', ceil(H / 128)].
        """
        self._ready("dispatch")
        tokens = self._arguments.dispatch(x, topk_idx, topk_weights, num_tokens)
        return self._dispatch(self._backend.dispatch, tokens, out)

    @one_at_a_time
    def combine(
        self, rows: torch.Tensor, got: Dispatched, weighted: bool = True, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum what the experts made of each token, times the router's weights if `weighted`, into `y[T', H]`."""
        self._ready("combine")
        return self._combine(self._backend.combine, rows, got, weighted, out).y

    @one_at_a_time
    def dispatch_send(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: int | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> Dispatched:
        """The first half of a dispatch: rows set out. Enqueue what needs none of them, then `dispatch_receive`; before
        that the result holds nothing, and `x`, `topk_idx` and `topk_weights` stay as they are."""
        halves = self._halves("dispatch_send")
        tokens = self._arguments.dispatch(x, topk_idx, topk_weights, num_tokens)
        self._dispatched, self._tokens = self._dispatch(halves.dispatch_send, tokens, out), tokens
        return self._dispatched

    @one_at_a_time
    def dispatch_receive(self, got: Dispatched) -> Dispatched:
        """The second half: wait for the rows, on the device, and put them where they belong. Gives `got`."""
        halves = self._halves("dispatch_receive", got)
        assert self._tokens is not None
        with self._poisoning:
            halves.dispatch_receive(got, self._tokens)
        self._dispatched = self._tokens = None
        return got

    @one_at_a_time
    def combine_send(
        self, rows: torch.Tensor, got: Dispatched, weighted: bool = True, out: torch.Tensor | None = None
    ) -> Sent:
        """The first half of a combine: sums set out. `rows` stay as they are until `combine_receive`."""
        self._sent = self._combine(self._halves("combine_send").combine_send, rows, got, weighted, out)
        return self._sent

    @one_at_a_time
    def combine_receive(self, sent: Sent) -> torch.Tensor:
        """The second half: wait for the ranks' sums, on the device, and add them up. Gives y."""
        halves = self._halves("combine_receive", sent)
        with self._poisoning:
            halves.combine_receive(sent.rows, sent.got, sent.weighted, sent.y)
        self._sent = None
        return sent.y

    @one_at_a_time
    def check(self) -> None:
        """Wait for the device, then raise what this rank knows to be wrong: a failed wait, or refused data, once."""
        if capturing(self.world.device):
            raise CaptureError("check waits for the device, which a capture cannot; call it after the replay")
        self._ready("check")
        with self._poisoning:
            self._backend.check()

    @one_at_a_time
    def close(self, together: bool = True) -> None:
        """Give up memory and connections. What was dispatched stays valid, graphs of this exchange do not."""
        if not self._closed:
            self._closed = True
            self._forget()
            self._backend.close(together and self._poison is None and not self.world.closed)
            self._kept.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(together=error is None)

    def _dispatch(
        self, call: Callable[[Tokens, torch.Tensor | None], Dispatched], tokens: Tokens, out: torch.Tensor | None
    ) -> Dispatched:
        into = self._own_turn() if out is None else self._arguments.given(out)
        if into is not None:
            refuse_overlap("x", tokens.x, into)
        with self._poisoning:
            got = call(tokens, into)
        self._turn += out is None
        self._hold(got)
        self._keep_if_captured(tokens, got)
        return got

    def _combine(
        self,
        call: Callable[[torch.Tensor, Dispatched, bool, torch.Tensor], None],
        rows: torch.Tensor,
        got: Dispatched,
        weighted: bool,
        out: torch.Tensor | None,
    ) -> Sent:
        rows = self._arguments.combine(rows, got, weighted, self._backend)
        if got is self._dispatched:
            raise ConfigError("combine of what has not arrived; call dispatch_receive first")
        self._check_held(rows, got)
        if out is None:
            y = torch.empty(got.tokens, self.spec.hidden, dtype=rows.dtype, device=self.world.device)
        else:
            y = self._arguments.given_home(out, got.tokens)
            refuse_overlap("rows", rows, y)
        with self._poisoning:
            call(rows, got, weighted, y)
        self._keep_if_captured(rows, got, y)
        return Sent(rows, got, weighted, y)

    def _hold(self, got: Dispatched) -> None:
        """From now on the memory of these rows, where it is the exchange's own, is that of `got`."""
        if (address := got.x.data_ptr()) in self._holders:
            self._holders[address] = weakref.ref(got)

    def _check_held(self, rows: torch.Tensor, got: Dispatched) -> None:
        """Refuse rows that a later dispatch has overwritten. With layout rank a combine takes rows of the caller's."""
        holder = self._holders.get(rows.data_ptr())
        if holder is not None and holder() is not got:
            if rows.data_ptr() != got.x.data_ptr():
                raise ConfigError("rows are where another dispatch than got put its own; combine them with its result")
            raise ConfigError(
                "rows are in the exchange's own memory, which a later dispatch has been given since; give each "
                f"dispatch memory by out=, or make the exchange with a depth of more than {self.spec.depth}"
            )

    def _keep_if_captured(self, *memory: object) -> None:
        space = self._workspace
        if capturing(self.world.device) if space is None else space.captured:
            self._kept += memory

    def _halves(self, op: str, begun: Dispatched | Sent | None = None) -> InHalves:
        """The backend, if it has this half and its turn has come; `begun` is what the first half gave."""
        self._ready(op, begun)
        if not isinstance(self._backend, InHalves):
            raise ConfigError(f"{op} asked for; {self.backend} has no operation in halves: take fused or staged")
        return self._backend

    def _ready(self, op: str, begun: Dispatched | Sent | None = None) -> None:
        """Raise where a call cannot be made."""
        if self._closed:
            raise ConfigError(f"{op} on rank {self.world.rank}: this exchange is closed; make a new one")
        if self.world.closed:
            raise ConfigError(f"{op} on rank {self.world.rank}: its world is closed; make a new world and exchange")
        if self._poison is not None:
            raise copy.copy(self._poison)
        pending = self._dispatched if op.startswith("dispatch") else self._sent if op.startswith("combine") else None
        if pending is not begun:
            kind = op.partition("_")[0]
            what = f"{kind}_send has been called" if begun is None else f"that is not what the last {kind}_send gave"
            raise ConfigError(f"{op} on rank {self.world.rank}: {what}; {kind}_receive of it comes next")
        if not self._backend.capturable and capturing(self.world.device):
            raise ConfigError(
                f"{op} by {self.backend} cannot be captured, because it waits for the device to learn how many rows go "
                "where; call it eagerly, or take fused or staged"
            )

    def _own_turn(self) -> torch.Tensor | None:
        """Memory of the exchange's own for the rows of this dispatch; None where rows stay in their slots. A dispatch
        that is refused takes no turn."""
        if self.spec.layout == "rank":
            return None
        if not self._own:
            raise ConfigError("dispatch without out; this exchange has depth 0, so each dispatch is given memory")
        return self._own[self._turn % len(self._own)]


def _leave_untraced(code: CodeType) -> None:
    """Keep torch.compile out of frames of this code and of what they call.

    `torch.compiler.disable` does the same, but its import takes a second and each call microseconds. These names are
    torch's own; where another version has others, a compiled caller wraps the calls in `torch.compiler.disable`.
    """
    core: Any = torch._C  # the stubs leave this out
    try:
        frames = core._dynamo.eval_frame
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(code, strategy)
    except AttributeError:
        return


_leave_untraced(Exchange.dispatch.__code__)  # the frames of all guarded calls are of this one


class _Poisoning:
    """Whatever ends an operation early leaves peers in the middle of it: this rank must not write to them again.

    A class, and one object for all calls of an exchange: a generator costs a microsecond a call.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = weakref.ref(exchange)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        exchange = self._exchange()
        if error is None or exchange is None or isinstance(error, _HARMLESS):
            return
        if isinstance(error, RaymoeError):
            exchange._poison = copy.copy(error)  # without its traceback, which refers to the exchange
        else:
            what = f"{type(error).__name__} ended an operation early"
            exchange._poison = RaymoeError(f"this exchange is unusable: {what}")


def _let_go(backend: Backend, own: list[torch.Tensor]) -> None:
    """Close the backend of an exchange that was dropped, and then give up the rows that its kernels write to."""
    backend.close(together=False)
    own.clear()


def _own_rows(world: World, spec: ExchangeSpec) -> list[torch.Tensor]:
    """Either all ranks get theirs or all raise: nobody waits for a rank that has no exchange."""
    dtype: torch.dtype = getattr(torch, spec.output_dtype)
    shape, blocks = (spec.rows(world.size), spec.hidden), spec.depth if spec.layout == "expert" else 0
    if not blocks:
        return []
    made, problem = [], None
    try:
        made = [torch.empty(shape, dtype=dtype, device=world.device) for _ in range(blocks)]
    except RuntimeError as error:  # so torch tells that there is no memory, of a GPU by a class of its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        problem = PlacementError(
            f"memory for {blocks} times {shape[0]} rows of {shape[1]} {dtype} on rank {world.rank} was refused: take a "
            f"smaller capacity or depth ({reason})"
        )
    world.agree(problem, "exchange: memory for rows")
    return made
