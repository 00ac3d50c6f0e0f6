"""The operations of workload pointwise: their tensors, the bytes that they move, and their results in float64.

The formulas here are written again, in float64 and by autograd, so that they share no mistake with those of raymoe.moe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from raymoe.config import Job
from raymoe.fp8 import FP8_BLOCK
from raymoe.memory.layout import ITEM_BYTES
from raymoe.moe.weights import generator
from raymoe.workload.exchange.received import dequantised
from raymoe.workload.memory_needed import PIECE_BYTES
from raymoe.workload.oracle import BOUNDS, FLOAT8_BOUND

EPS = 1e-6
EXPRESSION = "silu(a) * b + c"

EXPERTS_CAPACITY = 4
"""The rows of swiglu_experts, as a multiple of those that hold a token."""

Tensors = dict[str, Tensor]


# Sizes and tensors. Names in ROWS have a row for each token, those in VECTORS are one row.

ROWS = {"x": 1, "residual": 1, "dy": 1, "dtotal": 1, "a": 1, "b": 1, "gate_up": 2, "activated": 1}
"""The tensors with rows, and their widths in units of the operation's width."""
VECTORS = ("weight", "bias", "c")


@dataclass(frozen=True)
class RowSizes:
    """`width` is the number of elements of a row of the result: the hidden size, or ffn of SwiGLU."""

    tokens: int
    width: int
    dtype: str

    @classmethod
    def of(cls, job: Job) -> RowSizes:
        shape = job.shape
        return cls(shape.tokens, shape.ffn if job.pointwise.op.startswith("swiglu") else shape.hidden, shape.dtype)

    def elements(self, name: str) -> int:
        return self.tokens * self.width * ROWS[name] if name in ROWS else self.width


# The formulas.


def _rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight,)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return *_rms_norm(x + residual, weight), x + residual


