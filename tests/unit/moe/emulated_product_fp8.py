"""Runs kernels/moe/product_fp8.cu on the emulator, and computes what it must store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import nan
from random import Random

import torch

from raymoe.cuda.launch import Shape
from raymoe.moe.product_fp8 import TILES, ScaledProduct, ScaledTiles
from raymoe.moe.products import THREADS, Gate, Product
from tests.emulator.build import Change
from tests.emulator.machine import Emulator
from tests.emulator.tensor_map import emulated_map
from tests.unit.moe.emulated_product import judge_told, placed_pieces

_MOST_STEPS = 4_000_000
UNTOUCHED = 77.0
E4M3 = torch.float8_e4m3fn
SMALL = ScaledTiles(16, 3)


@dataclass(frozen=True)
class ScaledCase:
    """Experts and the product of their rows. Values are small integers and scales powers of two unless `normal`."""

    counts: Sequence[int] = (16, 0, 40, 1, 17)
    columns: int = 144
    outputs: int = 48
    gate: Gate | None = None
    quantised: bool = False
    bias: bool = False
    weighted: bool = False
    tiles: ScaledTiles = SMALL
    gap: int = 2
    """Rows of no expert after each one."""
    by_row: bool = False
    """Whether the scales of a row are adjacent; else those of a column are, as a dispatch gives them."""
    normal: bool = False

    def __str__(self) -> str:
        values = {
            each.name: getattr(self, each.name) for each in fields(self) if each.default != getattr(self, each.name)
        }
        return ", ".join(f"{name} {value}" for name, value in values.items()) or "as it is"

    def product(self) -> ScaledProduct:
        """Draw the operands. Rows of no expert are NaN in x, and so are their scales. The first row is zero."""
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> torch.Tensor:
            if self.normal:
                return torch.randn(*shape, generator=generator).to(E4M3)
            return torch.randint(-1, 2, shape, generator=generator).float().to(E4M3)

        def drawn_scales(*shape: int) -> torch.Tensor:
            if self.normal:
                return torch.rand(*shape, generator=generator) + 0.1
            return torch.exp2(torch.randint(-1, 3, shape, generator=generator).float())

        experts, blocks = len(self.counts), -(-self.columns // 128)
        starts = torch.tensor([0, *(count + self.gap for count in self.counts)]).cumsum(0).int()
        rows = int(starts[-1]) + 3
        x, row_scales = torch.full((rows, self.columns), nan).to(E4M3), columns_of(rows, blocks)
        for expert, count in enumerate(self.counts):
            own = slice(int(starts[expert]), int(starts[expert]) + count)
            x[own], row_scales[own] = drawn(count, self.columns), drawn_scales(count, blocks)
        x[0] = 0
        products = self.outputs * (1 if self.gate is None else 2)
        y_dtype = E4M3 if self.quantised else torch.bfloat16
        y_scales = columns_of(rows, -(-self.outputs // 128)) if self.quantised else None
        return ScaledProduct(
            Product(
                x=x,
                weight=drawn(experts, products, self.columns),
                offsets=starts,
                counts=torch.tensor(self.counts, dtype=torch.int32),
                y=torch.full((rows, self.outputs), UNTOUCHED).to(y_dtype),
                gate=self.gate,
                bias=torch.randint(-3, 4, (experts, products), generator=generator).bfloat16() if self.bias else None,
                row_weights=torch.randint(1, 4, (rows,), generator=generator).float() if self.weighted else None,
                tiles=self.tiles,
            ),
            row_scales=row_scales.contiguous() if self.by_row else row_scales,
            weight_scales=drawn_scales(experts, -(-products // 128), blocks) * (0.05 if self.normal else 1),
            y_scales=None if y_scales is None else y_scales.fill_(UNTOUCHED),
        )


def columns_of(rows: int, blocks: int) -> torch.Tensor:
    """Scales as a dispatch gives them, of NaN."""
    return torch.full((blocks, -(-rows // 4) * 4), nan).T[:rows]


def drawn_case(seed: int) -> ScaledCase:
    """Draw sizes and switches."""
    draw = Random(seed)
    gate = draw.choice([None, None, Gate(), Gate(), Gate(interleaved=True), Gate(True, 1.702, 7.0, 1.0)])
    plain = [16, 32, 48, 128, 144, 256, 272]
    outputs = plain if gate is None else [64, 128, 192] if gate.interleaved else [128, 256]
    experts = draw.choice([1, 2, 3, 4, 33])
    few = experts == 33
    return ScaledCase(
        counts=draw.choices([0, 1, 2] if few else [0, 0, 1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 33, 40, 66], k=experts),
        columns=draw.choice([16, 144] if few else [16, 64, 112, 128, 144, 256, 272]),
        outputs=outputs[0] if few else draw.choice(outputs),
        gate=gate,
        quantised=gate is not None and draw.random() < 0.6,
        bias=draw.random() < 0.4,
        weighted=draw.random() < 0.4,
        tiles=draw.choice([SMALL, ScaledTiles(8, 3), ScaledTiles(24, 4), ScaledTiles(32, 5), TILES]),
        gap=draw.choice([0, 1, 2, 5, 20]),
    )


def run_scaled(
    scaled: ScaledProduct, blocks: int = 2, seed: int = 0, launches: int = 1, changes: Iterable[Change] = ()
) -> None:
    """Launch the kernel. It may reach the tensors of the product and the counter of tiles, and nothing else."""
    scaled.check()
    with Emulator(1, _MOST_STEPS, tuple(changes)) as emulator:

        def placed(name: str, tensor: torch.Tensor) -> torch.Tensor:
            nbytes = tensor.untyped_storage().nbytes()
            memory = torch.from_numpy(emulator.memory(0, nbytes, name).bytes).view(tensor.dtype)
            return memory.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

        def of(product: object) -> dict[str, torch.Tensor]:
            named = {each.name: getattr(product, each.name) for each in fields(product)}  # type: ignore[arg-type]
            return {name: value for name, value in named.items() if torch.is_tensor(value)}

        counter = placed("taken", torch.zeros(1, dtype=torch.int32))
        product = replace(scaled.product, **{name: placed(name, tensor) for name, tensor in of(scaled.product).items()})
        product.pieces = placed_pieces(scaled.product, placed)
        scales = {name: placed(name, tensor) for name, tensor in of(scaled).items()}
        there = replace(scaled, product=product, **scales)
        first, second = (emulated_map(each) for each in product.weight_maps())
        params = there.params((first, second, tuple(map(emulated_map, product.token_maps()))), counter.data_ptr())
        shape = Shape(blocks, THREADS, product.tiles.shared_bytes(len(product.counts)))
        for _ in range(launches):
            emulator.launch(0, scaled.source(), shape, params)
        emulator.run(seed)
        judge_told(product)
        assert not counter.any(), "the counter of tiles is not 0 for the next launch"
        before, after = of(scaled.product) | of(scaled), of(product) | scales
        for name, tensor in before.items():
            if name in ("y", "y_scales"):
                tensor.copy_(after[name])
            else:
                assert torch.equal(bits(tensor), bits(after[name])), f"{name} has changed"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).clone().view(torch.uint8)


def dequantised(values: torch.Tensor, scales: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """Multiply by scales of `rows` rows and 128 columns each, in float64."""
    wide = scales.double().repeat_interleave(128, dim=-1)[..., : values.shape[-1]]
    return values.double() * wide.repeat_interleave(rows, dim=-2)[..., : values.shape[-2], :]


def expected(scaled: ScaledProduct) -> torch.Tensor:
    """Compute the results in float64, before they are rounded."""
    product = scaled.product
    y = torch.full(product.y.shape, UNTOUCHED, dtype=torch.float64)
    x = dequantised(product.x.float(), scaled.row_scales)
    weight = dequantised(product.weight.float(), scaled.weight_scales, rows=128)
    for expert, (start, count) in enumerate(zip(product.offsets.tolist(), product.counts.tolist(), strict=False)):
        rows = slice(start, start + count)
        made = x[rows] @ weight[expert].T
        if product.bias is not None:
            made += product.bias[expert].double()
        if (gate_of := product.gate) is not None:
            gate, up = (made[:, ::2], made[:, 1::2]) if gate_of.interleaved else made.chunk(2, dim=1)
            gate, up = gate.clamp(max=gate_of.limit), up.clamp(-gate_of.limit, gate_of.limit)
            made = gate * torch.sigmoid(gate_of.alpha * gate) * (up + gate_of.up_plus)
        if product.row_weights is not None:
            made = made * product.row_weights[rows, None].double()
        y[rows] = made
    return y


def judge(scaled: ScaledProduct, error: float = 1e-5) -> None:
    """Compare the results: exact where they are not gated, because sums of such operands are. `error`: of the gate."""
    y, wanted = scaled.product.y, expected(scaled)
    if scaled.y_scales is None:
        if scaled.product.gate is None:
            assert torch.equal(y, wanted.bfloat16())
        torch.testing.assert_close(y.double(), wanted, rtol=2**-7, atol=2**-7)
        return
    own = torch.zeros(len(y), dtype=torch.bool)
    for start, count in zip(scaled.product.offsets.tolist(), scaled.product.counts.tolist(), strict=False):
        own[start : start + count] = True
    assert bool((y[~own].float() == torch.tensor(UNTOUCHED).to(E4M3).float()).all())
    assert bool((scaled.y_scales[~own] == UNTOUCHED).all()), "scales of rows of no expert are not written"
    check_quantised(y[own], scaled.y_scales[own], wanted[own], error)


def check_quantised(values: torch.Tensor, scales: torch.Tensor, wanted: torch.Tensor, error: float = 1e-5) -> None:
    """Compare 8-bit floats and their scales with exact results: each is a nearest one, by the scale of its block.

    `error` is that of the results before they were quantised, relative to the largest of a block.
    """
    padded = torch.nn.functional.pad(wanted.abs(), (0, scales.shape[1] * 128 - wanted.shape[1]))
    reach = padded.unflatten(1, (-1, 128)).amax(dim=2)
    torch.testing.assert_close(scales.double(), torch.where(reach == 0, 1.0, reach / 448), rtol=error, atol=0)
    found = dequantised(values.float(), scales)
    steps = scales.double().repeat_interleave(128, dim=1)[:, : wanted.shape[1]] * 2**-9
    nearest = torch.maximum(wanted.abs() * 2**-4, steps / 2)  # half a step, of normal and of the least numbers
    largest = reach.repeat_interleave(128, dim=1)[:, : wanted.shape[1]]
    assert bool(((found - wanted).abs() <= nearest * (1 + error) + largest * 1.2 * error).all())
