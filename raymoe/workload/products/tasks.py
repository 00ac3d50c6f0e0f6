"""The products of workload products: how many rows each expert has, their tensors, and their results in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from raymoe.config import Job
from raymoe.fp8 import FP8_BLOCK, dequantise, dequantise_weight, quantise, quantise_weight
from raymoe.moe.expert_rows import Groups, zero_gaps
from raymoe.moe.product_fp8_operators import ScaledOperands
from raymoe.moe.weights import generator

FORWARD = ("up", "up_swiglu", "down")
"""Gate and up of an expert, the same with SwiGLU, and the product after it."""
BY_ROWS = (*FORWARD, "dx")
"""The gradients of the rows of `up` too."""
OPS = (*BY_ROWS, "dw")
"""The gradients of the weights of `up` too."""
ALIGNMENT = 16
"""Rows of an expert start at a multiple of it, as after a dispatch."""
HOT_OTHERS = 4
"""Rows of each expert beside a hot one."""
ZIPF_ALPHA = 1.0
QUANTISED_TOGETHER = 8192
"""Rows."""
CHECKED = 16
"""Rows of an expert that are compared with float64: the first, the last, and others between them."""


def rows_of_experts(kind: str, rows: int, experts: int) -> list[int]:
    """Return the rows of each expert; `rows` is their mean. A hot expert has `rows`, the others HOT_OTHERS each.

    >>> rows_of_experts("equal", 3, 4), rows_of_experts("hot", 9, 4)
    ([3, 3, 3, 3], [4, 4, 9, 4])
    >>> sum(rows_of_experts("uniform", 256, 64)), sum(rows_of_experts("zipf", 256, 64))
    (16384, 16384)
    """
    if kind == "equal":
        return [rows] * experts
    source = generator("rows of experts")
    if kind == "hot":
        counts = [HOT_OTHERS] * experts
        counts[int(torch.randint(experts, (), generator=source))] = rows
        return counts
    popularity = torch.ones(experts)
    if kind == "zipf":
        popularity = (torch.randperm(experts, generator=source) + 1.0) ** -ZIPF_ALPHA
    chosen = torch.multinomial(popularity, rows * experts, replacement=True, generator=source)
    return torch.bincount(chosen, minlength=experts).tolist()


@dataclass(frozen=True)
class ProductSizes:
    """The experts of a rank, their rows, and the sizes of their weights."""

    counts: tuple[int, ...]
    hidden: int
    ffn: int
    dtype: str

    @classmethod
    def of(cls, job: Job) -> ProductSizes:
        shape, section = job.shape, job.products
        counts = rows_of_experts(section.kind, section.rows, shape.experts // job.world.ranks)
        return cls(tuple(counts), shape.hidden, shape.ffn, section.dtype)

    @property
    def starts(self) -> list[int]:
        """The offsets of the experts."""
        starts = [0]
        for count in self.counts:
            starts.append(starts[-1] + -(-count // ALIGNMENT) * ALIGNMENT)
        return starts

    @property
    def mean(self) -> float:
        return sum(self.counts) / len(self.counts)

    def columns(self, op: str) -> int:
        """The columns of a row of x."""
        return {"down": self.ffn, "dx": 2 * self.ffn}.get(op, self.hidden)

    def products(self, op: str) -> int:
        """The rows of an expert's weights."""
        return self.hidden if op in ("down", "dx") else 2 * self.ffn

    def outputs(self, op: str) -> int:
        return self.ffn if op == "up_swiglu" else self.products(op)


