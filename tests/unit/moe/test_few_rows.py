"""few_rows.cu on the emulator: the products of experts with few rows, and SwiGLU of two, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.moe import few_rows, product_launch
from raymoe.moe.expert_rows import Groups
from raymoe.moe.experts import Experts, ModelWeights
from raymoe.moe.few_rows import FewRows
from raymoe.moe.products import Product
from raymoe.moe.torch_products import multiply_by_torch
from raymoe.rows import formulas
from tests.emulator.build import Change, compiler
from tests.emulator.machine import EmulatorError
from tests.unit.rows.emulated_pipe import run_call, tensors_of

NEEDS_COMPILER = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles kernels for a CPU")
BF16 = torch.bfloat16
UNTOUCHED = 77.0


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def drawn_call(
    counts: Sequence[int], columns: int = 64, outputs: int = 32, gated: bool = False, gap: int = 2
) -> FewRows:
    """Experts with `counts` rows, and gaps of NaN after them."""
    starts = torch.tensor([0, *(each + gap for each in counts)]).cumsum(0).int()
    rows = int(starts[-1]) + 3
    x = torch.full((rows, columns), torch.nan, dtype=BF16)
    for expert, count in enumerate(counts):
        x[starts[expert] :][:count] = drawn(count, columns, seed=expert)
    weight = drawn(len(counts), outputs * (2 if gated else 1), columns, seed=99) * columns**-0.5
    y = torch.full((rows, outputs), UNTOUCHED, dtype=BF16)
    return FewRows(x, weight, starts, torch.tensor(counts, dtype=torch.int32), y, gated)


def expected(call: FewRows) -> torch.Tensor:
    y = torch.full(call.y.shape, UNTOUCHED, dtype=torch.float64)
    for expert, count in enumerate(call.expert_counts.tolist()):
        part = slice(int(call.expert_offsets[expert]), int(call.expert_offsets[expert]) + count)
        products = call.x[part].double() @ call.weight[expert].double().T
        if call.gated:
            gate, up = products.chunk(2, dim=1)
            products = gate * gate.sigmoid() * up
        y[part] = products
    return y


def judge(call: FewRows, sms: int = 2, changes: Sequence[Change] = ()) -> None:
    run_call(call.kernel_call(), tensors_of(call), sms=sms, changes=changes)
    torch.testing.assert_close(call.y.double(), expected(call), rtol=2**-8, atol=2**-8)


@NEEDS_COMPILER
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 8, 1], [9, 16], [0, 20, 0], [41], [0, 0], [1] * 40])
def test_each_expert_multiplies_its_own_rows(counts: list[int], gated: bool) -> None:
    """Rows of gaps are neither read, where they would spread NaN, nor written."""
    judge(drawn_call(counts, gated=gated))


@NEEDS_COMPILER
@pytest.mark.parametrize("columns", [32, 96, 192, 224, 416])
def test_any_number_of_steps_goes_through_the_stages(columns: int) -> None:
    judge(drawn_call([2, 11], columns=columns, outputs=16))


@NEEDS_COMPILER
@pytest.mark.parametrize("sms", [1, 3])
def test_blocks_share_the_tiles_on_any_number_of_sms(sms: int) -> None:
    judge(drawn_call([5, 2, 1], outputs=304), sms=sms)


INJECTED_BUGS = {
    "columns swapped in one fragment": (
        "second_word(w.low.low), second_word(w.high.low)",
        "first_word(w.low.low), second_word(w.high.low)",
    ),
    "the last rows forgotten": ("row < tile.rows; row += MOST_GROUPS", "row < 1; row += MOST_GROUPS"),
    "a stage filled with other columns": ("< steps, s + STAGES)", "< steps, s + 1)"),
    "rows of gaps written": ("if (its_row < tile.rows)", "if (true)"),
    "one place for all experts of a warp": (
        "listed[before + __popc(all & ((1u << threadIdx.x) - 1))]",
        "listed[before]",
    ),
}


@NEEDS_COMPILER
@pytest.mark.parametrize("name", INJECTED_BUGS)
def test_injected_bugs_are_found(name: str) -> None:
    call = drawn_call([41, 0, 3], columns=288)
    with pytest.raises((AssertionError, EmulatorError)):
        judge(call, changes=[Change("few_rows.cu", *INJECTED_BUGS[name])])


def test_sizes_that_no_tile_divides_are_refused() -> None:
    for columns, outputs in ((48, 32), (64, 24)):
        with pytest.raises(ConfigError, match="few rows; the kernel takes multiples of 16 outputs and 32 columns"):
            drawn_call([1], columns=columns, outputs=outputs).kernel_call()


def test_rows_and_weights_begin_at_multiples_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymoe.rows.row_launch.takes", lambda _: True)
    x, flat = drawn(4, 64, seed=0), drawn(2 * 64 * 64 + 1, seed=1)
    for gated in (False, True):
        assert few_rows.takes(x, flat[:-1].view(2, 64, 64), gated)
        assert not few_rows.takes(x, flat[1:].view(2, 64, 64), gated)
    call = drawn_call([1, 1], columns=64, outputs=64)
    with pytest.raises(ConfigError, match="few rows: weight does not begin at a multiple of 16 bytes"):
        replace(call, weight=flat[1:].view(2, 64, 64)).kernel_call()


# In a layer's experts.


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Emulate the kernel for tensors on the CPU, and product.cu by torch; returns which of its launches were gated."""
    found: list[bool] = []

    def launch(call: FewRows) -> None:
        found.append(call.gated)
        run_call(call.kernel_call(), tensors_of(call))

    def multiply(call: Product) -> None:
        products = multiply_by_torch(call.x, call.weight, Groups(call.offsets, call.counts))
        call.y.copy_(products if call.gate is None else formulas.swiglu(products))

    monkeypatch.setattr(FewRows, "launch", launch)
    monkeypatch.setattr(product_launch, "launch", multiply)
    monkeypatch.setattr(product_launch, "has_kernel", lambda _: True)
    monkeypatch.setattr("raymoe.rows.row_launch.takes", lambda _: True)
    monkeypatch.setattr("raymoe.moe.experts._in_kernels", lambda _: True)
    return found


OFFSETS, COUNTS = torch.tensor([0, 16, 16, 32], dtype=torch.int32), torch.tensor([5, 0, 16], dtype=torch.int32)


@NEEDS_COMPILER
def test_experts_of_few_rows_without_gradients_take_the_kernel(launched: list[bool]) -> None:
    x = drawn(60, 64, seed=5)
    experts = Experts(ModelWeights(drawn(3, 64, 64, seed=1) / 8, drawn(3, 64, 32, seed=2) / 6))
    with torch.no_grad():
        found, wanted = (experts(x, OFFSETS, COUNTS, expected_rows=rows) for rows in (16.0, 17.0))
        assert experts.streams_weights(x, 16.0) and not experts.streams_weights(x, 17.0)
    assert launched == [True, False] and found.shape == x.shape
    assert not experts.streams_weights(x, 16.0), "gradients are recorded"
    for there in (slice(0, 5), slice(16, 32)):
        torch.testing.assert_close(found[there].float(), wanted[there].float(), rtol=2**-6, atol=2**-6)
