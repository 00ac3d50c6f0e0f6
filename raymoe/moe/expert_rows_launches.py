"""Launch the kernels over rows of experts: biases, gated activations, and the gradients of both.

A call such as `gated_activation(GatedActivation(...))` launches on the current stream. `gated_activation_call` only
computes the kernel, its shape and its parameters. The host never reads how many rows there are: the last offset says so
on the device, and no kernel reads or writes rows from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import F32, U32, U64, Address, Params
from raymoe.errors import ConfigError
from raymoe.rows.pipe_launch import KernelCall, device_of
from raymoe.rows.pipe_tensors import ALIGNMENT, row_type

if TYPE_CHECKING:
    import torch

WARPS, BLOCKS_OF_SM = 8, 4
EIGHT = 8
"""Elements of bfloat16 in the 16 bytes that a lane moves at a time."""
COLUMNS = 256
"""Columns that a block of expert_sums.cu sums at a time."""
MOST_SLICES, SLICES = 64, 512
"""Of an expert's rows, and of those of all experts together: with 256 columns for a block they fill a GPU."""


@dataclass(frozen=True)
class ExpertRows(Params):
    """Twin of the struct in kernels/include/raymoe/moe/expert_rows.cuh."""

    expert_offsets: Address
    expert_counts: Address
    capacity: U64
    experts: U32
    unused: U32 = 0


@dataclass(frozen=True)
class GatedForm(Params):
    """Twin of the struct in kernels/include/raymoe/moe/gated.cuh."""

    alpha: F32
    limit: F32
    up_plus: F32
    width: U32


@dataclass(frozen=True)
class GatedActivationParams(Params):
    gate_up: Address
    bias: Address
    weights: Address
    out: Address
    rows: ExpertRows
    form: GatedForm


@dataclass(frozen=True)
class GatedActivationBackwardParams(Params):
    dh: Address
    gate_up: Address
    bias: Address
    weights: Address
    d_gate_up: Address
    d_weights: Address
    rows: ExpertRows
    form: GatedForm


@dataclass(frozen=True)
class AddExpertBiasParams(Params):
    source: Address
    bias: Address
    weights: Address
    out: Address
    rows: ExpertRows
    width: U32
    unused: U32 = 0


@dataclass(frozen=True)
class ExpertSumsParams(Params):
    source: Address
    weights: Address
    sums: Address
    rows: ExpertRows
    width: U32
    slices: U32
    parts: U32
    unused: U32 = 0


@dataclass(frozen=True)
class WeighGradientsParams(Params):
    dy: Address
    other: Address
    weights: Address
    d_weights: Address
    rows: ExpertRows
    width: U32
    unused: U32 = 0


@dataclass(frozen=True)
class Places:
    """Where each expert's rows are: int32 on the device, `counts[e]` rows from `offsets[e]` on. Without counts there
    are no gaps to leave out."""

    offsets: torch.Tensor  # [L + 1]
    counts: torch.Tensor | None = None  # [L]


@dataclass(frozen=True)
class Gate:
    """Numbers of a gated activation. An infinite limit is none."""

    interleaved: bool = False
    alpha: float = 1.0
    limit: float = inf
    up_plus: float = 0.0


@dataclass(frozen=True)
class GatedActivation:
    """out[C, F] from gate_up[C, 2F], both bfloat16. `bias`[L, 2F] is added before; `weights` are float32[C]."""

    gate: Gate
    gate_up: torch.Tensor
    bias: torch.Tensor | None
    weights: torch.Tensor | None
    out: torch.Tensor
    places: Places


@dataclass(frozen=True)
class GatedActivationBackward:
    """The gradients of gate_up and, with weights, of these, from dh[C, F]."""

    gate: Gate
    dh: torch.Tensor
    gate_up: torch.Tensor
    bias: torch.Tensor | None
    weights: torch.Tensor | None
    d_gate_up: torch.Tensor
    d_weights: torch.Tensor | None
    places: Places


