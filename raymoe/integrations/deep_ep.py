"""The interface of DeepEP V2 on raymoe: a program written for `deep_ep.ElasticBuffer` runs without a change.

    import raymoe.integrations.deep_ep as deep_ep

For a framework that imports `deep_ep` itself, call `raymoe.integrations.deep_ep.install()` before it does.

`dispatch` and `combine` are there, expanding and compact, with cached handles, rows as fp8, numbers of SMs and events.
Settings that have no meaning here (queue pairs, service levels, hybrid mode) are taken and not used. Each other part of
the interface raises one sentence. docs/frameworks.md says what differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch

from raymoe.errors import ConfigError
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.choice import FUSED_CAPABILITY
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.peer.workspace import Workspace
from raymoe.exchange.spec import ExchangeSpec, worst_rows
from raymoe.fp8 import FP8
from raymoe.integrations.deep_ep_calls import (
    BufferOptions,
    CallOptions,
    DispatchOptions,
    options_of,
)
from raymoe.integrations.deep_ep_calls import EPHandle as EPHandle
from raymoe.integrations.deep_ep_calls import EventHandle as EventHandle
from raymoe.integrations.deep_ep_calls import EventOverlap as EventOverlap
from raymoe.memory.layout import round_up
from raymoe.memory.world import World

__version__ = "2.1.0+raymoe"
topk_idx_t = torch.int64

BUFFER_ALIGNMENT = 2 << 20
"""Sizes of buffers are multiples of this many bytes, as DeepEP's are."""
SMS = 64
"""The number of SMs where a program leaves it to the buffer."""

T = TypeVar("T")
Pair = tuple[torch.Tensor, torch.Tensor]