def _norm_of_total(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Give the norm of a sum x, and x, which is a result too."""
    return *_rms_norm(x, weight), x.clone()


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    centred = x - x.mean(-1, keepdim=True)
    return (centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + EPS) * weight + bias,)


def _swiglu(gate_up: Tensor) -> tuple[Tensor, ...]:
    gate, up = gate_up.chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up,)


def _pointwise(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    return (a / (1 + torch.exp(-a)) * b + c,)


@dataclass(frozen=True)
class RowOperation:
    """`formula` takes the inputs. With `outgoing`, the results are the gradients by the inputs instead."""

    formula: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[str, ...]
    written: tuple[str, ...]
    """The tensors that each result is as large as: first those with rows."""
    outgoing: tuple[str, ...] = ()
    quantised: bool = False
    """Whether the first result is a pair: values and scales."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that the operation reads."""
        return self.outgoing + self.inputs

    def nbytes(self, sizes: RowSizes) -> int:
        """Bytes read and written.

        >>> OPERATIONS["rms_norm"].nbytes(RowSizes(tokens=10, width=256, dtype="bfloat16"))
        10752
        >>> OPERATIONS["rms_norm_fp8"].nbytes(RowSizes(tokens=10, width=256, dtype="bfloat16"))
        8272
        """
        item = ITEM_BYTES[sizes.dtype]
        read = sum(sizes.elements(name) for name in self.tensors) * item
        written = sum(sizes.elements(name) for name in self.written) * item
        if self.quantised:
            written -= sizes.tokens * (sizes.width * (item - 1) - 4 * -(-sizes.width // FP8_BLOCK))
        return read + written

    def exact(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Compute the results from tensors of float64."""
        if not self.outgoing:
            return self.formula(*(tensors[name] for name in self.inputs))
        leaves = [tensors[name].requires_grad_() for name in self.inputs]
        return torch.autograd.grad(self.formula(*leaves), leaves, [tensors[name] for name in self.outgoing])

    def bound(self, dtype: torch.dtype) -> float:
        return FLOAT8_BOUND if self.quantised else BOUNDS[dtype]


_SWIGLU = RowOperation(_swiglu, ("gate_up",), ("activated",))

OPERATIONS = {
    "rms_norm": RowOperation(_rms_norm, ("x", "weight"), ("x",)),
    "add_rms_norm": RowOperation(_add_rms_norm, ("x", "residual", "weight"), ("x", "x")),
    "layer_norm": RowOperation(_layer_norm, ("x", "weight", "bias"), ("x",)),
    "swiglu": _SWIGLU,
    "swiglu_experts": _SWIGLU,
    "pointwise": RowOperation(_pointwise, ("a", "b", "c"), ("a",)),
    "rms_norm_fp8": RowOperation(_rms_norm, ("x", "weight"), ("x",), quantised=True),
    "add_rms_norm_fp8": RowOperation(_add_rms_norm, ("x", "residual", "weight"), ("x", "x"), quantised=True),
    "layer_norm_fp8": RowOperation(_layer_norm, ("x", "weight", "bias"), ("x",), quantised=True),
    "swiglu_fp8": RowOperation(_swiglu, ("gate_up",), ("activated",), quantised=True),
    "rms_norm_backward": RowOperation(_rms_norm, ("x", "weight"), ("x", "weight"), ("dy",)),
    "add_rms_norm_backward": RowOperation(_norm_of_total, ("x", "weight"), ("x", "weight"), ("dy", "dtotal")),
    "layer_norm_backward": RowOperation(_layer_norm, ("x", "weight", "bias"), ("x", "weight", "bias"), ("dy",)),
    "swiglu_backward": RowOperation(_swiglu, ("gate_up",), ("gate_up",), ("activated",)),
}


def drawn(name: str, sizes: RowSizes, rank: int, device: torch.device) -> Tensors:
    """Draw the tensors of an operation. swiglu_experts gets more rows than tokens, and `offsets` of the used rows."""
    tensors: Tensors = {}
    dtype: torch.dtype = getattr(torch, sizes.dtype)
    rows = sizes.tokens * (EXPERTS_CAPACITY if name == "swiglu_experts" else 1)
    for index, tensor in enumerate(OPERATIONS[name].tensors):
        source = generator("pointwise", rank, index, device=device)
        shape = (rows, sizes.width * ROWS[tensor]) if tensor in ROWS else (sizes.width,)
        # torch.randn would hold a float32 copy of the whole tensor.
        tensors[tensor] = torch.empty(shape, dtype=dtype, device=device).normal_(generator=source)
    if name == "swiglu_experts":
        tensors["offsets"] = torch.tensor([0, sizes.tokens // 2, sizes.tokens], dtype=torch.int32, device=device)
    return tensors


# Comparison.


def error_of(name: str, results: tuple[Tensor, ...], tensors: Tensors, sizes: RowSizes) -> float:
    """Return the largest error of the results: of rows, relative to the largest element of the row; of gradients of
    vectors, relative to their largest. NaN is infinite.

    Rows are compared in pieces, which in float64 take PIECE_BYTES each.
    """
    operation = OPERATIONS[name]
    piece = max(1, PIECE_BYTES // (16 * sizes.width))
    vectors = {name: tensors[name].double() for name in operation.tensors if name in VECTORS}
    worst, sums = [], list[tuple[Tensor, ...]]()
    with_rows = sum(name in ROWS for name in operation.written)
    for begin in range(0, sizes.tokens, piece):
        rows = slice(begin, min(begin + piece, sizes.tokens))
        exact = {name: tensors[name][rows].double() for name in operation.tensors if name in ROWS}
        want = operation.exact(exact | {name: vector.clone() for name, vector in vectors.items()})
        for result, wanted in zip(_rows_of(operation, results, rows), want[:with_rows], strict=True):
            worst.append(_furthest(result, wanted, dim=-1))
        sums.append(want[with_rows:])
    total = reduce(lambda first, other: tuple(a + b for a, b in zip(first, other, strict=True)), sums)
    gradients = results[len(results) - len(total) :]
    worst += [_furthest(result, wanted, dim=0) for result, wanted in zip(gradients, total, strict=True)]
    largest = float(torch.stack(worst).max())
    return largest if largest == largest else torch.inf


def _rows_of(operation: RowOperation, results: tuple[Tensor, ...], rows: slice) -> list[Tensor]:
    count = sum(name in ROWS for name in operation.written)
    if not operation.quantised:
        return [result[rows] for result in results[:count]]
    values, scales, *others = results
    return [dequantised(values[rows], scales[rows]), *(other[rows] for other in others)]


def _furthest(result: Tensor, want: Tensor, dim: int) -> Tensor:
    largest = want.abs().amax(dim=dim, keepdim=True)
    return ((result.double() - want) / largest).abs().max()


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with 0 if the tensor holds bytes. torch has no fill for 8-bit floats; their NaN is all ones."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0xFF)
    else:
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
