"""The experts of one rank with weights of 8-bit floats, made from wider ones by `quantise_experts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raymoe.errors import ConfigError
from raymoe.fp8 import FP8_BLOCK, quantise_weight
from raymoe.moe.expert_rows import Groups, add_expert_bias
from raymoe.moe.experts import SWIGLU, Activation, Experts, ExpertsOfRank, ModelWeights, local
from raymoe.moe.product_fp8_operators import Scaled, ScaledOperands, gate_scaled, multiply_scaled
from raymoe.moe.product_operators import Added
from raymoe.rows.quantised_rows import quantise_rows


class ScaledWeights(NamedTuple):
    """The weights of some experts as 8-bit floats, with a float32 scale for each 128 rows and 128 columns.

    Gate and up have multiples of 128 rows, where they do not take turns.
    """

    gate_up_proj: Tensor
    """float8_e4m3fn[L, 2F, H]."""
    gate_up_proj_scale_inv: Tensor
    """float32[L, ceil(2F / 128), ceil(H / 128)], by which values are multiplied: DeepSeek's name for them."""
    down_proj: Tensor
    """float8_e4m3fn[L, H, F]."""
    down_proj_scale_inv: Tensor
    """float32[L, ceil(H / 128), ceil(F / 128)]."""
    gate_up_proj_bias: Tensor | None = None
    down_proj_bias: Tensor | None = None


class QuantisedExperts(ExpertsOfRank):
    """The experts of one rank, for forward passes without gradients. Its parameters need no gradients."""

    gate_up_proj_scale_inv: nn.Parameter
    down_proj_scale_inv: nn.Parameter

    def __init__(self, weights: ScaledWeights, activation: Activation = SWIGLU) -> None:
        super().__init__()
        self.activation = activation
        for name, value in weights._asdict().items():
            self.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))

    def forward(
        self,
        x: Tensor | Scaled,
        offsets: Tensor,
        counts: Tensor,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Map x[C, H] to rows[C, H]. Local expert i has `counts[i]` rows from `offsets[i]` on; others are unspecified.

        x is a pair of values and scales, as a dispatch gives them raw, or rows that are quantised here. The rows
        between the products are quantised too, by the kernel of the first. `weights` are as in `Experts`. The
        result has the dtype of x, bfloat16 for a pair.
        """
        return apply_scaled(x, self.parts(), Groups(offsets, counts), self.activation, weights)

    def parts(self) -> ScaledWeights:
        """Return the weights as this rank holds them: plain tensors, also where they are shards."""
        own: dict[str, Any] = {name: local(getattr(self, name)) for name in ScaledWeights._fields}
        return ScaledWeights(**own)

    def put(self, place: int, weights: ModelWeights | None) -> None:
        """Quantise the weights of one expert, `[1, ...]`, into a place of these; None puts zeros there."""
        own = self.parts()
        quantised = own if weights is None else quantise_experts(Experts(weights, self.activation)).parts()
        for part, values in zip(own, quantised, strict=True):
            if part is None or values is None:
                continue
            if weights is None:
                part[place].zero_()
            else:
                part[place] = values[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        keep_dtype(self.parts().down_proj, fn)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def keep_dtype(values: Tensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Refuse a change of a module's parameters that casts these 8-bit values: a cast knows no scales."""
    if (dtype := fn(values.new_empty(0)).dtype) != values.dtype:
        raise ConfigError(
            f"a module with experts of {values.dtype} was to become {dtype}, and a cast knows no scales; make the "
            "layer with the dtype that you need"
        )


def apply_scaled(
    x: Tensor | Scaled,
    own: ScaledWeights,
    groups: Groups,
    activation: Activation = SWIGLU,
    weights: Tensor | None = None,
) -> Tensor:
    """Apply experts with these weights to the rows of their groups, as `QuantisedExperts` does."""
    values, scales = x if isinstance(x, tuple) else quantise_rows(_without_gradient(x))
    up = ScaledOperands(values, scales, own.gate_up_proj, own.gate_up_proj_scale_inv)
    h = gate_scaled(up, groups, Added(own.gate_up_proj_bias, weights), activation.form, quantise=True)
    bias, down = own.down_proj_bias, ScaledOperands(*h, own.down_proj, own.down_proj_scale_inv)
    y = multiply_scaled(down, groups, Added(bias if weights is None else None))
    if bias is not None and weights is not None:
        y = add_expert_bias(y, bias, groups, weights)
    return y if isinstance(x, tuple) else y.to(x.dtype)


def _without_gradient(x: Tensor) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        raise ConfigError("experts of 8-bit floats have no gradient, and x needs one; call them under torch.no_grad")
    return x


def quantise_experts(experts: Experts, *, power_of_two: bool = False) -> QuantisedExperts:
    """Return the same experts with weights of 8-bit floats: a scale for each 128 rows and 128 columns.

    `power_of_two`: scales are powers of two, as checkpoints with `ue8m0` have them. The kernels want gate and up of
    multiples of 128 rows each, so F is padded to one, by zeros that change no result.

    >>> from raymoe.moe.experts import ModelWeights
    >>> made = quantise_experts(Experts(ModelWeights(torch.ones(2, 96, 16), torch.ones(2, 16, 48))))
    >>> list(made.gate_up_proj.shape), list(made.down_proj.shape), list(made.down_proj_scale_inv.shape)
    ([2, 256, 16], [2, 16, 128], [2, 1, 1])
    """
    gate_up, down = _outputs_first(experts, "gate_up_proj"), _outputs_first(experts, "down_proj")
    interleaved, bias = experts.activation.interleaved, _detached(experts.gate_up_proj_bias)
    padding = -down.shape[2] % FP8_BLOCK
    if padding:
        gate_up = _padded_pairs(gate_up, padding, interleaved)
        bias = None if bias is None else _padded_pairs(bias[..., None], padding, interleaved)[..., 0]
        down = nn.functional.pad(down, (0, padding))
    weights = ScaledWeights(
        *quantise_weight(gate_up, power_of_two),
        *quantise_weight(down, power_of_two),
        gate_up_proj_bias=bias,
        down_proj_bias=_detached(experts.down_proj_bias),
    )
    return QuantisedExperts(weights, experts.activation)


def _outputs_first(experts: Experts, name: str) -> Tensor:
    weight = _detached(getattr(experts, name))
    assert weight is not None
    return weight.transpose(1, 2) if experts.transposed else weight


def _detached(parameter: Tensor | None) -> Tensor | None:
    part = local(parameter)
    return None if part is None else part.detach()


def _padded_pairs(gate_up: Tensor, padding: int, interleaved: bool) -> Tensor:
    """Add rows of zeros to gate and to up: gate_up is [L, 2F, K]."""
    if interleaved:
        return nn.functional.pad(gate_up, (0, 0, 0, 2 * padding))
    experts, rows, columns = gate_up.shape
    return nn.functional.pad(gate_up.reshape(experts, 2, rows // 2, columns), (0, 0, 0, padding)).flatten(1, 2)