@dataclass(frozen=True)
class AddExpertBias:
    """out = rows[C, N] plus the `bias`[L, N] of each row's expert, times the row's weight if there are weights."""

    rows: torch.Tensor
    bias: torch.Tensor
    weights: torch.Tensor | None
    out: torch.Tensor
    places: Places


@dataclass(frozen=True)
class ExpertSums:
    """float32 `sums`[L, S, N] over slices of each expert's rows[C, N], times weights if there are some.

    `new_sums` allocates them. Their sum over the slices is that of the expert.
    """

    rows: torch.Tensor
    weights: torch.Tensor | None
    sums: torch.Tensor
    places: Places


@dataclass(frozen=True)
class WeighGradients:
    """From dy[C, N]: d_weights = sum over each row of dy * other, and dy * weights in the place of dy.

    The first needs `other` and `d_weights`, the second `weights`. `other` is [C, N], or the bias [L, N] of each expert,
    with places that have counts.
    """

    dy: torch.Tensor
    other: torch.Tensor | None
    weights: torch.Tensor | None
    d_weights: torch.Tensor | None
    places: Places


def gated_activation(call: GatedActivation) -> None:
    """Launch kernels/moe/gated_activation.cu on the current stream."""
    device_of(call.gate_up.get_device()).run(gated_activation_call(call), None)


def gated_activation_backward(call: GatedActivationBackward) -> None:
    """Launch kernels/moe/gated_activation_backward.cu on the current stream."""
    device_of(call.dh.get_device()).run(gated_activation_backward_call(call), None)


def add_expert_bias(call: AddExpertBias) -> None:
    """Launch kernels/moe/add_expert_bias.cu on the current stream."""
    device_of(call.rows.get_device()).run(add_expert_bias_call(call), None)


def expert_sums(call: ExpertSums) -> None:
    """Launch kernels/moe/expert_sums.cu on the current stream."""
    device_of(call.rows.get_device()).run(expert_sums_call(call), None)


def weigh_gradients(call: WeighGradients) -> None:
    """Launch kernels/moe/weigh_gradients.cu on the current stream."""
    device_of(call.dy.get_device()).run(weigh_gradients_call(call), None)


def takes(rows: torch.Tensor) -> bool:
    """Whether the kernels of experts take such rows, if their memory begins at a multiple of 16 bytes."""
    return str(rows.dtype) == "torch.bfloat16" and rows.shape[-1] % EIGHT == 0


def weighs(rows: torch.Tensor) -> bool:
    """Whether weigh_gradients.cu takes such rows: it takes other dtypes too."""
    return row_type_or_none(rows) is not None and rows.shape[-1] * rows.element_size() % ALIGNMENT == 0


def row_type_or_none(rows: torch.Tensor) -> str | None:
    return row_type(rows) if str(rows.dtype) in ("torch.bfloat16", "torch.float16", "torch.float32") else None


