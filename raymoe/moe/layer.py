"""The Mixture-of-Experts layer: norm, router, exchange, experts and shared expert put together."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Self, TypedDict, Unpack

import torch
from torch import nn

from raymoe.errors import ConfigError
from raymoe.exchange.backend import Dispatched, Tokens, column_pieces
from raymoe.exchange.peer.column_pieces import telling
from raymoe.exchange.shared import SharedExchanges
from raymoe.exchange.slots import SlotExperts
from raymoe.exchange.spec import ExchangeSpec, dtype_name
from raymoe.memory.world import World
from raymoe.moe.beside import SideStream
from raymoe.moe.by_row import in_tiles
from raymoe.moe.differentiable import combine, dispatch
from raymoe.moe.experts import Experts, shard
from raymoe.moe.families import Parts, parts_of
from raymoe.moe.kept_rows import RowSources, saves_memory
from raymoe.moe.layer_form import LayerForm as LayerForm
from raymoe.moe.layer_form import (
    Mlp,
    Norm,
    check_deterministic,
    check_experts_dtype,
    draw_weights,
    dtype_of_weights,
    empty_parts,
)
from raymoe.moe.live_weights import Loading, WeightSource, load_into
from raymoe.moe.quantised_experts import QuantisedExperts
from raymoe.moe.recomputed_layer import check_recompute, recomputed
from raymoe.moe.router import Routed
from raymoe.moe.row_counts import RowCounts
from raymoe.moe.scaled_layer import refuse_gradients, rows_for_experts, scaled_spec
from raymoe.moe.slot_parts import move_slots
from raymoe.moe.taken_over import watch_ddp
from raymoe.rows.elementwise import add

OVERLAPS = ("none", "combine")


class BlockOptions(TypedDict, total=False):
    """The options of a layer from a block of transformers."""

    dtype: str | torch.dtype | None
    """Of rows. None: that of the block's experts."""
    weights: str | torch.dtype | None
    """Of all parameters. None: they stay as they are in the block."""
    experts_dtype: str | None
    """As in `LayerForm`: `float8_e4m3` quantises the experts and the shared one."""
    capacity: int | float | str
    backend: str
    sms: int | str


