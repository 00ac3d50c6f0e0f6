"""Runs kernels/moe/product.cu on the emulator, and computes what it must store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import nan
from random import Random

import torch

from raymoe.cuda.launch import Shape
from raymoe.exchange.peer.column_pieces import WORDS, ColumnPieces, tiles_of
from raymoe.moe.products import THREADS, Gate, Product, TileClass
from tests.emulator.build import Change
from tests.emulator.machine import Emulator
from tests.emulator.tensor_map import emulated_map

_MOST_STEPS = 4_000_000  # a run of these tests takes less than a quarter
UNTOUCHED = 77.0
DISPATCH = 41
"""The number of the dispatch that a product tells."""
SMALL = TileClass(16, 2)


@dataclass(frozen=True)
class ProductCase:
    """Experts and the product of their rows; elements are small integers unless `normal`."""

    counts: Sequence[int] = (16, 0, 40, 1, 17)
    columns: int = 72
    outputs: int = 48
    gate: Gate | None = None
    gate_up: bool = False
    bias: bool = False
    weighted: bool = False
    zero_gaps: bool = False
    transposed: bool = False
    """Whether outputs are innermost in the memory of the weights."""
    dtype: torch.dtype = torch.bfloat16
    tiles: TileClass = SMALL
    gap: int | None = 2
    """Rows of no expert after each one; None: up to a multiple of 16."""
    normal: bool = False
    untouched: float = UNTOUCHED
    """What the results hold before."""

    def __str__(self) -> str:
        values = {
            each.name: getattr(self, each.name) for each in fields(self) if each.default != getattr(self, each.name)
        }
        return ", ".join(f"{name} {value}" for name, value in values.items()) or "as it is"

    def product(self) -> Product:
        """Draw the operands. Rows of no expert are NaN in x."""
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape: int, most: int = 1) -> torch.Tensor:
            if self.normal:
                return (torch.randn(*shape, generator=generator) * most).to(self.dtype)
            return torch.randint(-most, most + 1, shape, generator=generator).to(self.dtype)

        experts = len(self.counts)
        sizes = [(count + 15) // 16 * 16 if self.gap is None else count + self.gap for count in self.counts]
        starts = torch.tensor([0, *sizes]).cumsum(0).int()
        rows = int(starts[-1]) + 3
        x = torch.full((rows, self.columns), torch.nan, dtype=self.dtype)
        for expert, count in enumerate(self.counts):
            x[starts[expert] :][:count] = drawn(count, self.columns)
        products = self.outputs * (1 if self.gate is None else 2)
        weight = drawn(experts, products, self.columns) * (self.columns**-0.5 if self.normal else 1)
        return Product(
            x=x,
            weight=weight.transpose(1, 2).contiguous().transpose(1, 2) if self.transposed else weight,
            offsets=starts,
            counts=torch.tensor(self.counts, dtype=torch.int32),
            y=torch.full((rows, self.outputs), self.untouched, dtype=self.dtype),
            gate=self.gate,
            gate_up=torch.full((rows, products), self.untouched, dtype=self.dtype) if self.gate_up else None,
            bias=drawn(experts, products, most=3) if self.bias else None,
            row_weights=torch.randint(1, 4, (rows,), generator=generator).float() if self.weighted else None,
            zero_gaps=self.zero_gaps,
            tiles=self.tiles,
        )


def drawn_case(seed: int) -> ProductCase:
    """Draw sizes and switches."""
    draw = Random(seed)
    gate = draw.choice([None, None, Gate(), Gate(interleaved=True), Gate(draw.random() < 0.5, 1.702, 7.0, 1.0)])
    zero_gaps = draw.random() < 0.4
    classes = [SMALL, TileClass(32, 3)] if zero_gaps else [SMALL, TileClass(8, 2), TileClass(24, 3), TileClass(32, 4)]
    case = ProductCase(
        counts=draw.choices([0, 0, 1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 33, 40], k=draw.choice([1, 2, 3, 4, 5, 33])),
        columns=draw.choice([8, 16, 56, 64, 72, 128, 136, 192, 200]),
        outputs=draw.choice([16, 32, 48, 128, 144, 256, 272]),
        gate=gate,
        gate_up=gate is not None and draw.random() < 0.5,
        bias=draw.random() < 0.4,
        weighted=draw.random() < 0.4,
        zero_gaps=zero_gaps,
        dtype=draw.choice([torch.bfloat16, torch.bfloat16, torch.float16]),
        tiles=draw.choice(classes),
        gap=draw.choice([None, 0, 1, 2, 5, 20]),
        untouched=draw.choice([UNTOUCHED, nan]),
    )
    case = replace(case, transposed=gate is None and draw.random() < 0.5)
    if len(case.counts) < 33:
        return case
    # So many experts take minutes on the emulator if their products are large.
    return replace(case, columns=min(case.columns, 72), outputs=min(case.outputs, 48))


def run_product(
    product: Product, blocks: int = 2, seed: int = 0, launches: int = 1, changes: Iterable[Change] = ()
) -> None:
    """Launch the kernel. It may reach the tensors of the product and the counter of tiles, and nothing else."""
    product.check()
    with Emulator(1, _MOST_STEPS, tuple(changes)) as emulator:

        def placed(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_contiguous():
                return placed(name, tensor.transpose(1, 2)).transpose(1, 2)
            memory = torch.from_numpy(emulator.memory(0, tensor.nbytes, name).bytes)
            return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)

        counter = placed("taken", torch.zeros(1, dtype=torch.int32))
        names = [each.name for each in fields(product) if torch.is_tensor(getattr(product, each.name))]
        there = replace(product, **{name: placed(name, getattr(product, name)) for name in names})
        there.pieces = placed_pieces(product, placed)
        first, second, tokens = there.maps()
        encoded = emulated_map(first), emulated_map(second), tuple(map(emulated_map, tokens))
        shape = Shape(blocks, THREADS, product.tiles.shared_bytes(len(product.counts)))
        for _ in range(launches):
            emulator.launch(0, product.source(), shape, there.params(encoded, counter.data_ptr()))
        emulator.run(seed)
        assert not counter.any(), "the counter of tiles is not 0 for the next launch"
        judge_told(there)
        for name in names:
            if name in ("y", "gate_up", "trace"):
                getattr(product, name).copy_(getattr(there, name))
            else:
                assert torch.equal(*(bits_of(getattr(each, name)) for each in (product, there)))


def placed_pieces(product: Product, placed: Callable[[str, torch.Tensor], torch.Tensor]) -> ColumnPieces | None:
    """Place the words of a product's pieces, and the number of a dispatch."""
    if product.pieces is None:
        return None
    words, number = placed("pieces", product.pieces.words), placed("number", torch.tensor([DISPATCH]))
    return replace(product.pieces, words=words, dispatch=number.data_ptr())


