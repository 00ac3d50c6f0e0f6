"""The Mixture-of-Experts layer: norm, router, exchange, experts and shared expert put together."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from raymoe.errors import ConfigError
from raymoe.exchange.backend import Tokens
from raymoe.exchange.shared import SharedExchanges
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.beside import SideStream
from raymoe.moe.by_row import in_tiles
from raymoe.moe.differentiable import combine, dispatch, expert_major
from raymoe.moe.experts import SWIGLU, Activation, Experts, ModelWeights, shard
from raymoe.moe.families import Parts, parts_of
from raymoe.moe.router import Routed, Router
from raymoe.moe.router_formulas import RouterForm
from raymoe.moe.weights import ExpertShape, ExpertWeights, expert_biases, expert_weights, generator, mlp_weights, normal
from raymoe.rows.elementwise import add
from raymoe.rows.norm import rms_norm


@dataclass(frozen=True)
class LayerForm:
    """The computation of a layer, besides the sizes that its exchange has.

    The output is experts(h) + shared(h), plus x with `residual`. h is RMSNorm of x, or x itself where `norm` is None.
    """

    ffn: int
    router: RouterForm | None = None
    """None: softmax over all experts, weights that sum to one."""
    activation: Activation = SWIGLU
    """The activation of the experts, without the shared one."""
    biases: bool = False
    """Whether the experts add a bias in both products."""
    shared: int = 0
    """The ffn of the shared expert, which all tokens pass through; 0: there is none."""
    norm: float | None = None
    """The epsilon of RMSNorm."""
    residual: bool = False
    deterministic: str | None = None
    """`batch`: the bits of a token's result depend on that token alone, not on the others or their number, nor on
    whether gradients are recorded. It leaves out kernels that cannot do that (docs/reproducibility.md)."""

    def __post_init__(self) -> None:
        _check_deterministic(self.deterministic)
        for name, least in (("ffn", 1), ("shared", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} is {value!r}; a whole number of at least {least} is needed")


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer whose experts are spread over the ranks of a world. All ranks call it in one order.

    - **Weights** depend on the seed, and on the kind of device, which draws them: every rank has the same router, and
      expert e is the same on any rank. Each rank holds its own experts. They are DTensors if the world was made from a
      process group; else `state_dict` refuses to give them where a checkpoint would take them for replicas.
    - **Gradients** of experts are the sum over the tokens of all ranks. Those of the router, the norm and the shared
      expert are of this rank's tokens, as before the all-reduce of DDP. All ranks run the backward pass.
    - **Exchanges.** Layers of a world that have the same spec share one exchange, which the world closes.
    - **On GPUs** nothing waits for the device, and weights are bfloat16 or float16. The shared expert runs beside the
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
        seed: int = 0,
    ) -> None:
        """`form` says what to make, or is the parts of a layer that exists already.

        `backend` and `sms` are those of the exchange. With fewer SMs it leaves some to a shared expert beside it.
        """
        super().__init__()
        spec = replace(spec, padding="zero")  # for the gradients of weights
        exchanges = world.shared(SharedExchanges)
        self.world, self.exchange = world, exchanges.of(spec, backend, sms)
        self.number = exchanges.next_number()
        """Its number among the layers of the world, from 1, the same on all ranks: steps of different layers are
        refused. A deep copy has it too."""
        parts = form if isinstance(form, Parts) else _new_parts(world, self.exchange.spec, form, seed)
        self._router_name, self._shared_name = parts.router_name, parts.shared_name
        self.add_module(parts.router_name, parts.router)
        self.experts = parts.experts
        if parts.shared is not None:
            self.add_module(parts.shared_name, parts.shared)
        self.norm, self.residual, self.gives_scores = parts.norm, parts.residual, parts.gives_scores
        self.deterministic = form.deterministic if isinstance(form, LayerForm) else None
        self.beside = True
        """Whether the shared expert runs beside the dispatch on GPUs, on a stream of its own."""
        on_gpu = parts.shared is not None and world.device.type == "cuda"
        self._side = world.shared(SideStream) if on_gpu else None
        self.to(world.device)
        shard(self.experts, world)

    @property
    def deterministic(self) -> str | None:
        """Of what the bits of a token's result are independent: None, or `batch` (`LayerForm`)."""
        return "batch" if self._by_row else None

    @deterministic.setter
    def deterministic(self, kind: str | None) -> None:
        _check_deterministic(kind)
        router: Any = self._modules[self._router_name]
        self._by_row = router.by_row = self.experts.by_row = kind == "batch"
        if isinstance(shared := self._modules.get(self._shared_name), Mlp):
            shared.by_row = self._by_row

    @classmethod
    def from_block(
        cls,
        block: nn.Module,
        world: World,
        *,
        tokens: int,
        backend: str = "auto",
        sms: int | str = "auto",
        capacity: int | float | str = "worst",
    ) -> Self:
        """Make a layer that computes what a block of transformers does, with this rank's share of its experts.

        The block is that of Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3 or gpt-oss; its router and shared expert are taken
        over, its experts copied. `tokens` is the most that a rank ever gives. Input and output are those of the block.
        """
        parts = parts_of(block, world.rank, world.size)
        gate_up = parts.experts.gate_up_proj
        hidden = gate_up.shape[1] if parts.experts.transposed else gate_up.shape[2]
        form = parts.router.form
        dtype = str(gate_up.dtype).removeprefix("torch.")
        spec = ExchangeSpec(tokens, hidden, form.experts, form.topk, dtype=dtype, capacity=capacity, depth=0)
        return cls(world, spec, parts, backend=backend, sms=sms).train(block.training)

    def forward(self, x: torch.Tensor, *, recorded: torch.Tensor | None = None) -> Any:
        """Map x[..., H] to y[..., H]. A layer made from a block of gpt-oss returns its router's weights too.

        `recorded` has ids [..., K] of experts, which the router takes instead of its choice.
        """
        hidden = self.exchange.spec.hidden
        if x.dim() == 0 or x.shape[-1] != hidden:
            raise ConfigError(f"x has shape {list(x.shape)}; this layer takes rows of {hidden}")
        flat = x.reshape(-1, hidden)
        h = flat if self.norm is None else self.norm(flat)
        router = self._modules[self._router_name]
        assert router is not None
        routing: Routed = router(h) if recorded is None else router(h, recorded)
        y = self.apply_experts(h, routing.topk_idx, routing.topk_weights, flat if self.residual else None)
        y = y.reshape(x.shape)
        return (y, routing.topk_weights.to(x.dtype)) if self.gives_scores else y

    def apply_experts(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply the experts of a given routing, and the shared expert, and add their results and the residual."""
        shared: Callable[[torch.Tensor], torch.Tensor] | None = self._modules.get(self._shared_name)
        added = () if residual is None else (residual,)
        if shared is not None and self._by_row:
            shared = functools.partial(in_tiles, shared)
        if shared is None:
            return add(self.routed(x, topk_idx, topk_weights), *added)
        if self._side is None or not self._shares_gpu(x):
            y = self.routed(x, topk_idx, topk_weights)
            return add(y, shared(x), *added)
        with self._side.beside(shared, x) as beside:
            # The dispatch is enqueued first: its blocks then get their SMs before those of the shared expert do.
            y = self.routed(x, topk_idx, topk_weights, beside.start)
        return add(y, beside.result, *added)

    def _shares_gpu(self, x: torch.Tensor) -> bool:
        """Whether the shared expert runs beside the others.

        Few rows do not: with it beside them a layer of 128 tokens took 4769 us, and its parts one after the other 2925
        (one H200, 128 experts of DeepSeek-V3, 2026-11-24). The cause is probably the L1 cache, through which these
        products read x: a kernel beside them that has much shared memory leaves little of it.
        """
        if not self.beside or torch.compiler.is_compiling():
            return False
        return not self.experts.streams_weights(x, self.rows_of_an_expert(len(x)))

    def routed(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        after_dispatch: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Dispatch, apply the experts and combine, for a given routing. `after_dispatch` may enqueue other work."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            got = dispatch(self.exchange, x.contiguous(), topk_idx, topk_weights, site=self.number)
            if after_dispatch is not None:
                after_dispatch()
            expected = self.rows_of_an_expert(len(x))
            rows = self.experts(got.x, got.expert_offsets, got.expert_counts, got.weights, expected_rows=expected)
            return combine(self.exchange, rows, got, weighted=False)
        spec, out = self.exchange.spec, None
        if spec.layout == "expert" and spec.depth == 0:
            out = torch.empty(spec.rows(self.world.size), spec.hidden, dtype=x.dtype, device=x.device)
        # Only the gradients of weights need zeros. Of one token a dispatch takes 6 us without, and 13 with them (H200).
        tokens = Tokens(x.contiguous(), topk_idx, topk_weights, None, zero_gaps=False, site=self.number)
        dispatched = self.exchange.dispatch_unkept(tokens, out)
        if after_dispatch is not None:
            after_dispatch()
        # Weights are applied between the products where gradients are needed, which rounds at other places.
        weights = dispatched.weights if self._by_row else None
        rows = self.experts(
            expert_major(dispatched),
            dispatched.expert_offsets,
            dispatched.expert_counts,
            weights,
            expected_rows=self.rows_of_an_expert(len(x)),
        )
        return self.exchange.combine_unkept(rows, dispatched, weighted=weights is None)

    def rows_of_an_expert(self, tokens: int) -> float:
        """The rows that an expert gets on average, if every rank has `tokens` tokens."""
        spec = self.exchange.spec
        return tokens * self.world.size * spec.topk / spec.experts

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the weights; the copy is a layer of the same world and exchange."""
        memo |= {id(shared): shared for shared in (self.world, self.exchange, self._side)}
        layer = memo[id(self)] = type(self).__new__(type(self))
        layer.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return layer


def _check_deterministic(kind: str | None) -> None:
    if kind not in (None, "batch"):
        raise ConfigError(f"deterministic is {kind!r}; it is None or 'batch'")


class Mlp(nn.Module):
    """A SwiGLU expert that all tokens pass through."""

    by_row = False
    """Whether its activation gives a row the same bits among any others. A layer gives it tiles of rows then."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up), nn.Parameter(down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = SWIGLU(nn.functional.linear(x, self.gate_up_proj), by_row=self.by_row)
        return nn.functional.linear(h, self.down_proj)


class Norm(nn.Module):
    """RMSNorm with a weight."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


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
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, MoELayer)]
    return {
        full: parameter
        for name, layer in layers
        for full, parameter in layer.experts.named_parameters(f"{name}.experts" if name else "experts")
    }