def install() -> None:
    """Let every later `import deep_ep` of this process find this module."""
    sys.modules["deep_ep"] = sys.modules[__name__]


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a dispatch without a handle."""

    experts: int
    tokens: int
    alignment: int


# The buffer.


class ElasticBuffer:
    """Brings tokens to the ranks of their experts, and the results back, for the ranks of a process group.

    All ranks make it, and call it in one order. It makes an exchange for each form of dispatch that it sees, and frees
    them in `destroy`. Calls do not wait on GPUs, except a dispatch with `do_cpu_sync`.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=4, hidden=8, explicitly_destroy=True)
    >>> x, ids = torch.ones(2, 8, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, -1]])
    >>> rows, local, weights, handle, event = buffer.dispatch(x, ids, torch.ones(2, 2), num_experts=2)
    >>> rows.shape, local.tolist(), handle.num_recv_tokens_per_expert_list
    (torch.Size([2, 8]), [[0, 1], [1, -1]], [1, 2])
    >>> y, _, event = buffer.combine(rows * weights.sum(1, keepdim=True).bfloat16(), handle)
    >>> y[:, 0].tolist()
    [2.0, 1.0]
    >>> buffer.destroy()
    >>> dist.destroy_process_group()
    """

    backend = "auto"
    """The backend of the exchanges. Set it before the first dispatch, the same on all ranks."""

    def __init__(self, group: Any, num_bytes: int | None = None, num_cpu_bytes: int = 0, **options: Any) -> None:
        given = {"num_bytes": num_bytes, "num_cpu_bytes": num_cpu_bytes, **options}
        self.options = options_of(BufferOptions, "ElasticBuffer", given)
        self.world = World.of(group, timeout_s=float(self.options.num_gpu_timeout_secs), shared=True)
        self.group, self.rank_idx, self.num_ranks = group, self.world.rank, self.world.size
        self.explicitly_destroy = self.options.explicitly_destroy
        self.num_max_tokens_per_rank = self.options.num_max_tokens_per_rank
        self.num_bytes = num_bytes if num_bytes is not None else _bytes_of(self.options, self.num_ranks)
        self.num_allocated_qps = self.options.num_allocated_qps
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self._exchanges: dict[tuple[ExchangeSpec, int], Exchange] = {}
        self._workspaces: list[Workspace] = []
        self._comm_stream: Any = None
        self._destroyed = False

    def destroy(self) -> None:
        """Free the memory. All ranks call it, after the last call; handles of this buffer cannot be used then."""
        if not self.explicitly_destroy:
            raise ConfigError("destroy asked for; the buffer was made without explicitly_destroy=True")
        self._destroyed = True
        for exchange in reversed(self._exchanges.values()):
            exchange.close()
        for workspace in self._workspaces:
            workspace.close()
        self._exchanges, self._workspaces = {}, []

    def check(self) -> None:
        """Wait for the device, then raise what failed. raymoe's own: on GPUs nothing else tells of refused data."""
        for exchange in self._exchanges.values():
            exchange.check()

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        **_: bool,
    ) -> int:
        """Return about the bytes that a buffer's slots take on a rank: a multiple of 2 MiB."""
        options = BufferOptions(None, 0, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
        return _bytes_of(options, group.size())

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return the domains, and the ranks of each."""
        return self.world.domains, self.num_ranks // self.world.domains

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return the domains, and the ranks of each."""
        return self.get_physical_domain_size()

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *_: object, **__: object) -> int:  # noqa: ARG002
        """Return the SMs that a call should take beside other work. On CPU ranks the number means nothing."""
        return SMS if self.world.device.type == "cpu" else min(SMS, self.world.gpu.sms)

    def get_theoretical_num_qps(self, num_sms: int) -> int:  # noqa: ARG002
        """Return 0: there are no queue pairs."""
        return 0

    @staticmethod
    def capture() -> EventHandle:
        """Record an event on the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """Return the stream of asynchronous calls."""
        if self.world.device.type == "cpu":
            raise ConfigError("the communication stream asked for on CPU ranks, which have none")
        if self._comm_stream is None:
            new_stream: Any = torch.cuda.Stream
            self._comm_stream = new_stream(self.world.device)
        return self._comm_stream

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait until all ranks are here and their GPUs are done. The host waits, whatever the arguments say."""
        del use_comm_stream, with_cpu_sync, sequential
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        self.world.barrier("deep_ep: barrier")

    def dispatch(
        self,
        x: torch.Tensor | Pair,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor | Pair, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send the rows of `x`, or of values and scales, to the ranks of their experts.

        Returns rows, ids and weights as they came, a handle, and an event. With `do_expand` rows are expert by expert
        and ids are None; else there is a row for each token and rank. With a `handle` rows go where those of its
        dispatch went. `do_cpu_sync=False` returns as many rows as can come, and those after the last are unspecified.
        """
        order = options_of(DispatchOptions, "dispatch", options)
        if order.handle is not None:
            if topk_idx is not None or order.do_cpu_sync:
                raise ConfigError("dispatch with a handle takes no topk_idx and no do_cpu_sync: the handle has both")
            handle = order.handle
            self._check_handle(handle, order)
            if order.do_expand != handle.do_expand:
                raise ConfigError(f"do_expand is {order.do_expand}, and it was {handle.do_expand} for the handle")
            work: Callable[[], Any] = lambda: self._dispatch_again(x, topk_weights, handle, order)  # noqa: E731
        else:
            if topk_idx is None or num_experts is None:
                raise ConfigError("dispatch without a handle needs topk_idx and num_experts")
            tokens = num_max_tokens_per_rank or self.num_max_tokens_per_rank
            if not tokens:
                raise ConfigError("num_max_tokens_per_rank was given neither to the buffer nor to dispatch")
            sizes = _Sizes(num_experts, tokens, order.expert_alignment or 1)
            ids = topk_idx
            work = lambda: self._dispatch_first(x, ids, topk_weights, sizes, order)  # noqa: E731
        given = (*_tensors(x), topk_idx, topk_weights, cumulative_local_expert_recv_stats)
        (rows, recv_topk_idx, weights, handle), event = self._in_order(work, order, given)
        if cumulative_local_expert_recv_stats is not None:
            if event.event is not None:
                event.current_stream_wait()
            cumulative_local_expert_recv_stats.add_(handle.got.expert_counts)
        return rows, recv_topk_idx, weights, handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | Pair | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Add the rows of each token, of all ranks, and `bias`. No weights are applied.

        `topk_weights` are numbers beside the rows, of a row or of its K entries. They return to their tokens: they are
        gradients of weights.
        """
        order = options_of(CallOptions, "combine", options)
        self._check_handle(handle, order)
        biases = _tensors(bias) if bias is not None else ()
        given = (x, topk_weights, *biases)
        (y, entries), event = self._in_order(lambda: self._combine(x, handle, topk_weights, biases), order, given)
        return y, entries, event

    # The parts of calls.

    def _dispatch_first(
        self, x: torch.Tensor | Pair, topk_idx: torch.Tensor, topk_weights: Any, sizes: _Sizes, order: DispatchOptions
    ) -> Any:
        exchange = self._exchange_of(x, topk_idx.shape[1], sizes, order)
        got = self._send(exchange, x, topk_idx, topk_weights)
        waits = order.do_cpu_sync is not False
        counts: list[int] = got.expert_counts.tolist() if waits else []
        local = None if got.topk_idx is None else got.topk_idx.long()
        handle = EPHandle(
            do_expand=order.do_expand,
            num_experts=sizes.experts,
            expert_alignment=sizes.alignment,
            num_max_tokens_per_rank=sizes.tokens,
            num_sms=order.num_sms or self.get_theoretical_num_sms(sizes.experts, topk_idx.shape[1]),
            topk_idx=topk_idx.clone() if order.do_handle_copy else topk_idx,
            got=got,
            exchange=exchange,
            rows=got.count() if waits else exchange.spec.rows(self.num_ranks),
            num_recv_tokens_per_expert_list=[round_up(count, sizes.alignment) for count in counts],
            recv_topk_idx=local,
        )
        return _received(got, handle, topk_weights is not None, order)

    def _dispatch_again(
        self, x: torch.Tensor | Pair, topk_weights: torch.Tensor | None, handle: EPHandle, order: DispatchOptions
    ) -> Any:
        """Send rows to the places of an earlier dispatch. Without weights nothing is counted, if the backend can."""
        exchange, plain = handle.exchange, isinstance(x, torch.Tensor)
        if plain and exchange.spec.dispatch_wire != FP8 and exchange.keeps_places and topk_weights is None:
            rows = self._new_rows(exchange)
            exchange.dispatch_known(cast(torch.Tensor, x), handle.got, rows)
            return rows[: handle.rows], handle.received_ids, None, handle
        again = self._send(exchange, x, handle.topk_idx, topk_weights)
        return _received(again, handle, topk_weights is not None, order)

    def _send(
        self, exchange: Exchange, x: torch.Tensor | Pair, topk_idx: torch.Tensor, topk_weights: Any
    ) -> Dispatched:
        if topk_weights is None:
            topk_weights = torch.zeros(topk_idx.shape, dtype=torch.float32, device=topk_idx.device)
        return exchange.dispatch(x, topk_idx, topk_weights, out=self._new_rows(exchange))

    def _new_rows(self, exchange: Exchange) -> torch.Tensor:
        spec = exchange.spec
        dtype: torch.dtype = getattr(torch, spec.output_dtype)
        return torch.empty(spec.rows(self.num_ranks), spec.hidden, dtype=dtype, device=self.world.device)

    def _combine(
        self, x: torch.Tensor, handle: EPHandle, topk_weights: torch.Tensor | None, biases: Iterable[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        exchange, entries = handle.exchange, None
        if len(x) > handle.rows:
            x = x[: handle.rows]
        if topk_weights is None:
            y = exchange.combine(x, handle.got, weighted=False)
        else:
            numbers = topk_weights[: len(x)].float().contiguous()
            y, entries = exchange.combine_gradients(x, numbers.flatten() if handle.do_expand else numbers, handle.got)
        added = y.float() if biases else y
        for bias in biases:
            added = added + bias.float()
        return added.to(y.dtype), entries

    def _check_handle(self, handle: EPHandle, order: CallOptions) -> None:
        if self._destroyed or not any(handle.exchange is each for each in self._exchanges.values()):
            raise ConfigError("the handle comes from another buffer, or its buffer was destroyed")
        if order.num_sms not in (0, handle.num_sms):
            raise ConfigError(f"num_sms is {order.num_sms}, and it was {handle.num_sms} for the handle: leave it out")

    def _exchange_of(self, x: torch.Tensor | Pair, topk: int, sizes: _Sizes, order: DispatchOptions) -> Exchange:
        """Return the exchange for this form of dispatch; the first call makes it."""
        if self._destroyed:
            raise ConfigError("dispatch on a buffer that was destroyed; make a new one")
        values = x if isinstance(x, torch.Tensor) else x[0]
        if not isinstance(x, torch.Tensor) and x[1].dtype != torch.float32:
            raise ConfigError(f"scales are {x[1].dtype}; rows as fp8 have float32 scales, one for 128 elements")
        local = max(1, sizes.experts // self.num_ranks)
        # A token names an expert once, so at most L of its K are here. DeepEP counts so too.
        most = worst_rows(self.num_ranks * sizes.tokens * min(topk, local), local, sizes.alignment)
        spec = ExchangeSpec(
            tokens=sizes.tokens,
            hidden=values.shape[1],
            experts=sizes.experts,
            topk=topk,
            dtype="bfloat16" if values is not x else str(values.dtype).removeprefix("torch."),
            wire=FP8 if values is not x else None,
            output="raw" if values is not x else "dequantised",
            layout="expert" if order.do_expand else "token",
            alignment=sizes.alignment if order.do_expand else 1,
            padding="zero" if order.do_zero_padding and order.do_expand else "any",
            capacity=most if order.do_expand else "worst",
            depth=0,
        )
        sms = order.num_sms if self.world.device.type == "cuda" else 0
        exchange = self._exchanges.get((spec, sms))
        if exchange is None:
            space = self._workspace_for(spec)
            exchange = Exchange(self.world, spec, self.backend, workspace=space, sms=sms or "auto")
            self._exchanges[spec, sms] = exchange
        return exchange

    def _workspace_for(self, spec: ExchangeSpec) -> Workspace | None:
        """Return a workspace that the exchange shares with others of this buffer; None where it has none or its own.

        A program may give many numbers of tokens, each of which has an exchange. One workspace serves all that are
        smaller than the buffer.
        """
        gpu = self.world.device.type == "cuda" and self.world.domains == 1
        if not gpu or self.world.gpu.capability < FUSED_CAPABILITY or self.backend not in ("auto", "fused", "staged"):
            return None
        for workspace in self._workspaces:
            if all(workspace.bounds.serves(part, workspace.stamped) for part in spec.parts(self.num_ranks)):
                return workspace
        most = max(spec.tokens, self.num_max_tokens_per_rank)
        smaller = [replace(spec, tokens=1 << power) for power in range((most - 1).bit_length())]
        self._workspaces.append(Workspace(self.world, spec, replace(spec, tokens=most), *smaller))
        return self._workspaces[-1]

    def _in_order(
        self, work: Callable[[], T], order: CallOptions, given: Iterable[torch.Tensor | None]
    ) -> tuple[T, EventOverlap]:
        """Do the work of a call after the events that it waits for; if it is asynchronous, on a stream of its own."""
        events = [each for each in (order.previous_event, order.previous_event_before_epilogue) if each is not None]
        if not order.async_with_compute_stream or self.world.device.type == "cpu":
            for event in events:
                event.current_stream_wait()
            return work(), EventOverlap()
        compute, comm = torch.cuda.current_stream(self.world.device), self.get_comm_stream()
        if not events:
            comm.wait_stream(compute)
        with torch.cuda.stream(comm):
            for event in events:
                event.current_stream_wait()
            result = work()
            done = EventHandle()
        for tensor in given:
            if tensor is not None:
                tensor.record_stream(comm)
        for tensor in _tensors(result):
            tensor.record_stream(compute)
        return result, EventOverlap(done)


def _received(got: Dispatched, handle: EPHandle, weighted: bool, order: DispatchOptions) -> Any:
    """Return what a dispatch returns, except the event. The handle keeps no rows."""
    rows: torch.Tensor | Pair = got.x[: handle.rows]
    if got.scales is not None:
        scales = got.scales[: handle.rows]
        rows = cast(torch.Tensor, rows), scales if order.use_tma_aligned_col_major_sf else scales.contiguous()
    weights = got.weights[: handle.rows] if weighted else None
    got.x, got.scales = got.x.new_empty(0, got.x.shape[1]), None
    return rows, handle.received_ids, weights, handle


def _tensors(value: object) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a call's argument or result, those that its handle shows included."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, tuple):
        return tuple(tensor for each in value for tensor in _tensors(each))
    if isinstance(value, EPHandle):
        kept = value.got.topk_idx, value.got.sources
        return value.topk_idx, value.got.expert_counts, *(tensor for tensor in kept if tensor is not None)
    return ()


def _bytes_of(options: BufferOptions, ranks: int) -> int:
    """Count the slots of rows: for both directions, two buffers of T rows for each rank."""
    row = options.hidden * (1 if options.use_fp8_dispatch else 2) + 2 * options.hidden
    return round_up(max(1, 2 * ranks * options.num_max_tokens_per_rank * row), BUFFER_ALIGNMENT)


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> Any:
        raise ConfigError(f"{name} of DeepEP's ElasticBuffer asked for; raymoe has its dispatch and combine alone")

    refuse.__name__, refuse.__doc__ = name, "Raise: raymoe has dispatch and combine alone."
    return refuse


_LACKING = (
    *("engram_write", "engram_fetch", "get_engram_storage_size_hint", "pp_set_config", "pp_send", "pp_recv"),
    *("get_pp_buffer_size_hint", "get_agrs_num_max_session_bytes", "get_agrs_buffer_size_hint", "agrs_set_config"),
    *("create_agrs_session", "destroy_agrs_session", "agrs_new_session", "agrs_get_inplace_tensor", "all_gather"),
)
for _name in _LACKING:
    setattr(ElasticBuffer, _name, _refusing(_name))


class Buffer:
    """The buffer of DeepEP V1, which raymoe does not have."""

    def __init__(self, *_: object, **__: object) -> None:
        raise ConfigError("deep_ep.Buffer, the interface of DeepEP V1, asked for; raymoe has that of V2: ElasticBuffer")
