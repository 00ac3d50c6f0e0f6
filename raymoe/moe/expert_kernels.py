"""The kernels over rows of experts: biases, gated activations, and the gradients of both.

Each kernel has a class with its tensors, such as `GatedActivation`. `launch` enqueues it on the current stream.
`kernel_call` only checks the tensors and computes the kernel, its shape and its parameters. The host never reads how
many rows there are: the last offset says so on the device, and no kernel reads or writes rows from there on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import F32, ROW_TYPES, U32, U64, Address, Params
from raymoe.errors import ConfigError
from raymoe.rows.pipe_tensors import ALIGNMENT, EIGHT, row_type
from raymoe.rows.row_launch import KernelCall, device_of

if TYPE_CHECKING:
    import torch

WARPS, BLOCKS_OF_SM = 8, 4
COLUMNS = 256
"""Columns that a block of expert_sums.cu sums at a time."""
MOST_SLICES, SLICES = 64, 512
"""Slices of an expert's rows, and of the rows of all experts together. With 256 columns a block they fill a GPU."""


@dataclass(frozen=True)
class Places:
    """`Groups` as kernels take them: int32 on the device, `counts[e]` rows of expert e from `offsets[e]` on. Without
    counts there are no gaps to leave out."""

    offsets: torch.Tensor  # [L + 1]
    counts: torch.Tensor | None = None  # [L]


@dataclass(frozen=True)
class ExpertLayout(Params):
    """Twin of the struct in kernels/include/raymoe/moe/expert_rows.cuh."""

    expert_offsets: Address
    expert_counts: Address
    capacity: U64
    experts: U32
    unused: U32 = 0

    @classmethod
    def of(cls, places: Places, capacity: int) -> ExpertLayout:
        """Check the tensors of `places`, for memory of `capacity` rows."""
        experts = len(places.offsets) - 1
        for name, tensor, size in (("expert_offsets", places.offsets, experts + 1), ("counts", places.counts, experts)):
            if tensor is None:
                continue
            if str(tensor.dtype) != "torch.int32" or tuple(tensor.shape) != (size,) or not tensor.is_contiguous():
                raise ConfigError(
                    f"{name} are {tensor.dtype} {tuple(tensor.shape)}; int32 ({size},) is needed, contiguous"
                )
        counts = 0 if places.counts is None else places.counts.data_ptr()
        return cls(places.offsets.data_ptr(), counts, capacity, experts)


class ExpertKernel(ABC):
    """A kernel over rows of experts, with its tensors."""

    places: Places

    @abstractmethod
    def kernel_call(self) -> KernelCall:
        """Check the tensors; return the kernel, its shape and its parameters."""

    def launch(self) -> None:
        """Launch the kernel on the current stream."""
        device_of(self.places.offsets.get_device()).run(self.kernel_call(), None)


# Gated activations.


@dataclass(frozen=True)
class ActivationForm:
    """The numbers of a gated activation. An infinite limit is none."""

    interleaved: bool = False
    alpha: float = 1.0
    limit: float = inf
    up_plus: float = 0.0


@dataclass(frozen=True)
class GatedForm(Params):
    """Twin of the struct in kernels/include/raymoe/moe/gated.cuh."""

    alpha: F32
    limit: F32
    up_plus: F32
    width: U32

    @classmethod
    def of(cls, form: ActivationForm, ffn: int) -> GatedForm:
        return cls(form.alpha, form.limit, form.up_plus, _width(ffn))


@dataclass(frozen=True)
class GatedActivationParams(Params):
    """The parameters of kernels/moe/gated_activation.cu."""

    gate_up: Address
    bias: Address
    weights: Address
    out: Address
    rows: ExpertLayout
    form: GatedForm


@dataclass(frozen=True)
class GatedActivation(ExpertKernel):
    """out[C, F] from gate_up[C, 2F], both bfloat16. `bias`[L, 2F] is added before; `weights` are float32[C]."""

    form: ActivationForm
    gate_up: torch.Tensor
    bias: torch.Tensor | None
    weights: torch.Tensor | None
    out: torch.Tensor
    places: Places

    def kernel_call(self) -> KernelCall:
        capacity, ffn = self.out.shape
        rows = ExpertLayout.of(self.places, capacity)
        params = GatedActivationParams(
            gate_up=_address(self.gate_up, "gate_up", (capacity, 2 * ffn)),
            bias=_address(self.bias, "bias", (rows.experts, 2 * ffn)),
            weights=_numbers(self.weights, "weights", capacity),
            out=_address(self.out, "out", (capacity, ffn)),
            rows=rows,
            form=GatedForm.of(self.form, ffn),
        )
        structs = GatedActivationParams, ExpertLayout, GatedForm
        return _by_rows(KernelSource("moe/gated_activation", structs, _gated_defines(self)), params, capacity)