def _new_parts(world: World, spec: ExchangeSpec, form: LayerForm, seed: int) -> Parts:
    """Draw the weights of a new layer."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    shape, count, device = ExpertShape(spec.hidden, form.ffn, dtype), spec.local_experts(world.size), world.device
    local = range(world.rank * count, (world.rank + 1) * count)
    weights = ModelWeights(*_stacked(count, (expert_weights(shape, seed, expert, device) for expert in local)))
    if form.biases:
        added = _stacked(count, (expert_biases(shape, seed, expert, device) for expert in local))
        weights.gate_up_proj_bias, weights.down_proj_bias = added
    routing = form.router or RouterForm(spec.experts, spec.topk)
    if (routing.experts, routing.topk) != (spec.experts, spec.topk):
        raise ConfigError(
            f"a router of the best {routing.topk} of {routing.experts} experts with an exchange of {spec.topk} of "
            f"{spec.experts}; give both the same"
        )
    weight = normal(generator("router", seed), spec.experts, spec.hidden) * spec.hidden**-0.5
    norm = None if form.norm is None else Norm(torch.ones(spec.hidden, dtype=dtype, device="cpu"), form.norm)
    shared = None
    if form.shared:
        source = generator("shared", seed, device=device)
        drawn_shared = mlp_weights(ExpertShape(spec.hidden, form.shared, dtype), source)
        shared = Mlp(drawn_shared.gate_up, drawn_shared.down)
    correction = None
    if routing.score == "sigmoid":
        correction = torch.zeros(spec.experts, dtype=torch.float32, device="cpu")
    parts = Parts(Router(routing, weight.to(dtype), correction=correction), Experts(weights, form.activation), shared)
    parts.norm, parts.residual = norm, form.residual
    return parts


def _stacked(count: int, drawn: Iterable[ExpertWeights]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack the two tensors of each expert. Experts are copied one after the other, so only one is in memory twice."""
    gate_up = down = torch.empty(0)
    for place, weights in enumerate(drawn):
        if place == 0:
            gate_up, down = (part.new_empty(count, *part.shape) for part in (weights.gate_up, weights.down))
        gate_up[place], down[place] = weights.gate_up, weights.down
    return gate_up, down