@dataclass(frozen=True)
class Task:
    """An operation on these tensors: x[C, K] by weight[L, N, K].

    Of `dx`, x are the gradients of the results of `up`, and outputs are innermost in the memory of its weights. Of
    `dw`, the weights have a shape but no memory, and `dy` are the gradients of results.
    """

    op: str
    sizes: ProductSizes
    x: Tensor
    weight: Tensor
    offsets: Tensor
    counts: Tensor
    dy: Tensor | None = None

    @classmethod
    def drawn(cls, op: str, sizes: ProductSizes, rank: int, device: torch.device) -> Task:
        """Draw the tensors of a rank. x has finite rows in gaps; of `dw` they are zeros, as torch's products need."""
        dtype: torch.dtype = getattr(torch, sizes.dtype)
        rows, columns = max(1, sizes.starts[-1]), sizes.columns(op)
        products, experts = sizes.products(op), len(sizes.counts)
        shapes = {"dw": (rows, products), "dx": (experts, columns, products)}
        x, other = (
            torch.empty(shape, dtype=dtype, device=device).normal_(
                0, scale, generator=generator("products", rank, index, device=device)
            )
            for index, (shape, scale) in enumerate(
                (((rows, columns), 1.0), (shapes.get(op, (experts, products, columns)), columns**-0.5))
            )
        )
        offsets, counts = (
            torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (sizes.starts, sizes.counts)
        )
        if op != "dw":
            return cls(op, sizes, x, other.transpose(1, 2) if op == "dx" else other, offsets, counts)
        x, dy = (zero_gaps(rows_of, Groups(offsets, counts)) for rows_of in (x, other))
        return cls(op, sizes, x, x.new_empty(()).expand(experts, products, columns), offsets, counts, dy)

    @property
    def gated(self) -> bool:
        return self.op == "up_swiglu"

    @property
    def on_gpu(self) -> bool:
        return self.x.is_cuda

    @property
    def rows(self) -> int:
        """The rows of all experts."""
        return sum(self.sizes.counts)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of experts that have rows: they must be read once at least. Of `dw` those of all, which
        must be written."""
        with_rows = sum(count > 0 or self.op == "dw" for count in self.sizes.counts)
        return with_rows * self.weight[0].nbytes if len(self.weight) else 0

    @property
    def nbytes(self) -> int:
        """Bytes that must be read and written."""
        width = self.sizes.columns(self.op) + self.sizes.outputs(self.op)
        return self.weight_bytes + self.rows * width * self.x.element_size()

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.sizes.products(self.op) * self.sizes.columns(self.op)

    @cached_property
    def total(self) -> Tensor:
        """A sum of gradients of weights, in float32."""
        return torch.zeros(self.weight.shape, device=self.x.device)

    @cached_property
    def own(self) -> Tensor:
        """The places of the rows that have an expert."""
        places = [
            torch.arange(start, start + count)
            for start, count in zip(self.sizes.starts, self.sizes.counts, strict=False)
        ]
        return torch.cat(places).to(self.x.device)

    @cached_property
    def checked(self) -> Tensor:
        """The places of the rows that are compared."""
        places = [
            torch.linspace(start, start + count - 1, min(count, CHECKED)).round().long()
            for start, count in zip(self.sizes.starts, self.sizes.counts, strict=False)
        ]
        return torch.cat(places).to(self.x.device)

    @cached_property
    def want(self) -> Tensor:
        """The results of the rows that are compared, in float64."""
        wanted, done = [], 0
        for expert, count in enumerate(self.sizes.counts):
            some = self.checked[done : done + min(count, CHECKED)]
            done += len(some)
            wanted.append(self.exactly(some, expert))
        return torch.cat(wanted)

    def exactly(self, rows: Tensor, expert: int) -> Tensor:
        """Compute the results of some rows by one expert in float64."""
        return self._activated(self.x[rows].double() @ self.weight[expert].double().T)

    def _activated(self, products: Tensor) -> Tensor:
        if not self.gated:
            return products
        gate, up = products.chunk(2, dim=1)
        return gate / (1 + torch.exp(-gate)) * up

    @cached_property
    def quantised(self) -> ScaledOperands:
        """The operands as 8-bit floats. The scales of rows lie column after column, as after a dispatch."""
        x, weight = self.x, self.weight
        (rows, columns), (experts, products, _) = x.shape, weight.shape
        blocks = -(-columns // FP8_BLOCK)
        like = partial(torch.empty, device=x.device)
        values, weights = (like(each.shape, dtype=torch.float8_e4m3fn) for each in (x, weight))
        scales, weight_scales = like(blocks, rows).T, like(experts, -(-products // FP8_BLOCK), blocks)
        for begin in range(0, rows, QUANTISED_TOGETHER):  # in pieces, because this takes wide copies
            part = slice(begin, begin + QUANTISED_TOGETHER)
            values[part], scales[part] = quantise(x[part])
        for expert in range(experts):
            weights[expert], weight_scales[expert] = quantise_weight(weight[expert])
        return ScaledOperands(values, scales, weights, weight_scales)

    @cached_property
    def quantised_want(self) -> Tensor:
        """The results of the rows that are compared, in float64, from the quantised operands."""
        wanted, done, given = [], 0, self.quantised
        for expert, count in enumerate(self.sizes.counts):
            some = self.checked[done : done + min(count, CHECKED)]
            done += len(some)
            weight = dequantise_weight(given.weight[expert], given.weight_scales[expert])
            rows = dequantise(given.x[some], given.x_scales[some])
            wanted.append(self._activated(rows.double() @ weight.double().T))
        return torch.cat(wanted)


def error_between(have: Tensor, want: Tensor) -> float:
    """Return the largest error of rows, relative to the largest element of the row. NaN is infinite.

    >>> error_between(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 4.0]]))
    0.5
    """
    if not len(want):
        return 0.0
    largest = want.abs().amax(dim=1, keepdim=True)
    worst = float(((have.double() - want) / largest).abs().max())
    return worst if worst == worst else torch.inf


def padded_places(counts: Sequence[int], alignment: int) -> tuple[list[int], int]:
    """Return where each expert's rows start if each takes a multiple of `alignment` rows, and the rows of all.

    >>> padded_places([3, 0, 5], 4)
    ([0, 4, 4], 12)
    """
    starts, end = [], 0
    for count in counts:
        starts.append(end)
        end += -(-count // alignment) * alignment
    return starts, end
