"""The products of experts of 8-bit floats as operators of torch, with fakes, and without gradients.

On Hopper product_fp8.cu computes them. CPU ranks compute the formula: values times scales in float32, one expert after
the other. Other GPUs have no such products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import raymoe.moe.product_fp8_launch as product_fp8_launch
import raymoe.moe.product_launch as product_launch
from raymoe.errors import ConfigError
from raymoe.exchange.peer.column_pieces import pieces_to_tell
from raymoe.fp8 import FP8_BLOCK, dequantise, dequantise_weight
from raymoe.moe.expert_kernels import ActivationForm
from raymoe.moe.expert_rows import Groups, bias_of_rows, gated_activation, zero_gaps
from raymoe.moe.product_fp8 import TILES, ScaledProduct, fits
from raymoe.moe.product_operators import PLAIN, Added
from raymoe.moe.products import Gate, Product
from raymoe.moe.products import fits as fits_outputs
from raymoe.rows.direct import directly, needs_gradient
from raymoe.rows.operator_definitions import define
from raymoe.rows.pipe_tensors import as_dense
from raymoe.rows.row_results import new_quantised, quantised

Y_DTYPE = torch.bfloat16
Scaled = tuple[Tensor, Tensor]
"""Values and their scales."""


@dataclass(frozen=True)
class ScaledOperands:
    """8-bit rows and weights with their scales."""

    x: Tensor
    """float8_e4m3fn[C, K]."""
    x_scales: Tensor
    """float32[C, ceil(K / 128)], of any strides."""
    weight: Tensor
    """float8_e4m3fn[L, N, K]."""
    weight_scales: Tensor
    """float32[L, ceil(N / 128), ceil(K / 128)]."""

    @classmethod
    def of(cls, name: str, x: Tensor | Scaled, weight: Tensor | Scaled) -> ScaledOperands:
        """Check pairs of values and scales, which function `name` has been given."""
        pairs = [operand for operand in (x, weight) if isinstance(operand, tuple) and len(operand) == 2]
        if len(pairs) < 2:
            raise ConfigError(
                f"{name}: 8-bit rows and 8-bit weights go together, each as a pair (values, scales); x is "
                f"{_shown(x)} and the weights are {_shown(weight)}"
            )
        operands = cls(*pairs[0], *pairs[1])
        for what, values, scales, size in (
            ("x", operands.x, operands.x_scales, tuple(operands.x.shape[:-1])),
            (
                "weight",
                operands.weight,
                operands.weight_scales,
                (*operands.weight.shape[:-2], _blocks(operands.weight, -2)),
            ),
        ):
            if values.dtype != torch.float8_e4m3fn:
                raise ConfigError(f"{name}: the values of {what} are {values.dtype}; torch.float8_e4m3fn is needed")
            size = (*size, _blocks(values, -1))
            if scales.dtype != torch.float32 or tuple(scales.shape) != size or scales.device != values.device:
                raise ConfigError(
                    f"{name}: the scales of {what} are {scales.dtype} {list(scales.shape)} on {scales.device}; "
                    f"torch.float32 {list(size)} on {values.device} is needed"
                )
        return operands

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.x_scales, self.weight, self.weight_scales


def _blocks(values: Tensor, dimension: int) -> int:
    return -(-values.shape[dimension] // FP8_BLOCK) if values.dim() >= -dimension else 0


def _shown(operand: Tensor | Scaled) -> str:
    return f"a tuple of {len(operand)}" if isinstance(operand, tuple) else f"a tensor of {operand.dtype}"


def multiply_scaled(operands: ScaledOperands, groups: Groups, added: Added) -> Tensor:
    """Multiply each expert's rows by its weights: bfloat16[C, N]. See `grouped_linear`."""
    arguments = _tensors("grouped_linear", operands, groups, added)
    y: Tensor = _multiply(*arguments) if _direct(arguments) else _ops.grouped_linear_fp8(*arguments)
    return y


def gate_scaled(
    operands: ScaledOperands, groups: Groups, added: Added, form: ActivationForm = PLAIN, quantise: bool = False
) -> tuple[Tensor, Tensor]:
    """Multiply each expert's rows by its weights, [L, 2F, K], and return the gated activation.

    It is bfloat16[C, F] and an empty tensor; with `quantise` float8_e4m3fn[C, F], and scales float32[C, ceil(F / 128)]
    whose columns are contiguous.
    """
    numbers = form.interleaved, form.alpha, form.limit, form.up_plus, quantise
    arguments = *_tensors("grouped_swiglu", operands, groups, added), *numbers
    results: tuple[Tensor, Tensor]
    results = _gate(*arguments) if _direct(arguments) else _ops.grouped_gated_fp8(*arguments)
    return results


def _tensors(name: str, operands: ScaledOperands, groups: Groups, added: Added) -> tuple[Tensor | None, ...]:
    tensors = *operands.tensors, groups.offsets, groups.counts, added.bias, added.row_weights
    if needs_gradient(*(tensor for tensor in tensors if tensor is not None)):
        raise ConfigError(
            f"{name} of 8-bit rows and weights has no gradient, and a tensor needs one; call it under torch.no_grad, "
            "or train with bfloat16 experts"
        )
    if added.main_grad is not None:
        raise ConfigError(
            f"{name} of 8-bit rows and weights has no gradient to add to main_grad; train with bfloat16 experts"
        )
    return tensors


def _direct(arguments: tuple[Any, ...]) -> bool:
    return directly(*(each for each in arguments[:8] if each is not None))


# The operators.