def new_sums(rows: torch.Tensor, experts: int) -> torch.Tensor:
    """Allocate `sums` of `ExpertSums`. Their number depends on that of experts alone, and so do the results.

    >>> import torch
    >>> rows = torch.empty(9, 16, dtype=torch.bfloat16)
    >>> new_sums(rows, 4).shape[1], new_sums(rows, 16).shape[1], new_sums(rows, 600).shape[1]
    (64, 32, 1)
    """
    import torch

    slices = min(MOST_SLICES, -(-SLICES // max(experts, 1)))
    return torch.empty(experts, slices, rows.shape[1], dtype=torch.float32, device=rows.device)


def gated_activation_call(call: GatedActivation) -> KernelCall:
    """The kernel, shape and parameters of `gated_activation`."""
    capacity, ffn = call.out.shape
    rows = _rows_of(call.places, capacity)
    params = GatedActivationParams(
        gate_up=_address(call.gate_up, "gate_up", (capacity, 2 * ffn)),
        bias=_address(call.bias, "bias", (rows.experts, 2 * ffn)),
        weights=_numbers(call.weights, "weights", capacity),
        out=_address(call.out, "out", (capacity, ffn)),
        rows=rows,
        form=_form(call.gate, ffn),
    )
    source = KernelSource("moe/gated_activation", (GatedActivationParams, ExpertRows, GatedForm), _defines_of(call))
    return _by_rows(source, params, capacity)


def gated_activation_backward_call(call: GatedActivationBackward) -> KernelCall:
    """The kernel, shape and parameters of `gated_activation_backward`."""
    capacity, ffn = call.dh.shape
    rows = _rows_of(call.places, capacity)
    if (call.weights is None) != (call.d_weights is None):
        raise ConfigError("the gradient of weighted rows needs both the weights and memory for their gradients")
    params = GatedActivationBackwardParams(
        dh=_address(call.dh, "dh", (capacity, ffn)),
        gate_up=_address(call.gate_up, "gate_up", (capacity, 2 * ffn)),
        bias=_address(call.bias, "bias", (rows.experts, 2 * ffn)),
        weights=_numbers(call.weights, "weights", capacity),
        d_gate_up=_address(call.d_gate_up, "d_gate_up", (capacity, 2 * ffn)),
        d_weights=_numbers(call.d_weights, "d_weights", capacity),
        rows=rows,
        form=_form(call.gate, ffn),
    )
    structs = GatedActivationBackwardParams, ExpertRows, GatedForm
    source = KernelSource("moe/gated_activation_backward", structs, _defines_of(call))
    return _by_rows(source, params, capacity)


def add_expert_bias_call(call: AddExpertBias) -> KernelCall:
    """The kernel, shape and parameters of `add_expert_bias`."""
    capacity, columns = call.rows.shape
    rows = _rows_of(call.places, capacity)
    params = AddExpertBiasParams(
        source=_address(call.rows, "rows", (capacity, columns)),
        bias=_address(call.bias, "bias", (rows.experts, columns)),
        weights=_numbers(call.weights, "weights", capacity),
        out=_address(call.out, "out", (capacity, columns)),
        rows=rows,
        width=_width(columns),
    )
    source = KernelSource(
        "moe/add_expert_bias", (AddExpertBiasParams, ExpertRows), _defined(WEIGHTED_ROWS=call.weights)
    )
    return _by_rows(source, params, capacity)


def expert_sums_call(call: ExpertSums) -> KernelCall:
    """The kernel, shape and parameters of `expert_sums`."""
    capacity, columns = call.rows.shape
    rows, slices, parts = _rows_of(call.places, capacity), call.sums.shape[1], -(-columns // COLUMNS)
    if tuple(call.sums.shape) != (rows.experts, slices, columns) or not call.sums.is_contiguous():
        raise ConfigError(
            f"sums of {rows.experts} experts have the shape {tuple(call.sums.shape)}; ({rows.experts}, slices, "
            f"{columns}) is needed, contiguous"
        )
    params = ExpertSumsParams(
        source=_address(call.rows, "rows", (capacity, columns)),
        weights=_numbers(call.weights, "weights", capacity),
        sums=call.sums.data_ptr(),
        rows=rows,
        width=_width(columns),
        slices=slices,
        parts=parts,
    )
    source = KernelSource("moe/expert_sums", (ExpertSumsParams, ExpertRows), _defined(WEIGHTED_ROWS=call.weights))
    tiles = rows.experts * slices * parts
    return KernelCall(source, 32 * WARPS, 4 * WARPS * COLUMNS, params, tiles, 1, BLOCKS_OF_SM)


def weigh_gradients_call(call: WeighGradients) -> KernelCall:
    """The kernel, shape and parameters of `weigh_gradients`."""
    capacity, columns = call.dy.shape
    if (call.other is None) != (call.d_weights is None):
        raise ConfigError("gradients of weights need both the rows that were weighed and memory for the gradients")
    rows, by_expert = _rows_of(call.places, capacity), call.places.counts is not None
    nbytes = columns * call.dy.element_size()
    if nbytes % ALIGNMENT:
        raise ConfigError(f"rows of {nbytes} bytes; multiples of {ALIGNMENT} are needed")
    params = WeighGradientsParams(
        dy=_address(call.dy, "dy", (capacity, columns), call.dy),
        other=_address(call.other, "other", (rows.experts if by_expert else capacity, columns), call.dy),
        weights=_numbers(call.weights, "weights", capacity),
        d_weights=_numbers(call.d_weights, "d_weights", capacity),
        rows=rows,
        width=nbytes // ALIGNMENT,
    )
    defines = (("ROW_TYPE", row_type(call.dy)), *_defined(WEIGHTED_ROWS=call.weights, DOTTED_ROWS=call.other))
    defines += _defined(OTHER_BY_EXPERT=call.places.counts)
    return _by_rows(KernelSource("moe/weigh_gradients", (WeighGradientsParams, ExpertRows), defines), params, capacity)


def _by_rows(source: KernelSource, params: Params, capacity: int) -> KernelCall:
    """A launch in which a warp takes a row."""
    return KernelCall(source, 32 * WARPS, 0, params, capacity, WARPS, BLOCKS_OF_SM)


def _rows_of(places: Places, capacity: int) -> ExpertRows:
    experts = len(places.offsets) - 1
    for name, tensor, size in (("expert_offsets", places.offsets, experts + 1), ("counts", places.counts, experts)):
        if tensor is None:
            continue
        if str(tensor.dtype) != "torch.int32" or tuple(tensor.shape) != (size,) or not tensor.is_contiguous():
            raise ConfigError(f"{name} are {tensor.dtype} {tuple(tensor.shape)}; int32 ({size},) is needed, contiguous")
    counts = 0 if places.counts is None else places.counts.data_ptr()
    return ExpertRows(places.offsets.data_ptr(), counts, capacity, experts)


def _form(gate: Gate, ffn: int) -> GatedForm:
    return GatedForm(gate.alpha, gate.limit, gate.up_plus, _width(ffn))


def _width(columns: int) -> int:
    if columns % EIGHT:
        raise ConfigError(f"rows of {columns} elements; the kernels of experts take multiples of {EIGHT}")
    return columns // EIGHT


def _defines_of(call: GatedActivation | GatedActivationBackward) -> tuple[tuple[str, str], ...]:
    interleaved = (("INTERLEAVED_COLUMNS", "1"),) if call.gate.interleaved else ()
    return interleaved + _defined(BIASED_ROWS=call.bias, WEIGHTED_ROWS=call.weights)


def _defined(**there: torch.Tensor | None) -> tuple[tuple[str, str], ...]:
    """The macros whose tensors are there."""
    return tuple((name, "1") for name, tensor in there.items() if tensor is not None)


def _address(tensor: torch.Tensor | None, name: str, shape: Sequence[int], like: torch.Tensor | None = None) -> int:
    """The address of rows of bfloat16, or of the dtype of `like`; 0 without them."""
    if tensor is None:
        return 0
    dtype = "torch.bfloat16" if like is None else str(like.dtype)
    fits = tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0
    if str(tensor.dtype) != dtype or tuple(tensor.shape) != tuple(shape) or not fits:
        raise ConfigError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}; {dtype} {tuple(shape)} is needed, contiguous, from a "
            f"multiple of {ALIGNMENT} bytes on"
        )
    return tensor.data_ptr()


def _numbers(tensor: torch.Tensor | None, name: str, rows: int) -> int:
    """The address of a float32 number for each row; 0 without them."""
    if tensor is None:
        return 0
    if str(tensor.dtype) != "torch.float32" or tuple(tensor.shape) != (rows,) or not tensor.is_contiguous():
        raise ConfigError(f"{name} are {tensor.dtype} {tuple(tensor.shape)}; float32 ({rows},) is needed, contiguous")
    return tensor.data_ptr()
