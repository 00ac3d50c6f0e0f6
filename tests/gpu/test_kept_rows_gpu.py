"""Layers that keep a row of each token in the place of the dispatched rows, on GPU ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.backend import EntryPlaces  # noqa: E402
from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe import LayerForm, MoELayer, RouterForm  # noqa: E402
from raymoe.moe.activation import GPT_OSS  # noqa: E402
from raymoe.moe.expert_kernels import Places  # noqa: E402
from raymoe.moe.kept_rows import KeptRowsCopy  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.gpu.test_expert_rows_gpu import results_of  # noqa: E402
from tests.unit.moe.bits import same_bits  # noqa: E402
from tests.unit.moe.test_kept_rows import UNTOUCHED, Case, E, K, assert_equal_bits, ids_of  # noqa: E402
from tests.unit.moe.test_recomputed_layers import kept_by  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]
H, F, T = 512, 256, 700
SPEC = ExchangeSpec(tokens=T, hidden=H, experts=E, topk=K, depth=0)


# The kernel.


def on_gpu(case: Case, rows: torch.Tensor, kept: torch.Tensor, again: bool) -> KeptRowsCopy:
    pairs = torch.stack((case.entries.places, torch.zeros_like(case.entries.places)), dim=-1).cuda()
    entries = EntryPlaces(pairs[..., 0], case.entries.tokens.cuda())
    assert case.places.counts is not None
    places = Places(case.places.offsets.cuda(), case.places.counts.cuda())
    return KeptRowsCopy(entries, case.rank, case.own.cuda(), kept, rows, places, case.gap, again)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("how", ["eager", "captured"])
@pytest.mark.parametrize(("columns", "topk"), [(24, 3), (7168, 8), (1032, 37)])
def test_the_kernel_brings_each_row_back_to_its_places(columns: int, topk: int, how: str) -> None:
    case = Case((60, 40, 0), 1, slot_tokens=60, topk=topk, experts=6, columns=columns)
    rows, kept = case.rows.cuda(), torch.full_like(case.others, UNTOUCHED).cuda()
    again = torch.full_like(rows, UNTOUCHED)
    calls = on_gpu(case, rows, kept, False), on_gpu(case, again, kept, True)

    def copy() -> tuple[torch.Tensor, ...]:
        kept.fill_(UNTOUCHED)
        again.fill_(UNTOUCHED)
        for call in calls:
            call.launch()
        return kept, again

    first, second = results_of(how, copy)
    there = (case.at[[0, 2]] >= 0).any(dim=2).flatten()
    assert torch.equal(first.cpu()[there], case.others[there]) and bool((first.cpu()[~there] == UNTOUCHED).all())
    assert torch.equal(second.cpu(), case.rows)


# Layers.

FORMS = {
    "swiglu": LayerForm(F, shared=128),
    "gpt_oss": LayerForm(F, activation=GPT_OSS, biases=True),
    "float32 weights": LayerForm(F, weights="float32"),
    "batch": LayerForm(F, deterministic="batch"),
    "activation again": LayerForm(F, recompute="activation"),
}


def run_form(world: World, name: str, backend: str, spec: ExchangeSpec) -> None:
    layer = MoELayer(world, spec, FORMS[name], backend=backend, seed=1)
    assert not layer.keeps_rows
    for kind in ("drawn", "masked", "skew", "few"):
        for tokens in (spec.tokens - world.rank, (3, 0, 5)[world.rank % 3]):
            assert_equal_bits(layer, ids_of(kind, tokens, world.rank))
    layer.exchange.check()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("backend", ["fused", "staged"])
@pytest.mark.parametrize("name", FORMS)
def test_gradients_have_the_bits_of_a_layer_that_keeps_all_rows(
    ranks: GpuRanks, name: str, backend: str, size: int
) -> None:
    ranks.run(size, run_form, name, backend, SPEC)


CHANGES = {"layout": "rank"}, {"slots": 6}, {"capacity": 5640}, {"alignment": 128}, {"tokens": 16}


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_other_specs_have_the_bits_too(ranks: GpuRanks, changes: dict[str, Any]) -> None:
    ranks.run(2, run_form, "swiglu", "fused", replace(SPEC, **changes))


def kept_bytes(world: World) -> tuple[list[int], int]:
    """Return the bytes of rows of H that a layer keeps with and without the dispatched ones, and its capacity."""
    layer = MoELayer(world, SPEC, LayerForm(F + 32), seed=1)
    ids = ids_of("drawn", T, world.rank).to(world.device)
    x = torch.ones(T, H, dtype=torch.bfloat16, device=world.device).requires_grad_()
    found = []
    for layer.keeps_rows in (True, False):
        kept = kept_by(lambda: layer.apply_experts(x, ids, torch.rand(T, K, device=world.device)))
        found.append(sum(t.untyped_storage().nbytes() for t in kept.values() if t.dim() == 2 and t.shape[1] == H))
    return found, layer.exchange.numbers[1]


def test_a_rank_keeps_a_row_of_each_token_of_each_rank(ranks: GpuRanks) -> None:
    for found, capacity in ranks.run(2, kept_bytes):
        assert found == [2 * H * capacity, 2 * H * T * 2]


def captured_differences(world: World) -> list[str]:
    """Return the gradients of a captured step that differ from those of an eager one which keeps all rows."""
    form = LayerForm(F, RouterForm(E, K), shared=128, norm=1e-6, residual=True)
    layer = MoELayer(world, SPEC, form, seed=1)
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(world.rank)).to(world.device).bfloat16()
    x.requires_grad_()
    named = dict(layer.named_parameters())

    def step() -> tuple[torch.Tensor, ...]:
        with torch.autograd.set_multithreading_enabled(False):
            y = layer(x)
            return torch.autograd.grad(y, [x, *named.values()], torch.ones_like(y))

    layer.keeps_rows = True
    wanted = [each.clone() for each in step()]
    layer.keeps_rows = False
    found = results_of("captured", step)
    layer.exchange.check()
    pairs = zip(["x", *named], found, wanted, strict=True)
    return [name for name, one, other in pairs if not same_bits(one, other)]


def test_a_captured_step_has_the_bits_of_one_that_keeps_all_rows(ranks: GpuRanks) -> None:
    assert ranks.run(2, captured_differences) == [[], []]