_OPERANDS = "Tensor x, Tensor x_scales, Tensor weight, Tensor weight_scales"
_OTHERS = "Tensor offsets, Tensor counts, Tensor? bias, Tensor? row_weights"
_GATE = "bool interleaved, float alpha, float limit, float up_plus"
_SCHEMAS = {
    "grouped_linear_fp8": f"({_OPERANDS}, {_OTHERS}) -> Tensor",
    "grouped_gated_fp8": f"({_OPERANDS}, {_OTHERS}, {_GATE}, bool quantise) -> (Tensor y, Tensor scales)",
}
define(_SCHEMAS)
_ops: Any = torch.ops.raymoe
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class _Call:
    """An operator's tensors."""

    operands: ScaledOperands
    groups: Groups
    bias: Tensor | None
    row_weights: Tensor | None

    @classmethod
    def of(cls, tensors: tuple[Any, ...]) -> _Call:
        return cls(ScaledOperands(*tensors[:4]), Groups(*tensors[4:6]), *tensors[6:])

    @property
    def by_kernel(self) -> bool:
        """Whether the kernel computes it. Raises where neither the kernel nor a CPU does."""
        x = self.operands.x
        if product_launch.has_kernel(x):
            return True
        if x.device.type != "cpu":
            raise ConfigError(
                "8-bit rows and weights need a GPU of compute capability 9.0, or a CPU; take bfloat16 experts"
            )
        return False

    def launch(self, gate: Gate | None, quantise: bool) -> tuple[Tensor, Tensor]:
        """Allocate the results and launch the kernel."""
        given, rows = self.operands, len(self.operands.x)
        _, products, columns = given.weight.shape
        outputs = products if gate is None else products // 2
        _check_sizes(products, columns, gate)
        x, places = as_dense(given.x), (self.groups.offsets, self.groups.counts)
        y, y_scales = x.new_empty(rows, outputs, dtype=Y_DTYPE), x.new_empty(0, dtype=torch.float32)
        if quantise:
            y, y_scales = new_quantised(torch.Size((rows, outputs)), x.device, column=True)
        offsets, counts = (numbers.to(torch.int32).contiguous() for numbers in places)
        bias, row_weights = self.bias, self.row_weights
        product = Product(
            x,
            as_dense(given.weight),
            offsets,
            counts,
            y,
            gate,
            bias=None if bias is None else as_dense(bias.to(Y_DTYPE)),
            row_weights=None if row_weights is None else as_dense(row_weights),
            tiles=TILES,
        )
        scales = given.x_scales, given.weight_scales.contiguous(), y_scales if quantise else None
        product.pieces = None if gate is not None else pieces_to_tell(y, (*product.reads, *scales))
        product_fp8_launch.launch(ScaledProduct(product, *scales))
        return y, y_scales

    def products(self) -> Tensor:
        """Compute the products on a CPU: float32[C, N]. Rows of no expert become zero."""
        given = self.operands
        y = torch.zeros(len(given.x), given.weight.shape[1])
        for expert, (start, count) in enumerate(
            zip(self.groups.offsets.tolist(), self.groups.counts.tolist(), strict=False)
        ):
            if count:
                part = slice(start, start + count)
                weight = dequantise_weight(given.weight[expert], given.weight_scales[expert])
                with torch.autocast("cpu", enabled=False):
                    y[part] = dequantise(given.x[part], given.x_scales[part]) @ weight.T
        return y


def _check_sizes(products: int, columns: int, gate: Gate | None) -> None:
    outputs = products if gate is None else products // 2
    interleaved = gate is not None and gate.interleaved
    if not fits(products, columns, gate is not None, interleaved) or not fits_outputs(outputs, columns):
        raise ConfigError(
            f"8-bit weights of {products} rows and {columns} columns; the kernel takes columns and outputs in "
            f"multiples of 16, and gate and up of multiples of {FP8_BLOCK} rows: pad them, as quantise_experts does"
        )


def _multiply(*arguments: Any) -> Tensor:
    call = _Call.of(arguments)
    if call.by_kernel:
        return call.launch(None, quantise=False)[0]
    y = call.products()
    if call.bias is not None:
        y += bias_of_rows(y, call.bias.float(), call.groups.offsets, call.groups.counts)[0]
    if call.row_weights is not None:
        y = zero_gaps(y * call.row_weights[:, None], call.groups)
    return y.to(Y_DTYPE)


def _gate(*arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors_and_form, quantise = arguments
    call, form = _Call.of(tuple(tensors_and_form[:8])), ActivationForm(*tensors_and_form[8:])
    if call.by_kernel:
        gate = Gate(form.interleaved, form.alpha, form.limit, form.up_plus)
        return call.launch(gate, quantise)
    bias = None if call.bias is None else call.bias.float()
    h = gated_activation(form, call.products(), bias, call.groups, call.row_weights)
    return quantised(h, column=True) if quantise else (h.to(Y_DTYPE), h.new_empty(0))


def _fake_multiply(x: Tensor, _x_scales: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1], dtype=Y_DTYPE)


def _fake_gate(x: Tensor, _x_scales: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    rows, outputs = x.shape[0], weight.shape[1] // 2
    if others[-1]:
        return new_quantised(torch.Size((rows, outputs)), x.device, column=True)
    return x.new_empty(rows, outputs, dtype=Y_DTYPE), x.new_empty(0, dtype=torch.float32)


torch.library.impl("raymoe::grouped_linear_fp8", _DEVICES, _multiply)
torch.library.impl("raymoe::grouped_gated_fp8", _DEVICES, _gate)
torch.library.register_fake("raymoe::grouped_linear_fp8", _fake_multiply)
torch.library.register_fake("raymoe::grouped_gated_fp8", _fake_gate)
