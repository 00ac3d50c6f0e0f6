"""Test `torch.compile(mode="reduce-overhead")`: torch captures graphs, and checks who keeps memory of their pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe.differentiable import combine, dispatch  # noqa: E402
from raymoe.moe.layer import LayerForm, MoELayer  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.exchange.exchange_cases import ENGINE, MANY, Case, open_exchange  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]
SIZES = [1, 2] if GPUS >= 2 else [1]
PATIENCE_S = 60.0
"""The world's timeout: a rank that compiles keeps the others waiting."""
STEPS = 6

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def outputs(step: Step, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Return copies of y, and of the gradients where the inputs require them."""
    y = step(x, ids, weights)
    found = [y.detach().clone()]
    if x.requires_grad:
        found += (each.clone() for each in torch.autograd.grad(y.float().square().sum(), (x, weights)))
    return found


def differences(world: World, step: Step, spec: ExchangeSpec, grad: bool) -> tuple[list[float], int]:
    """Return the largest difference of each compiled step from the eager one, and how many graphs torch left out."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)
    generator, errors = torch.Generator(device=world.device), []
    generator.manual_seed(world.rank)
    shape = spec.tokens, spec.hidden
    x = torch.randn(shape, device=world.device, generator=generator).to(getattr(torch, spec.dtype))
    weights = torch.rand(spec.tokens, spec.topk, device=world.device, generator=generator)
    ids = torch.empty(weights.shape, dtype=torch.int64, device=world.device)
    x.requires_grad_(grad)
    weights.requires_grad_(grad)
    with torch.set_grad_enabled(grad), torch._inductor.config.patch(compile_threads=1):
        for _ in range(STEPS):
            scores = torch.rand(spec.tokens, spec.experts, device=world.device, generator=generator)
            ids.copy_(scores.topk(spec.topk).indices)
            wanted = outputs(step, x, ids, weights)
            torch.compiler.cudagraph_mark_step_begin()
            found = outputs(compiled, x, ids, weights)
            pairs = zip(found, wanted, strict=True)
            errors.append(max(float((mine - want).abs().max() / want.abs().max()) for mine, want in pairs))
    return errors, counters["inductor"]["cudagraph_skips"]


def run_pairs(world: World, case: Case, grad: bool) -> tuple[list[float], int, int]:
    """Compile two dependent pairs of dispatch and combine. The third number is what the exchange keeps."""
    with open_exchange(world, case) as exchange:

        def step(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                got = dispatch(exchange, 2 * x, ids, weights)
                x = combine(exchange, torch.tanh(got.x), got) + 1
            return x

        errors, skipped = differences(world, step, case.spec, grad)
        exchange.check()
        torch.compiler.reset()  # graphs hold addresses of the exchange
        return errors, skipped, len(exchange._captured_memory)


@pytest.fixture(params=["fused", MANY, "staged", ENGINE, "allgather"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("size", SIZES)
def test_torchs_own_graphs_hold_dispatch_and_combine(ranks: GpuRanks, backend: str, size: int, grad: bool) -> None:
    spec = ExchangeSpec(tokens=256, hidden=512, experts=8, topk=2, depth=0, padding="zero")
    case = Case(size, spec, backend, ("uniform",))
    for errors, skipped, kept in ranks.run(size, run_pairs, case, grad, timeout_s=PATIENCE_S):
        assert max(errors) <= 2e-2, errors
        assert (skipped, kept) == (0, 0)


def run_layers(world: World, grad: bool) -> tuple[list[float], int, int]:
    spec = ExchangeSpec(tokens=256, hidden=512, experts=8, topk=2, depth=0)
    layers = [MoELayer(world, spec, LayerForm(ffn=256, shared=256), seed=seed) for seed in range(2)]

    def step(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = x + layer.apply_experts(x, ids, weights)
        return x

    errors, skipped = differences(world, step, spec, grad)
    layers[0].exchange.check()
    torch.compiler.reset()
    return errors, skipped, len(layers[0].exchange._captured_memory)


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_torchs_own_graphs_hold_layers(ranks: GpuRanks, grad: bool) -> None:
    for errors, skipped, kept in ranks.run(1, run_layers, grad, timeout_s=PATIENCE_S):
        assert max(errors) <= 5e-2, errors
        assert (skipped, kept) == (0, 0)
