"""Test layers by `torch.cuda.make_graphed_callables`: a graph of the forward pass, and one of the backward pass."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe import LayerForm, MoELayer, RouterForm, routing_stats  # noqa: E402
from raymoe.moe.experts import local  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.docs import library_page  # noqa: E402
from tests.unit.docs.test_training_page import PAGE  # noqa: E402
from tests.unit.moe.bits import same_bits  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]
SIZES = [1, 2] if GPUS >= 2 else [1]
SPEC = ExchangeSpec(tokens=256, hidden=512, experts=8, topk=2, depth=0)
FORM = LayerForm(256, RouterForm(8, 2, "sigmoid"), shared=128, norm=1e-6, residual=True)
FORMS = {"nothing": FORM, **{kind: replace(FORM, recompute=kind) for kind in ("activation", "all")}}
STEPS, WARMUP = 3, 3


def stack(world: World, kind: str) -> torch.nn.Sequential:
    return torch.nn.Sequential(*[MoELayer(world, SPEC, FORMS[kind], seed=seed) for seed in range(2)])


def rows(world: World, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(10 * seed + world.rank)
    return torch.randn(SPEC.tokens, SPEC.hidden, generator=random).bfloat16().to(world.device).requires_grad_()


def drop_graphs(model: torch.nn.Module) -> None:
    """Free a model's graphs now. If garbage collection frees them in a later capture, it breaks that."""
    del model.forward
    gc.collect()


def results(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return copies of y and of all gradients after a step of SGD."""
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.float().square().mean().backward()
    gradients = {name: local(each.grad).clone() for name, each in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return {"y": y.detach().clone(), "x": x.grad, **gradients}


def differences(world: World, kind: str) -> tuple[list[list[str]], int, int]:
    """Return what has other bits than in an eager step, the rows that were counted, and what the exchange keeps."""
    eager, graphed = stack(world, kind), stack(world, kind)
    torch.cuda.make_graphed_callables(graphed, (rows(world, -1),), num_warmup_iters=WARMUP)
    found = []
    for step in range(STEPS):
        x = rows(world, step)
        wanted, have = results(eager, x), results(graphed, x)
        found.append([name for name, want in wanted.items() if not same_bits(have[name], want)])
    graphed[0].exchange.check()
    counted = sum(routing_stats(graphed)["0"].load)
    drop_graphs(graphed)
    return found, counted, len(graphed[0].exchange._captured_memory)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_steps_by_two_graphs_have_the_bits_of_eager_ones(ranks: GpuRanks, size: int, kind: str) -> None:
    passes = WARMUP + STEPS
    for found, counted, kept in ranks.run(size, differences, kind):
        assert found == [[]] * STEPS
        assert counted == passes * size * SPEC.tokens * SPEC.topk, "warm-up passes count"
        assert kept == 0


def sums(world: World, gradients_first: bool) -> list[str]:
    """Return which gradients of two micro-batches are other sums than without graphs."""
    eager, graphed = stack(world, "nothing"), stack(world, "nothing")
    torch.cuda.make_graphed_callables(graphed, (rows(world, -1),))
    for model in (eager, graphed):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if gradients_first else None
        for batch in range(2):
            model(rows(world, batch)).float().square().mean().backward()
    pairs = zip(eager.named_parameters(), graphed.parameters(), strict=True)
    drop_graphs(graphed)
    return [name for (name, want), have in pairs if not same_bits(local(have.grad), local(want.grad))]


def test_micro_batches_add_up_in_gradients_that_exist_before(ranks: GpuRanks) -> None:
    assert ranks.run(1, sums, True) == [[]]
    (wrong,) = ranks.run(1, sums, False)  # torch takes the graph's memory as the gradient
    assert "0.experts.down_proj" in wrong


def run_block_in_a_group(_world: World, store: str) -> list[str]:
    """Run the page's block. In a process group experts are DTensors."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        import raymoe

        with raymoe.World.of(device="cuda") as world:
            names = {"torch": torch, "raymoe": raymoe, "world": world, "LayerForm": LayerForm, "RouterForm": RouterForm}
            for need, text in library_page.blocks(PAGE):
                if need == "gpu":
                    exec(compile(text, str(PAGE), "exec"), names)
            layers = names.pop("layers")
            wrong = [name for name, each in layers.named_parameters() if not bool(local(each.grad).isfinite().all())]
            drop_graphs(layers)
            return wrong
    finally:
        dist.destroy_process_group()


def test_the_block_of_the_page_runs(ranks: GpuRanks, tmp_path: Path) -> None:
    assert ranks.run(1, run_block_in_a_group, str(tmp_path / "store")) == [[]]