def judge_told(product: Product) -> None:
    """Check the words of the pieces: the dispatch's number for each that the product has, if there are rows."""
    if product.pieces is None:
        return
    words = product.pieces.words
    count = -(-tiles_of(product.outputs) // product.pieces.piece_tiles)
    ready = [DISPATCH] * count if product.counts.any() else []
    assert words.tolist() == ready + [0] * (WORDS - len(ready))


def in_pieces(product: Product, piece_tiles: int = 1) -> Product:
    """Return the product that stores its results in pieces of columns."""
    pieces = ColumnPieces(torch.zeros(WORDS, dtype=torch.int64), 0, product.outputs, piece_tiles, 0)
    return replace(product, pieces=pieces)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def expected(product: Product, untouched: float = UNTOUCHED) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute y and the products in float64."""
    y = torch.full(product.y.shape, untouched, dtype=torch.float64)
    products = torch.full((len(y), product.weight.shape[1]), untouched, dtype=torch.float64)
    for expert, count in enumerate(product.counts.tolist()):
        start, following = (int(each) for each in product.offsets[expert : expert + 2])
        rows = slice(start, start + count)
        made = product.x[rows].double() @ product.weight[expert].double().T
        if product.bias is not None:
            made += product.bias[expert].double()
        products[rows] = made
        if (gate_of := product.gate) is not None:
            gate, up = (made[:, ::2], made[:, 1::2]) if gate_of.interleaved else made.chunk(2, dim=1)
            gate, up = gate.clamp(max=gate_of.limit), up.clamp(-gate_of.limit, gate_of.limit)
            made = gate * torch.sigmoid(gate_of.alpha * gate) * (up + gate_of.up_plus)
        if product.row_weights is not None:
            made = made * product.row_weights[rows, None].double()
        y[rows] = made
        if product.zero_gaps:
            gap = slice(start + count, min(start + (count + 15) // 16 * 16, following))
            y[gap] = products[gap] = 0
    return y, products


def judge(product: Product, untouched: float = UNTOUCHED) -> None:
    """Compare the results: exact integers, or the results of a gate, whose fast functions are not exact."""
    y, products = expected(product, untouched)
    gate_error = 2**-7 if product.y.dtype is torch.bfloat16 else 2**-10
    results = [(product.y, y, 0.0 if product.gate is None else gate_error), (product.gate_up, products, 0.0)]
    for found, wanted, error in results:
        if found is not None:
            assert error or torch.equal(wanted.to(found.dtype).double().nan_to_num(), wanted.nan_to_num())
            torch.testing.assert_close(found.double(), wanted, rtol=error, atol=error, equal_nan=True)