@dataclass(frozen=True)
class GatedActivationBackwardParams(Params):
    """The parameters of kernels/moe/gated_activation_backward.cu."""

    dh: Address
    gate_up: Address
    bias: Address
    weights: Address
    d_gate_up: Address
    d_weights: Address
    rows: ExpertLayout
    form: GatedForm


@dataclass(frozen=True)
class GatedActivationBackward(ExpertKernel):
    """The gradients of gate_up and, with weights, of these, from dh[C, F]."""

    form: ActivationForm
    dh: torch.Tensor
    gate_up: torch.Tensor
    bias: torch.Tensor | None
    weights: torch.Tensor | None
    d_gate_up: torch.Tensor
    d_weights: torch.Tensor | None
    places: Places

    def kernel_call(self) -> KernelCall:
        capacity, ffn = self.dh.shape
        rows = ExpertLayout.of(self.places, capacity)
        if (self.weights is None) != (self.d_weights is None):
            raise ConfigError("the gradient of weighted rows needs both the weights and memory for their gradients")
        params = GatedActivationBackwardParams(
            dh=_address(self.dh, "dh", (capacity, ffn)),
            gate_up=_address(self.gate_up, "gate_up", (capacity, 2 * ffn)),
            bias=_address(self.bias, "bias", (rows.experts, 2 * ffn)),
            weights=_numbers(self.weights, "weights", capacity),
            d_gate_up=_address(self.d_gate_up, "d_gate_up", (capacity, 2 * ffn)),
            d_weights=_numbers(self.d_weights, "d_weights", capacity),
            rows=rows,
            form=GatedForm.of(self.form, ffn),
        )
        structs = GatedActivationBackwardParams, ExpertLayout, GatedForm
        return _by_rows(KernelSource("moe/gated_activation_backward", structs, _gated_defines(self)), params, capacity)


def _gated_defines(kernel: GatedActivation | GatedActivationBackward) -> tuple[tuple[str, str], ...]:
    interleaved = (("INTERLEAVED_COLUMNS", "1"),) if kernel.form.interleaved else ()
    return interleaved + _switches(BIASED_ROWS=kernel.bias, WEIGHTED_ROWS=kernel.weights)


# Biases, and sums over the rows of an expert.


@dataclass(frozen=True)
class AddExpertBiasParams(Params):
    """The parameters of kernels/moe/add_expert_bias.cu."""

    source: Address
    bias: Address
    weights: Address
    out: Address
    rows: ExpertLayout
    width: U32
    unused: U32 = 0


@dataclass(frozen=True)
class AddExpertBias(ExpertKernel):
    """out = rows[C, N] plus the `bias`[L, N] of each row's expert, times the row's weight if there are weights."""

    rows: torch.Tensor
    bias: torch.Tensor
    weights: torch.Tensor | None
    out: torch.Tensor
    places: Places

    def kernel_call(self) -> KernelCall:
        capacity, columns = self.rows.shape
        rows = ExpertLayout.of(self.places, capacity)
        params = AddExpertBiasParams(
            source=_address(self.rows, "rows", (capacity, columns)),
            bias=_address(self.bias, "bias", (rows.experts, columns)),
            weights=_numbers(self.weights, "weights", capacity),
            out=_address(self.out, "out", (capacity, columns)),
            rows=rows,
            width=_width(columns),
        )
        structs, defines = (AddExpertBiasParams, ExpertLayout), _switches(WEIGHTED_ROWS=self.weights)
        return _by_rows(KernelSource("moe/add_expert_bias", structs, defines), params, capacity)


@dataclass(frozen=True)
class ExpertSumsParams(Params):
    """The parameters of kernels/moe/expert_sums.cu."""

    source: Address
    weights: Address
    sums: Address
    rows: ExpertLayout
    width: U32
    slices: U32
    parts: U32
    unused: U32 = 0


