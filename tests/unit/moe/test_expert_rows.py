"""The kernels over rows of experts on the emulator: biases, gated activations and all gradients, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.moe.expert_kernels import (
    ActivationForm,
    AddExpertBias,
    ExpertKernel,
    ExpertSums,
    GatedActivation,
    GatedActivationBackward,
    Places,
    WeighGradients,
    new_sums,
    takes,
)
from tests.emulator.build import Change, compiler
from tests.emulator.machine import EmulatorError
from tests.unit.moe.expert_rows_sources import GPT_OSS
from tests.unit.rows.emulated_pipe import close, run_call, tensors_of

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles kernels for a CPU")
BF16 = torch.bfloat16
UNTOUCHED = 77.0
COUNTS = ([3, 0, 8, 1], [0, 20, 0], [0, 0], [1] * 40)


def drawn(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(scale).to(BF16)


@dataclass
class Rows:
    """Experts with so many rows, gaps of two rows after each, and three rows after the last offset."""

    counts: Sequence[int]

    def __post_init__(self) -> None:
        self.offsets = torch.tensor([0, *(each + 2 for each in self.counts)]).cumsum(0).int()
        self.end = int(self.offsets[-1])
        self.capacity = self.end + 3
        self.places = Places(self.offsets, torch.tensor(self.counts, dtype=torch.int32))
        self.expert = torch.full((self.capacity,), -1)
        for expert, count in enumerate(self.counts):
            self.expert[self.offsets[expert] :][:count] = expert
        self.there = self.expert >= 0
        self.gaps = ~self.there & (torch.arange(self.capacity) < self.end)

    def drawn(self, columns: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        """Rows that are NaN in gaps and after the last offset."""
        rows = drawn(self.capacity, columns, seed=seed, scale=4.0).to(dtype)
        rows[~self.there] = torch.nan
        return rows

    def weights(self, seed: int) -> torch.Tensor:
        weights = torch.rand(self.capacity, generator=torch.Generator().manual_seed(seed)) + 0.25
        return weights.where(self.there, torch.tensor(torch.nan))

    def empty(self, *columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.full((self.capacity, *columns), UNTOUCHED, dtype=dtype)

    def judge(self, found: torch.Tensor, wanted: torch.Tensor, size: float = 0.01) -> None:
        """Rows of experts must be near, those of gaps zero, and all others as they were."""
        close(found[self.there], wanted, size)
        assert not found[self.gaps].any() and bool((found[self.end :] == UNTOUCHED).all())


def run(kernel: ExpertKernel, sms: int = 2, changes: Sequence[Change] = ()) -> None:
    run_call(kernel.kernel_call(), [*tensors_of(kernel), *tensors_of(kernel.places)], sms=sms, changes=changes)


def activated(form: ActivationForm, gate_up: torch.Tensor) -> torch.Tensor:
    left, right = (gate_up[:, ::2], gate_up[:, 1::2]) if form.interleaved else gate_up.chunk(2, dim=1)
    left, right = left.clamp(max=form.limit), right.clamp(-form.limit, form.limit)
    return left * torch.sigmoid(left * form.alpha) * (right + form.up_plus)


# Gated activations.

FORMS = {"gpt_oss": GPT_OSS, "swiglu": ActivationForm(), "clamped": ActivationForm(limit=2.0)}


def run_gated(
    rows: Rows, form: ActivationForm, options: str, ffn: int = 40, sms: int = 2, changes: Sequence[Change] = ()
) -> None:
    """Compute the activation and its gradients, and compare all of them with float64."""
    gate_up, dh = rows.drawn(2 * ffn, 1), rows.drawn(ffn, 2)
    bias = drawn(len(rows.counts), 2 * ffn, seed=3) if "biased" in options else None
    weights = rows.weights(4) if "weighted" in options else None
    call = GatedActivation(form, gate_up, bias, weights, rows.empty(ffn), rows.places)
    run(call, sms, changes)
    d_weights = None if weights is None else rows.empty(dtype=torch.float32)
    back = GatedActivationBackward(form, dh, gate_up, bias, weights, rows.empty(2 * ffn), d_weights, rows.places)
    run(back, sms, changes)
    exact = gate_up[rows.there].double().requires_grad_()
    share = (torch.ones(rows.capacity) if weights is None else weights)[rows.there].double().requires_grad_()
    h = activated(form, exact if bias is None else exact + bias.double()[rows.expert[rows.there]]) * share[:, None]
    rows.judge(call.out, h.detach(), 0.1)
    d_gate_up, d_share = torch.autograd.grad((h * dh[rows.there].double()).sum(), (exact, share))
    rows.judge(back.d_gate_up, d_gate_up, 0.1)
    if d_weights is not None:
        rows.judge(d_weights, d_share, float(ffn))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", ["plain", "biased", "weighted", "biased weighted"])
@pytest.mark.parametrize("gate", FORMS)
def test_gated_rows_and_their_gradients_are_those_of_float64(gate: str, options: str) -> None:
    run_gated(Rows([3, 0, 8, 1]), FORMS[gate], options)


@pytest.mark.parametrize("counts", COUNTS)
def test_rows_of_gaps_become_zero_and_rows_after_the_last_offset_stay(counts: list[int]) -> None:
    run_gated(Rows(counts), GPT_OSS, "biased weighted")


@pytest.mark.parametrize(("ffn", "sms"), [(8, 1), (256, 3), (1032, 1)])
def test_warps_share_rows_of_any_width(ffn: int, sms: int) -> None:
    run_gated(Rows([1, 9]), GPT_OSS, "biased weighted", ffn, sms)


def test_a_nan_stays_one_through_the_limit() -> None:
    rows = Rows([2])
    gate_up = rows.drawn(16, 1)
    gate_up[0] = torch.nan
    call = GatedActivation(GPT_OSS, gate_up, None, None, rows.empty(8), rows.places)
    run(call)
    assert call.out[0].isnan().all() and not call.out[1].isnan().any()


# Biases.


def run_added(rows: Rows, weighted: bool, columns: int = 72, sms: int = 2, changes: Sequence[Change] = ()) -> None:
    source, bias = rows.drawn(columns, 1), drawn(len(rows.counts), columns, seed=2)
    weights = rows.weights(3) if weighted else None
    call = AddExpertBias(source, bias, weights, rows.empty(columns), rows.places)
    run(call, sms, changes)
    added = bias.double()[rows.expert[rows.there]]
    if weights is not None:
        added = added * weights[rows.there, None].double()
    rows.judge(call.out, source[rows.there].double() + added)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
def test_each_row_gets_the_bias_of_its_expert(counts: list[int], weighted: bool) -> None:
    run_added(Rows(counts), weighted)


def sums_of(
    rows: Rows, source: torch.Tensor, weights: torch.Tensor | None, sms: int = 2, changes: Sequence[Change] = ()
) -> torch.Tensor:
    call = ExpertSums(source, weights, new_sums(source, len(rows.counts)).fill_(UNTOUCHED), rows.places)
    run(call, sms, changes)
    return call.sums


def run_sums(rows: Rows, weighted: bool, columns: int = 72, changes: Sequence[Change] = ()) -> None:
    source, weights = rows.drawn(columns, 1), rows.weights(2) if weighted else None
    exact = source.double() if weights is None else source.double() * weights[:, None].double()
    wanted = torch.stack([exact[rows.expert == expert].sum(dim=0) for expert in range(len(rows.counts))])
    close(sums_of(rows, source, weights, changes=changes).sum(dim=1), wanted, 10.0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("counts", [*COUNTS, [0, 200, 3]])
def test_rows_are_summed_by_expert(counts: list[int], weighted: bool) -> None:
    run_sums(Rows(counts), weighted)


@pytest.mark.parametrize("columns", [8, 256, 264, 520])
def test_sums_of_rows_of_any_width(columns: int) -> None:
    run_sums(Rows([2, 5]), False, columns)


def test_sums_count_beyond_what_bfloat16_can_and_are_equal_on_any_number_of_sms() -> None:
    """4096 ones in bfloat16 are 256 where each addition is rounded."""
    rows = Rows([4096])
    ones = torch.ones(rows.capacity, 8, dtype=BF16)
    assert sums_of(rows, ones, None).sum(dim=1).tolist() == [[4096.0] * 8]
    rows = Rows([300, 5])
    source = rows.drawn(24, 7)
    assert torch.equal(sums_of(rows, source, None, 1), sums_of(rows, source, None, 7))


# Gradients of weighted rows.


def run_weighed(
    rows: Rows, parts: str, dtype: torch.dtype = BF16, columns: int = 72, changes: Sequence[Change] = ()
) -> None:
    dy, other, weights = rows.drawn(columns, 1, dtype), rows.drawn(columns, 2, dtype), rows.weights(3)
    gradients = dy.clone()
    dotted, scaled = "dotted" in parts, "scaled" in parts
    d_weights = rows.empty(dtype=torch.float32) if dotted else None
    call = WeighGradients(
        gradients, other if dotted else None, weights if scaled else None, d_weights, Places(rows.offsets)
    )
    run(call, changes=changes)
    if d_weights is not None:
        close(d_weights[rows.there], (dy.double() * other.double()).sum(dim=1)[rows.there], 4.0 * columns)
        assert bool((d_weights[rows.end :] == UNTOUCHED).all())
    wanted = dy.double() * weights[:, None].double() if scaled else dy.double()
    close(gradients[rows.there], wanted[rows.there])
    assert torch.equal(gradients[rows.end :].view(torch.uint8), dy[rows.end :].view(torch.uint8))


@pytest.mark.parametrize("parts", ["dotted", "scaled", "dotted scaled"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_gradients_of_weighted_rows(dtype: torch.dtype, parts: str) -> None:
    run_weighed(Rows([3, 0, 8, 1]), parts, dtype)


def run_dots(rows: Rows, changes: Sequence[Change] = ()) -> None:
    dy, bias = rows.drawn(40, 1), drawn(len(rows.counts), 40, seed=2)
    d_weights = rows.empty(dtype=torch.float32)
    call = WeighGradients(dy.clone(), bias, None, d_weights, rows.places)
    run(call, changes=changes)
    rows.judge(d_weights, (dy[rows.there].double() * bias.double()[rows.expert[rows.there]]).sum(dim=1), 160.0)
    assert torch.equal(call.dy.view(torch.int16), dy.view(torch.int16))


@pytest.mark.parametrize("counts", COUNTS)
def test_the_weight_of_a_bias_has_the_sum_over_its_row_as_gradient(counts: list[int]) -> None:
    run_dots(Rows(counts))


# Mistakes and refusals.


def run_all(changes: Sequence[Change]) -> None:
    rows = Rows([41, 0, 3])
    run_gated(rows, GPT_OSS, "biased weighted", 520, changes=changes)
    run_added(rows, True, 520, changes=changes)
    run_sums(Rows([600, 0, 3]), True, 264, changes=changes)  # ten rows in a slice: some for each warp
    run_weighed(rows, "dotted scaled", BF16, 1032, changes=changes)
    run_dots(rows, changes=changes)


INJECTED_BUGS = {
    "an expert that begins at the row forgotten": ("expert_rows.cuh", "end <= row", "end < row"),
    "rows after the last offset": ("expert_rows.cuh", "return min(p.capacity, ", "return max(p.capacity, "),
    "gaps taken for rows": ("expert_rows.cuh", ">= ptx::load_4(p.expert_counts", "> ptx::load_4(p.expert_counts"),
    "the last places of a row forgotten": ("expert_rows.cuh", "begin < width; begin", "begin + 32 < width; begin"),
    "gate and up swapped": ("gated.cuh", "gate[j] = both[2 * j];", "gate[j] = both[2 * j + 1];"),
    "no weight": ("gated_activation.cu", "(u + form.up_plus) * weight", "(u + form.up_plus)"),
    "a gradient through the limit": ("gated_activation_backward.cu", "gate[j] > form.limit, up", "false, up"),
    "the sum of a lane for that of the row": ("gated_activation_backward.cu", "along = sum_of_warp(along);", ""),
    "a bias without its weight": ("add_expert_bias.cu", "added[j] * weight", "added[j]"),
    "the last rows of a slice forgotten": (
        "expert_sums.cu",
        "min(begin + length, count)",
        "min(begin + length - 1, count)",
    ),
    "the sums of a warp forgotten": ("expert_sums.cu", "warp < ROWS_WARPS; ++warp", "warp < ROWS_WARPS - 1; ++warp"),
    "a place overwritten too soon": (
        "expert_sums.cu",
        "    __syncthreads();  // all have read",
        "    // all have read",
    ),
    "dy not scaled": ("weigh_gradients.cu", "values[j] *= weight;", ""),
    "the bias of another expert": ("weigh_gradients.cu", "place.expert : row", "0 : row"),
}


@pytest.mark.parametrize("name", INJECTED_BUGS)
def test_injected_bugs_are_found(name: str) -> None:
    with pytest.raises((AssertionError, EmulatorError)):
        run_all([Change(*INJECTED_BUGS[name])])


def test_without_mistakes_all_of_them_pass() -> None:
    run_all([])


def test_tensors_that_do_not_fit_are_refused() -> None:
    rows = Rows([2, 3])
    source, bias = rows.drawn(16, 1), drawn(2, 16, seed=2)
    call = AddExpertBias(source, bias, None, rows.empty(16), rows.places)
    for changed, said in (
        (replace(call, bias=bias[:1]), r"bias is torch.bfloat16 \(1, 16\); torch.bfloat16 \(2, 16\) is needed"),
        (replace(call, rows=source.float()), "rows is torch.float32"),
        (replace(call, weights=torch.ones(3)), r"weights are torch.float32 \(3,\); float32 \(12,\) is needed"),
        (replace(call, places=Places(rows.offsets.long())), "expert_offsets are torch.int64"),
        (replace(call, rows=rows.drawn(20, 1)[:, :12]), "rows is"),
    ):
        with pytest.raises(ConfigError, match=said):
            changed.kernel_call()
    with pytest.raises(ConfigError, match="gradients of weights need both"):
        WeighGradients(source, source, None, None, Places(rows.offsets)).kernel_call()
    with pytest.raises(ConfigError, match="rows of 12 elements; the kernels of experts take multiples of 8"):
        GatedActivation(ActivationForm(), rows.empty(24), None, None, rows.empty(12), rows.places).kernel_call()
    assert takes(source) and not takes(source[:, :12]) and not takes(source.float())