class LoadOptions(TypedDict, total=False):
    """The options of a load of weights."""

    experts: Sequence[int] | None
    """The numbers of the experts along dimension 0 of the experts' weights. None: all of all ranks, or this rank's."""
    partial: bool
    """Whether parameters and parts of them may be left out."""
    cast: bool
    """Whether weights of another dtype are rounded."""


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer whose experts are spread over the ranks of a world. All ranks call it in one order.

    - **Weights** depend on the seed, and on the kind of device, which draws them: every rank has the same router, and
      expert e is the same on any rank, whatever the number of ranks. By default the first layer of a world has seed 0,
      the next one 1. Each rank holds its own experts. They are DTensors if the world was made from a process group;
      else `state_dict` refuses to give them where a checkpoint would take them for replicas.
    - **float32 weights** over rows of 16 bits (`LayerForm(weights="float32")`) are cast in each forward pass. Their
      gradients are float32. Such a layer takes x of float32 too, and y has the dtype of x.
    - **8-bit experts** (`LayerForm(experts_dtype="float8_e4m3")`, or parts with `QuantisedExperts`) are for inference.
      On GPUs rows cross as 8-bit values with scales, and go to the products so.
    - **Gradients** of experts are the sum over the tokens of all ranks. Those of the router, the norm and the shared
      expert are of this rank's tokens, as before the all-reduce of DDP. All ranks run the backward pass.
    - **Slots.** With `ExchangeSpec(slots=...)` a rank has the weights of its slots. `place` says which experts they
      hold, and `add_copy_gradients` adds the gradients of an expert's copies.
    - **Exchanges.** Layers of a world that have the same spec share one exchange, which the world closes.
    - **On GPUs** nothing waits for the device, and rows are bfloat16 or float16. The shared expert runs beside the
      dispatch.

    >>> with World.open(rank=0, size=1) as world:
    ...     world.wire([world.descriptor()])
    ...     layer = MoELayer(world, ExchangeSpec(tokens=4, hidden=8, experts=2, topk=1), LayerForm(ffn=16, shared=4))
    ...     y = layer(torch.ones(3, 8, dtype=torch.bfloat16))
    ...     y.float().sum().backward()
    >>> y.shape, layer.experts.down_proj.grad.shape
    (torch.Size([3, 8]), torch.Size([2, 8, 16]))
    """

    def __init__(
        self,
        world: World,
        spec: ExchangeSpec,
        form: LayerForm | Parts,
        *,
        backend: str = "auto",
        sms: int | str = "auto",
        seed: int | None = None,
    ) -> None:
        """`form` says what to make, or is the parts of a layer that exists already.

        `backend` and `sms` are those of the exchange. With fewer SMs it leaves some to a shared expert beside it. Under
        `torch.device("meta")` parameters have no memory yet: `to_empty` and `reset_parameters` give it and the values.
        """
        super().__init__()
        if spec.by_token:
            raise ConfigError("layout is token; the experts of a layer take rows by expert: take expert or rank")
        if spec.slots is not None and isinstance(form, Parts):
            raise ConfigError(f"slots is {spec.slots} with the parts of a layer; only layers from a form have slots")
        watch_ddp()
        is_scaled = self._is_scaled(form)
        spec = scaled_spec(spec, world, backend) if is_scaled else replace(spec, padding="zero")  # for gradients
        exchanges = world.shared(SharedExchanges)
        self.world, self.exchange = world, exchanges.of(spec, backend, sms)
        self.number = exchanges.next_number()
        """Its number among the layers of the world, from 1, the same on all ranks: steps of different layers are
        refused. A deep copy has it too."""
        spec = self.exchange.spec
        made, meta = isinstance(form, Parts), torch.empty(0).device.type == "meta"
        self.form = None if isinstance(form, Parts) else form
        self.seed = self.number - 1 if seed is None else seed
        if isinstance(form, Parts):
            parts = form
        else:
            device = torch.device("meta") if meta else world.device
            parts = empty_parts(spec, form, spec.local_experts(world.size), device)
        self._router_name, self._shared_name = parts.router_name, parts.shared_name
        self.add_module(parts.router_name, parts.router)
        self.experts = parts.experts
        if parts.shared is not None:
            self.add_module(parts.shared_name, parts.shared)
        self.norm, self.residual, self.gives_scores = parts.norm, parts.residual, parts.gives_scores
        self.deterministic = form.deterministic if isinstance(form, LayerForm) else None
        self.recompute = form.recompute if isinstance(form, LayerForm) else "nothing"
        self.keeps_rows = not saves_memory(self.exchange)
        # With slots, one more for the rows of empty ones, of which there are none.
        slots = spec.slots is not None
        counted = spec.experts + 1 if slots else spec.local_experts(world.size)
        self.row_counts = RowCounts(counted, world.device, by_expert=slots)
        """The rows that its experts got, in training mode."""
        self._overlap = "none"
        self.beside = True
        """Whether the shared expert runs beside the dispatch on GPUs, on a stream of its own."""
        on_gpu = parts.shared is not None and world.device.type == "cuda"
        self._side = world.shared(SideStream) if on_gpu else None
        rows: torch.dtype = getattr(torch, spec.dtype)
        of_weights = (parts.router.weight if is_scaled else self.experts.gate_up_proj).dtype
        self.rows_dtype = None if of_weights == rows else rows
        """The dtype that x and weights are cast to; None where they have it."""
        if isinstance(self.experts, Experts):
            self.experts.casts = self.rows_dtype is not None
        if made or not meta:
            self.to(world.device)
        self.experts.numbers, self.experts.of = self._held(), spec.experts
        shard(self.experts, world)
        if slots:
            self._write_placement(self.exchange.placement())
        if not made and not meta:
            self.reset_parameters()

    @property
    def deterministic(self) -> str | None:
        """Of what the bits of a token's result are independent: None, or `batch` (`LayerForm`)."""
        return "batch" if self._by_row else None

    @deterministic.setter
    def deterministic(self, kind: str | None) -> None:
        check_deterministic(kind)
        if kind is not None and isinstance(self.experts, QuantisedExperts):
            raise ConfigError(f"deterministic is {kind!r} with 8-bit experts, which do not promise it; leave it out")
        router: Any = self._modules[self._router_name]
        self._by_row = router.by_row = self.experts.by_row = kind == "batch"
        for part in (self.norm, self._modules.get(self._shared_name)):
            if isinstance(part, Norm | Mlp):
                part.by_row = self._by_row

    @property
    def recompute(self) -> str:
        """What the backward pass computes again: `nothing`, `activation` or `all` (`LayerForm`)."""
        return self._recompute

    @recompute.setter
    def recompute(self, kind: str) -> None:
        check_recompute(kind)
        self._recompute, self.experts.recomputes = kind, kind == "activation"

    @property
    def overlap(self) -> str:
        """The exchange beside the products in passes without gradients: `none`; or `combine`, which sends the first
        columns of the results while the last product computes the others (docs/layer.md). All ranks set the same."""
        return self._overlap

    @overlap.setter
    def overlap(self, kind: str) -> None:
        if kind not in OVERLAPS:
            raise ConfigError(f"overlap is {kind!r}; it is one of {', '.join(OVERLAPS)}")
        self._overlap = kind

    @property
    def keeps_rows(self) -> bool:
        """Whether a backward pass finds the dispatched rows in memory. Otherwise the rows of tokens are kept, once for
        each token, and it copies them to the places of the dispatched ones again (docs/layer.md)."""
        return self._keeps_rows

    @keeps_rows.setter
    def keeps_rows(self, keeps: bool) -> None:
        if not keeps and self.exchange.entry_places is None:
            raise ConfigError(f"keeps_rows is False with {self.exchange.backend}, which does not say where rows lie")
        self._keeps_rows = keeps

    @classmethod
    def from_block(
        cls,
        block: nn.Module,
        world: World,
        *,
        tokens: int,
        **options: Unpack[BlockOptions],
    ) -> Self:
        """Make a layer that computes what a block of transformers does, with this rank's share of its experts.

        The block is that of Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3 or gpt-oss; its router and shared expert are taken
        over, its experts copied. `tokens` is the most that a rank ever gives. Input and output are those of the block.
        By name it takes:

        - `weights="float32"`: parameters become float32, for training, and rows have the dtype of the block;
        - `experts_dtype="float8_e4m3"`: the experts and the shared one are quantised, for inference, and have their
          weights outputs first. 8-bit ones of `FineGrainedFP8Config` stay as they are;
        - `dtype`: that of rows. A block in float32 with `dtype="bfloat16"` keeps its parameters;
        - `capacity`, as in `ExchangeSpec`; `backend` and `sms`, as in a layer.
        """
        parts = parts_of(block, world.rank, world.size)
        gate_up = parts.experts.gate_up_proj
        hidden = gate_up.shape[1] if getattr(parts.experts, "transposed", False) else gate_up.shape[2]
        form, weights = parts.router.form, options.get("weights")
        own = parts.router.weight.dtype if isinstance(parts.experts, QuantisedExperts) else gate_up.dtype
        dtype = dtype_name(options.get("dtype") or own)
        of_weights = dtype_of_weights(weights or own, dtype)
        if weights is not None:
            parts.cast(of_weights)
        check_experts_dtype(options.get("experts_dtype"))
        if options.get("experts_dtype") is not None:
            parts.quantise()
        capacity = options.get("capacity", "worst")
        spec = ExchangeSpec(tokens, hidden, form.experts, form.topk, dtype=dtype, capacity=capacity, depth=0)
        layer = cls(world, spec, parts, backend=options.get("backend", "auto"), sms=options.get("sms", "auto"))
        return layer.train(block.training)

    @staticmethod
    def _is_scaled(form: LayerForm | Parts) -> bool:
        """Whether experts are of 8 bits."""
        if isinstance(form, Parts):
            return isinstance(form.experts, QuantisedExperts)
        return form.experts_dtype is not None

    def reset_parameters(self) -> None:
        """Give all parameters the values of the layer's seed, as a loop over a model's modules does after `to_empty`.

        FSDP may have spread the parameters that are not of experts.
        """
        if self.form is None:
            raise ConfigError("reset_parameters of a layer from a block, whose weights follow from no seed: load them")
        modules: dict[str, Any] = self._modules
        parts = Parts(modules[self._router_name], self.experts, modules.get(self._shared_name), norm=self.norm)
        draw_weights(parts, self.form, self.seed, self._held())

    def place(self, placement: SlotExperts | torch.Tensor) -> None:
        """Let slots hold the experts of a placement, and bring them their weights. All ranks call it between steps.

        It needs `ExchangeSpec(slots=...)`. Until the first call each expert has one slot, in ascending order. Gradients
        are dropped. An optimizer's state moves by `move_slots`. On GPUs graphs that were captured stay valid.
        """
        before = self.exchange.placement(self.number)
        self._write_placement(placement)
        after = self.exchange.placement(self.number)
        for parameter in self.experts.parameters():
            if parameter.device.type != "meta":
                move_slots(self.world, parameter.detach(), before, after)
            parameter.grad = None

    def _write_placement(self, placement: SlotExperts | torch.Tensor) -> None:
        self.exchange.place(placement, site=self.number)
        held = self.exchange.placement(self.number)[self.world.rank]
        self.row_counts.write_experts(held)
        self.experts.numbers = held.tolist()

    def _held(self) -> list[int]:
        """Return the expert of each place of this rank; -1: its slot is empty."""
        rank, spec = self.world.rank, self.exchange.spec
        if spec.slots is not None:
            held: list[int] = self.exchange.placement(self.number)[rank].tolist()
            return held
        count = spec.local_experts(self.world.size)
        return list(range(rank * count, (rank + 1) * count))

    def load(self, weights: Mapping[str, torch.Tensor] | WeightSource, **options: Unpack[LoadOptions]) -> int:
        """Give the layer new weights in the memory of the old, where captured graphs read them. All ranks call it.

        `weights` has a tensor for each parameter, of this rank's experts or of all, or is what `open_weights` gives.
        All ranks check before a byte changes. Steps before the call read old weights alone, steps after it new ones,
        on all ranks. Returns the epoch of the weights, which counts loads. `raymoe.moe.load_weights` is for a model.

        >>> with World.open(rank=0, size=1) as world:
        ...     world.wire([world.descriptor()])
        ...     layer = MoELayer(world, ExchangeSpec(tokens=4, hidden=8, experts=2, topk=1), LayerForm(ffn=16))
        ...     layer.load({name: torch.zeros_like(each) for name, each in layer.named_parameters()})
        1
        """
        return load_into(self, self.world, weights, **options)

    def loading(self, *, partial: bool = False, cast: bool = False) -> Loading:
        """Load weights in several pieces, which take effect together at the end of the `with`. All ranks call it.

        with layer.loading() as weights:
            weights.load(part, "experts.down_proj", experts=[4, 5], at=(0, 128))
            ...
        """
        return Loading(self.world, self, partial=partial, cast=cast)

    def forward(self, x: torch.Tensor, *, recorded: torch.Tensor | None = None, return_routing: bool = False) -> Any:
        """Map x[..., H] to y[..., H]. A layer made from a block of gpt-oss returns its router's weights too.

        With `return_routing` the result is y and the `Routed` of all tokens, one after the other.

        `recorded` has ids [..., K] of experts, which the router takes instead of its choice.
        """
        if torch.is_grad_enabled() and isinstance(self.experts, QuantisedExperts):
            refuse_gradients([("x", x), *self.named_parameters()])
        if self._recompute != "all" or not torch.is_grad_enabled():
            return self._map(x, recorded, return_routing)
        return recomputed(self._map, x, recorded, return_routing)

    def _map(self, x: torch.Tensor, recorded: torch.Tensor | None, return_routing: bool) -> Any:
        hidden = self.exchange.spec.hidden
        if x.dim() == 0 or x.shape[-1] != hidden:
            raise ConfigError(f"x has shape {list(x.shape)}; this layer takes rows of {hidden}")
        flat = x.reshape(-1, hidden)
        h, routing = self.route(flat, recorded)
        y = self.apply_experts(h, routing.topk_idx, routing.topk_weights, flat if self.residual else None).to(x.dtype)
        if x.dim() != 2:  # no view in the sense of autograd: FSDP2 warns of one, which a change in place would break
            y = torch.ops.aten._unsafe_view(y, x.shape)
        if return_routing:
            return y, routing
        return (y, routing.topk_weights.to(x.dtype)) if self.gives_scores else y

    def route(self, flat: torch.Tensor, recorded: torch.Tensor | None = None) -> tuple[torch.Tensor, Routed]:
        """Return the rows that the experts get for x[T', H], and their routing."""
        h = flat if self.norm is None else self.norm(flat)
        h = h if self.rows_dtype is None else h.to(self.rows_dtype)
        router = self._modules[self._router_name]
        assert router is not None
        routing: Routed = router(h) if recorded is None else router(h, recorded)
        return h, routing

    def apply_experts(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply the experts of a given routing, and the shared expert, and add their results and the residual."""
        added = () if residual is None else (residual,)
        if not self.has_shared:
            return add(self.routed(x, topk_idx, topk_weights), *added)
        if self._side is None or not self.beside or torch.compiler.is_compiling():
            y = self.routed(x, topk_idx, topk_weights)
            return add(y, self.apply_shared(x), *added)
        with self._side.beside(self.apply_shared, x) as beside:
            # The dispatch is enqueued first: its blocks then get their SMs before those of the shared expert do.
            y = self.routed(x, topk_idx, topk_weights, beside.start)
        return add(y, beside.result, *added)

    @property
    def has_shared(self) -> bool:
        """Whether it has a shared expert."""
        return self._modules.get(self._shared_name) is not None

    def apply_shared(self, x: torch.Tensor) -> Any:
        """Apply the shared expert, in the dtype of the rows."""
        shared: Any = self._modules[self._shared_name]
        if self._by_row and not isinstance(shared, Mlp):
            shared = functools.partial(in_tiles, shared)
        if self.rows_dtype is None:
            return shared(x)
        with torch.autocast(x.device.type, dtype=self.rows_dtype, cache_enabled=False):
            return shared(x)

    def routed(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        after_dispatch: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Dispatch, apply the experts and combine, for a given routing. `after_dispatch` may enqueue other work."""
        if isinstance(self.experts, QuantisedExperts):
            if torch.is_grad_enabled():
                refuse_gradients([("x", x), ("topk_weights", topk_weights), *self.named_parameters()])
        elif torch.is_grad_enabled() or torch.compiler.is_compiling():
            x = x.contiguous()
            got = dispatch(self.exchange, x, topk_idx, topk_weights, site=self.number)
            if after_dispatch is not None:
                after_dispatch()
            if self.training:
                self.row_counts.add(got.expert_offsets, got.expert_counts)
            sources = None
            if not self._keeps_rows and self._recompute != "all":  # rows of a repeated pass are soon used
                sources = RowSources(self.exchange, x, got.routing[1], got.routing[0])
            rows = self.experts(got.x, got.expert_offsets, got.expert_counts, got.weights, sources)
            return combine(self.exchange, rows, got, weighted=False)
        dispatched = self.dispatch_rows(x, topk_idx, topk_weights)
        if after_dispatch is not None:
            after_dispatch()
        pieces = column_pieces(dispatched) if self._sends_pieces() else None
        with nullcontext() if pieces is None else telling(pieces):
            rows = self.multiply_rows(dispatched).to(x.dtype)
        return self.exchange.combine_unkept(rows, dispatched, weighted=not self._by_row, pieces=pieces)

    def _sends_pieces(self) -> bool:
        """Whether the combine may run beside the last product; alike on all ranks.

        With weights in the first product, a bias is added after the last one.
        """
        return self._overlap == "combine" and not (self._by_row and self.experts.down_proj_bias is not None)

    # The steps of a pass without gradients.

    def dispatch_rows(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, *, apart: bool = False
    ) -> Dispatched:
        """Send rows to their experts; with `apart` into memory that no later dispatch overwrites."""
        spec, out = self.exchange.spec, None
        if spec.layout == "expert" and (apart or spec.depth == 0):
            dtype: torch.dtype = getattr(torch, spec.output_dtype)
            out = torch.empty(spec.rows(self.world.size), spec.hidden, dtype=dtype, device=x.device)
        # Only the gradients of weights need zeros. Of one token a dispatch takes 6 us without, and 13 with them (H200).
        tokens = Tokens(x.contiguous(), topk_idx, topk_weights, None, zero_gaps=False, site=self.number)
        if spec.slots is not None:
            tokens.topk_idx = self.exchange.slots_of(topk_idx, self.number)
        return self.exchange.dispatch_unkept(tokens, out)

    def multiply_rows(self, dispatched: Dispatched) -> torch.Tensor:
        """Apply this rank's experts to the rows that came."""
        if self.training:
            self.row_counts.add(dispatched.expert_offsets, dispatched.expert_counts)
        # Weights are applied between the products where gradients are needed, which rounds at other places.
        weights = dispatched.weights if self._by_row else None
        places = dispatched.expert_offsets, dispatched.expert_counts
        rows: torch.Tensor = self.experts(rows_for_experts(dispatched), *places, weights)
        return rows

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the weights; the copy is a layer of the same world and exchange."""
        memo |= {id(shared): shared for shared in (self.world, self.exchange, self._side)}
        layer = memo[id(self)] = type(self).__new__(type(self))
        layer.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return layer


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the experts of all layers in a model, by name.

    Each rank holds other values of them. So data parallelism must neither spread nor reduce them, and where they are
    DTensors, an optimizer takes them in a group of their own.

    >>> from raymoe import World
    >>> world = World.open(rank=0, size=1)
    >>> world.wire([world.descriptor()])
    >>> spec = ExchangeSpec(tokens=4, hidden=4, experts=2, topk=1, dtype="float32")
    >>> with world:
    ...     list(expert_parameters(nn.Sequential(nn.Linear(4, 4), MoELayer(world, spec, LayerForm(ffn=2)))))
    ['1.experts.gate_up_proj', '1.experts.down_proj']
    """
    return {
        full: parameter
        for name, layer in layers_of(model).items()
        for full, parameter in layer.experts.named_parameters(f"{name}.experts" if name else "experts")
    }


def layers_of(model: nn.Module) -> dict[str, MoELayer]:
    """Return the layers in a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