@dataclass(frozen=True)
class ExpertSums(ExpertKernel):
    """float32 `sums`[L, S, N] over slices of each expert's rows[C, N], times weights if there are some.

    `new_sums` allocates them. Their sum over the slices is that of the expert.
    """

    rows: torch.Tensor
    weights: torch.Tensor | None
    sums: torch.Tensor
    places: Places

    def kernel_call(self) -> KernelCall:
        capacity, columns = self.rows.shape
        rows = ExpertLayout.of(self.places, capacity)
        slices, parts = self.sums.shape[1], -(-columns // COLUMNS)
        if tuple(self.sums.shape) != (rows.experts, slices, columns) or not self.sums.is_contiguous():
            raise ConfigError(
                f"sums of {rows.experts} experts have the shape {tuple(self.sums.shape)}; ({rows.experts}, slices, "
                f"{columns}) is needed, contiguous"
            )
        params = ExpertSumsParams(
            source=_address(self.rows, "rows", (capacity, columns)),
            weights=_numbers(self.weights, "weights", capacity),
            sums=self.sums.data_ptr(),
            rows=rows,
            width=_width(columns),
            slices=slices,
            parts=parts,
        )
        structs, defines = (ExpertSumsParams, ExpertLayout), _switches(WEIGHTED_ROWS=self.weights)
        source = KernelSource("moe/expert_sums", structs, defines)
        tiles = rows.experts * slices * parts
        return KernelCall(source, 32 * WARPS, 4 * WARPS * COLUMNS, params, tiles, 1, BLOCKS_OF_SM)


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


# Gradients of weighted rows.


@dataclass(frozen=True)
class WeighGradientsParams(Params):
    """The parameters of kernels/moe/weigh_gradients.cu."""

    dy: Address
    other: Address
    weights: Address
    d_weights: Address
    rows: ExpertLayout
    width: U32
    unused: U32 = 0


@dataclass(frozen=True)
class WeighGradients(ExpertKernel):
    """d_weights = sum over each row of dy[C, N] * other, and dy * weights in the place of dy.

    The first needs `other` and `d_weights`, the second `weights`. `other` is [C, N], or the bias [L, N] of each expert,
    with places that have counts.
    """

    dy: torch.Tensor
    other: torch.Tensor | None
    weights: torch.Tensor | None
    d_weights: torch.Tensor | None
    places: Places

    def kernel_call(self) -> KernelCall:
        capacity, columns = self.dy.shape
        if (self.other is None) != (self.d_weights is None):
            raise ConfigError("gradients of weights need both the rows that were weighed and memory for the gradients")
        rows, by_expert = ExpertLayout.of(self.places, capacity), self.places.counts is not None
        nbytes = columns * self.dy.element_size()
        if nbytes % ALIGNMENT:
            raise ConfigError(f"rows of {nbytes} bytes; multiples of {ALIGNMENT} are needed")
        params = WeighGradientsParams(
            dy=_address(self.dy, "dy", (capacity, columns), self.dy),
            other=_address(self.other, "other", (rows.experts if by_expert else capacity, columns), self.dy),
            weights=_numbers(self.weights, "weights", capacity),
            d_weights=_numbers(self.d_weights, "d_weights", capacity),
            rows=rows,
            width=nbytes // ALIGNMENT,
        )
        switches = _switches(WEIGHTED_ROWS=self.weights, DOTTED_ROWS=self.other, OTHER_BY_EXPERT=self.places.counts)
        defines = (("ROW_TYPE", row_type(self.dy)), *switches)
        source = KernelSource("moe/weigh_gradients", (WeighGradientsParams, ExpertLayout), defines)
        return _by_rows(source, params, capacity)


# Tensors that the kernels take.


def takes(rows: torch.Tensor) -> bool:
    """Whether the kernels of experts take such rows, if their memory begins at a multiple of 16 bytes."""
    return str(rows.dtype) == "torch.bfloat16" and rows.shape[-1] % EIGHT == 0


def weighs(rows: torch.Tensor) -> bool:
    """Whether weigh_gradients.cu takes such rows. It takes other dtypes too."""
    known = str(rows.dtype).removeprefix("torch.") in ROW_TYPES
    return known and rows.shape[-1] * rows.element_size() % ALIGNMENT == 0


def _by_rows(source: KernelSource, params: Params, capacity: int) -> KernelCall:
    """A launch in which a warp takes a row."""
    return KernelCall(source, 32 * WARPS, 0, params, capacity, WARPS, BLOCKS_OF_SM)


def _width(columns: int) -> int:
    """Count the 16-byte places of a row."""
    if columns % EIGHT:
        raise ConfigError(f"rows of {columns} elements; the kernels of experts take multiples of {EIGHT}")
    return columns // EIGHT


def _switches(**tensors: torch.Tensor | None) -> tuple[tuple[str, str], ...]:
    """Set the macros whose tensors are given."""
    return tuple((name, "1") for name, tensor in tensors.items() if tensor is not None)


def _address(tensor: torch.Tensor | None, name: str, shape: Sequence[int], like: torch.Tensor | None = None) -> int:
    """Check rows of bfloat16, or of the dtype of `like`, and return their address; 0 without them."""
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
    """Check a float32 number for each row, and return their address; 0 without them."""
    if tensor is None:
        return 0
    if str(tensor.dtype) != "torch.float32" or tuple(tensor.shape) != (rows,) or not tensor.is_contiguous():
        raise ConfigError(f"{name} are {tensor.dtype} {tuple(tensor.shape)}; float32 ({rows},) is needed, contiguous")
    return tensor.data_ptr()
