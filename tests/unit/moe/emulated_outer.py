"""Runs kernels/moe/outer_product.cu on the emulator, and computes what it must store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from random import Random

import torch

from raymoe.cuda.launch import Shape
from raymoe.moe.outer_products import SHARED_BYTES, THREADS, OuterProduct
from tests.emulator.build import Change
from tests.emulator.machine import Emulator
from tests.emulator.tensor_map import emulated_map

_MOST_STEPS = 4_000_000


@dataclass(frozen=True)
class OuterCase:
    """Experts and the gradients of their weights; elements are small integers, and NaN in gaps."""

    counts: Sequence[int] = (17, 0, 70, 1)
    outputs: int = 136
    columns: int = 72
    dtype: torch.dtype = torch.bfloat16
    adds: bool = False
    gap: int | None = 2
    """Rows of no expert after each one; None: up to a multiple of 16."""
    normal: bool = False

    def __str__(self) -> str:
        values = {
            each.name: getattr(self, each.name) for each in fields(self) if each.default != getattr(self, each.name)
        }
        return ", ".join(f"{name} {value}" for name, value in values.items()) or "as it is"

    def product(self) -> OuterProduct:
        """Draw the operands. Without `adds` the results begin as NaN."""
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape: int, most: int = 1) -> torch.Tensor:
            if self.normal:
                return torch.randn(*shape, generator=generator)
            return torch.randint(-most, most + 1, shape, generator=generator)

        experts = len(self.counts)
        sizes = [(count + 15) // 16 * 16 if self.gap is None else count + self.gap for count in self.counts]
        starts = torch.tensor([0, *sizes]).cumsum(0).int()
        dy, x = (
            torch.full((int(starts[-1]) + 3, width), torch.nan, dtype=self.dtype)
            for width in (self.outputs, self.columns)
        )
        for expert, count in enumerate(self.counts):
            for rows in (dy, x):
                rows[starts[expert] :][:count] = drawn(count, rows.shape[1]).to(self.dtype)
        results = experts, self.outputs, self.columns
        nothing = torch.full(results, torch.nan, dtype=self.dtype)
        d_weight = drawn(*results, most=9).float() if self.adds else nothing
        return OuterProduct(dy, x, starts, torch.tensor(self.counts, dtype=torch.int32), d_weight)


def drawn_case(seed: int) -> OuterCase:
    """Draw sizes and switches."""
    draw = Random(seed)
    return OuterCase(
        counts=draw.choices([0, 0, 1, 2, 7, 15, 16, 17, 33, 48, 63, 64, 65, 100, 200], k=draw.choice([1, 2, 3, 5])),
        outputs=draw.choice([8, 16, 64, 72, 128, 136, 200, 264]),
        columns=draw.choice([8, 16, 64, 72, 128, 192, 200, 256, 264, 328]),
        dtype=draw.choice([torch.bfloat16, torch.bfloat16, torch.float16]),
        adds=draw.random() < 0.4,
        gap=draw.choice([None, 0, 1, 2, 5, 20]),
    )


def run_outer(
    product: OuterProduct, blocks: int = 2, seed: int = 0, launches: int = 1, changes: Iterable[Change] = ()
) -> None:
    """Launch the kernel. It may reach the tensors of the product and the counter of tiles, and nothing else."""
    product.check()
    with Emulator(1, _MOST_STEPS, tuple(changes)) as emulator:

        def placed(name: str, tensor: torch.Tensor) -> torch.Tensor:
            memory = torch.from_numpy(emulator.memory(0, tensor.nbytes, name).bytes)
            return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)

        counter = placed("taken", torch.zeros(1, dtype=torch.int32))
        names = [each.name for each in fields(product)]
        there = replace(product, **{name: placed(name, getattr(product, name)) for name in names})
        dy, x = there.maps()
        params = there.params((emulated_map(dy), emulated_map(x)), counter.data_ptr())
        for _ in range(launches):
            emulator.launch(0, product.source(), Shape(blocks, THREADS, SHARED_BYTES), params)
        emulator.run(seed)
        assert not counter.any(), "the counter of tiles is not 0 for the next launch"
        product.d_weight.copy_(there.d_weight)
        for name in names:
            assert torch.equal(*(getattr(each, name).view(torch.uint8) for each in (product, there)))


def expected(product: OuterProduct) -> torch.Tensor:
    """Compute the results in float64, from what d_weight holds before the launch."""
    d_weight = product.d_weight.double() if product.adds else torch.zeros(product.d_weight.shape, dtype=torch.float64)
    for expert, count in enumerate(product.counts.tolist()):
        rows = slice(int(product.offsets[expert]), int(product.offsets[expert]) + count)
        d_weight[expert] += product.dy[rows].double().T @ product.x[rows].double()
    return d_weight


def judge(product: OuterProduct, wanted: torch.Tensor) -> None:
    """Compare with the exact integers."""
    assert torch.equal(wanted.to(product.d_weight.dtype).double(), wanted), "the case is not exact"
    torch.testing.assert_close(product.d_weight.double(), wanted, rtol=0, atol=0)
