"""NCCL EP, of the package nccl-extensions: its two algorithms, without a wait of the host.

| algorithm | layout: expert | layout: rank |
| --- | --- | --- |
| low latency | each expert's rows in a block of R*T | each source's rows in a block of T |
| high throughput | expert by expert, each at a multiple of the alignment | one after the other, a token once |

A dispatch begins with the handle's update, which takes the routing of this step. With `layout: rank` a token comes once
for a rank, with the ids and weights of its experts there.

A combine adds rows. Only low latency by expert applies the weights itself. Elsewhere they are applied where rows are
computed, off the clock. With `layout: rank` that holds for the sum of a rank's rows of a token too.

The limit of SMs holds for its own kernels. The update of high throughput gathers the routing by a collective of NCCL,
which takes SMs of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.layout import round_up
from raymoe.memory.world import World
from raymoe.workload.compare.unordered_rows import Came, Part, SentRows, sources_of
from raymoe.workload.inputs import Batch, Inputs
from raymoe.workload.measure import Line
from raymoe.workload.oracle import wrong_result

TOKENS_STEP = 4
"""High throughput copies its map of T rows by 16 bytes, so between two ranks it takes no odd T."""


class Receiver:
    """The memory that a dispatch fills, and the names under which NCCL EP takes it."""

    def __init__(self, ep: Any, spec: ExchangeSpec, world: World, *, low_latency: bool) -> None:
        size, device = world.size, world.device
        local, T, K, by_expert = spec.local_experts(size), spec.tokens, spec.topk, spec.layout == "expert"
        blocks: tuple[int, ...] = (most_rows(spec, size),)
        if low_latency:
            blocks = (local, size * T) if by_expert else (size, T)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        by_source = low_latency and not by_expert
        self.x = torch.zeros(*blocks, spec.hidden, dtype=dtype, device=device)
        self.counts = torch.zeros(size if by_source else local, dtype=torch.int32, device=device)
        self.total = torch.zeros(1, dtype=torch.int32, device=device)
        self.weights: torch.Tensor | None = None
        self.ids: torch.Tensor | None = None
        if not by_expert:
            self.weights = torch.zeros(*blocks, K, dtype=torch.float32, device=device)
            self.ids = torch.zeros(*blocks, K, dtype=torch.int32 if low_latency else torch.int64, device=device)
        elif not low_latency:
            self.weights = torch.zeros(*blocks, dtype=torch.float32, device=device)
        counters = {"src_rank_counters" if by_source else "expert_counters": ep.Tensor(self.counts)}
        if not low_latency:
            counters["recv_total_counter"] = ep.Tensor(self.total)
        self.layout_info = ep.LayoutInfo(recv_topk_idx_kind=ep.ExpertIdKind.LOCAL, **counters)
        given = {"topk_weights": self.weights, "topk_idx": self.ids}
        optional = {name: ep.Tensor(memory) for name, memory in given.items() if memory is not None}
        self.outputs = ep.DispatchOutputs(tokens=ep.Tensor(self.x), **optional)

    def poison(self) -> None:
        for memory in (self.x, self.weights):
            if memory is not None:
                memory.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
        if self.ids is not None:
            self.ids.fill_(-7)


class NcclEp:
    """Its dispatch and combine, with the tokens of this rank. All ranks make one."""

    def __init__(self, world: World, spec: ExchangeSpec, inputs: Inputs, sms: int, *, low_latency: bool) -> None:
        """`sms`: SMs of a dispatch and of a combine; 0: its own choice."""
        self._world, self._spec, self._inputs = world, spec, inputs
        self._ll, self._by_expert, self._sms = low_latency, spec.layout == "expert", sms
        self.left_out: dict[str, str | None] = self._named_work()
        ep: Any = importlib.import_module("nccl.ep")
        self._ep = ep
        self._group = ep.Group.create(_communicator(world), self._config())
        first = inputs.at(0)
        self._batch = Batch(first.x.clone(), first.ids.to(torch.int64), first.weights.clone())
        self._received = Receiver(ep, spec, world, low_latency=low_latency)
        self._rows = torch.zeros_like(self._received.x)
        """The rows that a combine sends; on steps that are not verified any numbers."""
        self._y = torch.zeros_like(self._batch.x)
        weights = ep.Tensor(self._batch.weights)
        carries = {} if low_latency and self._by_expert else {"topk_weights": weights}
        applies = {"topk_weights": weights} if low_latency and self._by_expert else {}
        self._ids = ep.Tensor(self._batch.ids)
        self._inputs_out = ep.DispatchInputs(tokens=ep.Tensor(self._batch.x), **carries)
        self._combine_in = ep.CombineInputs(tokens=ep.Tensor(self._rows))
        self._combine_out = ep.CombineOutputs(tokens=ep.Tensor(self._y), **applies)
        self._sent = SentRows(world, spec, inputs)
        self._index = 0
        aligned = not low_latency and self._by_expert
        self._handle = self._group.create_handle(
            self._layout(),
            self._ids,
            layout_info=None if low_latency else self._received.layout_info,
            config=ep.HandleConfig(dispatch_output_per_expert_alignment=spec.alignment if aligned else 0),
            stream=self._stream(),
        )

    @property
    def keys(self) -> Line:
        return {"sms": self._sms or None}

    def take(self, index: int, *, fresh: bool) -> None:
        self._batch.copy_(self._inputs.at(index, fresh=fresh))
        self._index = index
        self._rows.uniform_(-1, 1)  # a verified step leaves NaN
        if fresh:
            self._received.poison()
            self._y.fill_(torch.nan)

    def dispatch(self) -> None:
        stream, received = self._stream(), self._received
        self._handle.update(self._ids, layout_info=None if self._ll else received.layout_info, stream=stream)
        self._handle.dispatch(
            self._inputs_out, received.outputs, layout_info=received.layout_info, config=None, stream=stream
        )

    def combine(self) -> None:
        self._handle.combine(self._combine_in, self._combine_out, config=None, stream=self._stream())

    def exchange(self) -> None:
        self.dispatch()
        self.combine()

    def wrong_dispatch(self) -> str | None:
        """Return what is wrong, or None; then the experts have computed the rows of the combine."""
        received = self._received
        came = Came(received.x, received.ids, received.weights)
        weigh = not (self._ll and self._by_expert)
        return self._sent.wrong(self._index, self._parts(), came, self._rows, weigh=weigh)

    def wrong_combine(self) -> str | None:
        batch = Batch(self._inputs.at(self._index, fresh=True).x, self._batch.ids, self._batch.weights)
        return wrong_result(self._y, batch, self._sent.experts, self._spec)

    def _config(self) -> Any:
        ep, spec = self._ep, self._spec
        return ep.GroupConfig(
            algorithm=ep.Algorithm.LOW_LATENCY if self._ll else ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=spec.experts,
            max_dispatch_tokens_per_rank=spec.tokens if self._ll else most_tokens(spec),
            max_recv_tokens_per_rank=0 if self._ll else most_rows(spec, self._world.size),
            max_token_bytes=spec.row_bytes,
            max_num_sms=self._sms,
            num_topk=spec.topk,
            timeout_ns=round(self._world.timeout_s * 1e9),
        )

    def _layout(self) -> Any:
        if self._by_expert:
            return self._ep.Layout.EXPERT_MAJOR
        return self._ep.Layout.RANK_MAJOR if self._ll else self._ep.Layout.FLAT

    def _stream(self) -> int:
        return current_stream(self._world.device)

    # What a dispatch should give.

    def _parts(self) -> Iterator[Part]:
        counts, device = self._received.counts.tolist(), self._world.device
        ids = [self._sent.ids_of(rank, self._index) for rank in range(self._world.size)]
        first = self._world.rank * len(counts)
        begin = 0
        for expert in range(first, first + len(counts)) if self._by_expert else ():
            ranks, tokens = sources_of([(of_rank == expert).any(dim=1) for of_rank in ids])
            local, align = expert - first, self._spec.alignment
            count = counts[local]
            if not self._ll:  # its counts have the gaps too
                count = len(tokens) if count == -(-len(tokens) // align) * align else count
            start = local * self._received.x.shape[1] if self._ll else begin
            begin += counts[local]
            yield Part(f"for expert {expert}", torch.arange(start, start + count, device=device), ranks, tokens, expert)
        if self._by_expert:
            return
        here = [(of_rank >= 0).any(dim=1) for of_rank in ids]
        if not self._ll:
            places = torch.arange(int(self._received.total.item()), device=device)
            yield Part("from all ranks", places, *sources_of(here))
            return
        for rank, wanted in enumerate(here):
            nobody = torch.zeros(0, dtype=torch.bool, device=device)
            ranks, tokens = sources_of([wanted if other == rank else nobody for other in range(len(here))])
            start = rank * self._spec.tokens
            yield Part(f"from rank {rank}", torch.arange(start, start + counts[rank], device=device), ranks, tokens)

    def _named_work(self) -> dict[str, str | None]:
        dispatch = [] if self._by_expert else ["rows by expert"]
        if self._ll and self._by_expert:
            dispatch.append("rows without gaps between blocks")
        combine = [] if self._ll and self._by_expert else ["weights"]
        if not self._by_expert:
            combine.append("the sum of a rank's rows")
        named = {"dispatch": dispatch, "combine": combine, "exchange": [*dispatch, *combine]}
        return {op: ", ".join(work) or None for op, work in named.items()}


def most_tokens(spec: ExchangeSpec) -> int:
    """Return the tokens of a rank that high throughput reserves memory for: T, or a few more."""
    return round_up(spec.tokens, TOKENS_STEP)


def most_rows(spec: ExchangeSpec, size: int) -> int:
    """Return the rows that a rank may receive by high throughput."""
    tokens = most_tokens(spec)
    return max(spec.rows(size), tokens) if spec.layout == "expert" else size * tokens


def current_stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _communicator(world: World) -> Any:
    """Make a communicator of NCCL's own bindings. The ranks swap its id by the world."""
    core: Any = importlib.import_module("nccl.core")
    own = bytes(core.get_unique_id().as_bytes) if world.rank == 0 else b""
    unique = core.UniqueId.from_bytes(world.swap(own, "nccl_ep: communicator")[0])
    return core.Communicator.init(nranks=world.size, rank=world.rank, unique_id=unique)
