"""The form of a new layer, its parts, and their weights, which follow from a seed.

Parts are made empty and filled then. So a layer can be made on the device meta and filled after FSDP has spread it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raymoe.errors import ConfigError
from raymoe.exchange.spec import DTYPES, ExchangeSpec, dtype_name
from raymoe.fp8 import FP8
from raymoe.moe.by_row import in_tiles
from raymoe.moe.expert_rows import Groups
from raymoe.moe.experts import SWIGLU, Activation, Experts, ExpertsOfRank, ModelWeights, local
from raymoe.moe.families import Parts
from raymoe.moe.product_operators import Added, gate_experts, multiply_experts
from raymoe.moe.products import fits
from raymoe.moe.quantised_experts import quantise_experts
from raymoe.moe.quantised_shared import QuantisedMlp, quantise_shared
from raymoe.moe.recomputed_layer import check_recompute
from raymoe.moe.router import Router
from raymoe.moe.router_formulas import RouterForm
from raymoe.moe.weights import ExpertShape, expert_biases, expert_weights, generator, mlp_weights, normal
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
    weights: str | torch.dtype | None = None
    """The dtype of all parameters: that of the rows (None), or float32 with rows of 16 bits."""
    deterministic: str | None = None
    """`batch`: the bits of a token's result depend on that token alone, not on the others or their number, nor on
    whether gradients are recorded. It leaves out kernels that cannot do that (docs/reproducibility.md)."""
    recompute: str = "nothing"
    """What the backward pass computes again: `nothing`; `activation`, the rows between the experts' products; or `all`,
    the whole forward pass, dispatch included (docs/layer.md)."""
    experts_dtype: str | None = None
    """The format of the experts' weights, the shared one's too: as the others (None), or `float8_e4m3` with scales, for
    inference alone. Rows cross as 8-bit floats then (docs/layer.md)."""

    def __post_init__(self) -> None:
        check_recompute(self.recompute)
        check_deterministic(self.deterministic)
        for name, least in (("ffn", 1), ("shared", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} is {value!r}; a whole number of at least {least} is needed")
        check_experts_dtype(self.experts_dtype)
        if self.weights is not None and dtype_name(self.weights) not in DTYPES:
            raise ConfigError(f"weights is {dtype_name(self.weights)!r}; it is one of {', '.join(DTYPES)}, or None")


def check_deterministic(kind: str | None) -> None:
    """Refuse what `LayerForm.deterministic` cannot be."""
    if kind not in (None, "batch"):
        raise ConfigError(f"deterministic is {kind!r}; it is None or 'batch'")


def check_experts_dtype(name: str | None) -> None:
    """Refuse what `LayerForm.experts_dtype` cannot be."""
    if name not in (None, FP8):
        raise ConfigError(f"experts_dtype is {name!r}; it is None or {FP8!r}")


def dtype_of_weights(weights: str | torch.dtype | None, rows: str) -> torch.dtype:
    """Return the dtype of parameters over rows of the dtype `rows`.

    >>> dtype_of_weights("float32", rows="bfloat16"), dtype_of_weights(None, rows="float16")
    (torch.float32, torch.float16)
    """
    name = rows if weights is None else dtype_name(weights)
    if name not in ("float32", rows):
        raise ConfigError(f"weights is {name!r} with rows of {rows}; it is float32 or the dtype of the rows")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class Mlp(nn.Module):
    """A SwiGLU expert that all tokens pass through."""

    by_row = False
    """Whether the bits of a row's result depend on that row alone. A layer sets it."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up), nn.Parameter(down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.by_row:
            return self._by_torch(x)
        return self._as_one_expert(x) if len(x) and self._fits(x) else in_tiles(self._by_torch, x)

    def _fits(self, x: torch.Tensor) -> bool:
        """Whether the kernel of experts may take both products. torch.compile asks it too, which knows no addresses."""
        hidden, ffn = self.down_proj.shape
        return x.is_cuda and x.dtype == self.down_proj.dtype and fits(ffn, hidden) and fits(hidden, ffn)

    def _by_torch(self, x: torch.Tensor) -> torch.Tensor:
        h = SWIGLU(nn.functional.linear(x, self.gate_up_proj), by_row=self.by_row)
        return nn.functional.linear(h, self.down_proj)

    def _as_one_expert(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the kernel of experts, which gives a row the same bits among any others."""
        groups = Groups.one(len(x), x.device)
        h, _ = gate_experts(x, self.gate_up_proj[None], groups, ONE_EXPERT, SWIGLU.form)
        return multiply_experts(h, self.down_proj[None], groups, ONE_EXPERT)


ONE_EXPERT = Added(by_row=True, zero_gaps=False, gaps_are_zero=True)


class Norm(nn.Module):
    """RMSNorm with a weight."""

    by_row = False
    """Whether the bits of a row's result depend on that row alone. A layer sets it."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.by_row:  # a call without options checks none
            return rms_norm(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps, batch_invariant=True)


def empty_parts(spec: ExchangeSpec, form: LayerForm, count: int, device: torch.device) -> Parts:
    """Make the parts of a layer with `count` experts on this rank. Their values are unspecified."""
    dtype, hidden = dtype_of_weights(form.weights, spec.dtype), spec.hidden

    def empty(*size: int, device: torch.device = device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    routing = form.router or RouterForm(spec.experts, spec.topk)
    if (routing.experts, routing.topk) != (spec.experts, spec.topk):
        raise ConfigError(
            f"a router of the best {routing.topk} of {routing.experts} experts with an exchange of {spec.topk} of "
            f"{spec.experts}; give both the same"
        )
    ffn, quantised = form.ffn, form.experts_dtype is not None
    if quantised and dtype != getattr(torch, spec.dtype):
        raise ConfigError(
            f"weights is {dtype_name(dtype)!r} over rows of {spec.dtype} with experts of {FP8}, which are for "
            "inference; leave weights out"
        )
    of_experts = {"device": torch.device("meta") if quantised else device}
    weights = ModelWeights(empty(count, 2 * ffn, hidden, **of_experts), empty(count, hidden, ffn, **of_experts))
    if form.biases:
        weights.gate_up_proj_bias = empty(count, 2 * ffn, **of_experts)
        weights.down_proj_bias = empty(count, hidden, **of_experts)
    wide = Experts(weights, form.activation)  # of 8-bit experts the shapes alone: never all of them in 16 bits
    experts: ExpertsOfRank = quantise_experts(wide).to_empty(device=device) if quantised else wide
    correction = None
    if routing.score == "sigmoid":
        correction = torch.empty(spec.experts, dtype=torch.float32, device=device)
    router = Router(routing, empty(spec.experts, hidden), correction=correction)
    parts = Parts(router, experts, _empty_shared(form, hidden, dtype, device) if form.shared else None)
    parts.norm = None if form.norm is None else Norm(empty(hidden), form.norm)
    parts.residual = form.residual
    return parts


def _empty_shared(form: LayerForm, hidden: int, dtype: torch.dtype, device: torch.device) -> Mlp | QuantisedMlp:
    """Make the shared expert. Its values are unspecified."""
    quantised = form.experts_dtype is not None
    sizes = (2 * form.shared, hidden), (hidden, form.shared)
    mlp = Mlp(*(torch.empty(size, dtype=dtype, device="meta" if quantised else device) for size in sizes))
    return quantise_shared(mlp).to_empty(device=device) if quantised else mlp


@torch.no_grad()
def draw_weights(parts: Parts, form: LayerForm, seed: int, held: Sequence[int]) -> None:
    """Fill the parts of a layer with the values of a seed. `held` has the expert of each place; -1: zeros.

    Experts are drawn on the device that they are on, one after the other, so only one is in memory twice.
    FSDP may have spread the other parameters.
    """
    router, experts, shared, norm = parts.router, parts.experts, parts.shared, parts.norm
    down = local(experts.down_proj)
    assert down is not None
    hidden, dtype, device = down.shape[1], router.weight.dtype, down.device
    shape = ExpertShape(hidden, form.ffn, dtype)
    for place, expert in enumerate(held):
        if expert < 0:
            experts.put(place, None)
            continue
        drawn = expert_weights(shape, seed, expert, device)
        weights = ModelWeights(drawn.gate_up[None], drawn.down[None])
        if experts.down_proj_bias is not None:
            biases = expert_biases(shape, seed, expert, device)
            weights.gate_up_proj_bias, weights.down_proj_bias = biases.gate_up[None], biases.down[None]
        experts.put(place, weights)
    _fill(router.weight, normal(generator("router", seed), *router.weight.shape) * hidden**-0.5)
    if router.e_score_correction_bias is not None:
        router.e_score_correction_bias.zero_()
    if isinstance(norm, Norm):
        _fill(norm.weight, torch.ones(hidden, device="cpu"))
    if isinstance(shared, Mlp | QuantisedMlp):
        drawn = mlp_weights(ExpertShape(hidden, form.shared, dtype), generator("shared", seed, device=device))
        wide = Mlp(drawn.gate_up, drawn.down)
        values = dict((wide if isinstance(shared, Mlp) else quantise_shared(wide)).named_parameters())
        for name, parameter in shared.named_parameters():
            _fill(parameter, values[name])


def _fill(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Copy the values, or of a DTensor this rank's part of them. All ranks have the same values."""
    if not hasattr(parameter, "to_local"):
        parameter.copy_(values)
        return
    from torch.distributed.tensor import distribute_tensor

    spread: Any = parameter
    values = values.to(spread.device, spread.dtype)
    spread.copy_(distribute_tensor(values, spread.device_mesh, spread.placements, src_data_rank=None))
