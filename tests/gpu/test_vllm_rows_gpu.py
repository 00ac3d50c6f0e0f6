"""The vLLM adapter's rows on GPU ranks, without vLLM: eager with exact rows, and captured; rows as fp8 too."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.fp8 import quantise_weight  # noqa: E402
from raymoe.integrations.vllm_rows import ExpertRowsOfLayer, ExpertWeights, Options  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]
RANKS, H, K = 2, 512, 2
STEPS = [(5, 2), (64, 1), (3, 64)]
"""The tokens of both ranks in each step."""


class Step:
    """The input of one step of a rank, in memory that stays, so that a graph can read it again."""

    def __init__(self, world: World, count: int, experts: int, fp8: bool) -> None:
        self.device, self.experts, self.fp8 = world.device, experts, fp8
        self.x = torch.empty(count, H, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16, device=world.device)
        self.scales = torch.empty(count, H // 128, device=world.device) if fp8 else None
        self.ids = torch.empty(count, K, dtype=torch.int32, device=world.device)
        self.weights = torch.empty(count, K, device=world.device)
        self.y = torch.empty(count, H, dtype=torch.bfloat16, device=world.device)

    def fill(self, seed: int) -> None:
        """Draw other tokens."""
        source = torch.Generator().manual_seed(seed)
        count = len(self.x)
        weights, ids = torch.rand(count, self.experts, generator=source).topk(K)
        self.x.copy_(torch.randn(count, H, generator=source))
        if self.scales is not None:
            self.scales.copy_(torch.rand(self.scales.shape, generator=source) + 0.5)
        self.ids.copy_(ids)
        self.weights.copy_(weights)
        self.y.fill_(torch.nan)

    def run(self, rows: ExpertRowsOfLayer, most: int) -> None:
        """Send the tokens, apply the experts, and combine."""
        brought = rows.bring(self.x, self.ids, self.weights, most, self.scales)
        x, weighted = wide(brought.x, brought.scales), rows.spec.layout == "expert"
        results = torch.zeros(x.shape, device=self.device)
        for k in range(brought.ids.shape[1]):
            weight = 1 if weighted else brought.weights[:, k, None]
            results += torch.where(brought.ids[:, k, None] >= 0, weight * apply_expert(x, brought.ids[:, k]), 0)
        none = (brought.ids < 0).all(1)[:, None]
        rows.combine(torch.where(none, torch.nan, results).bfloat16(), weighted, self.y)

    def error(self) -> float:
        """Return the largest difference of y from a layer without ranks."""
        x, wanted = wide(self.x, self.scales), torch.zeros(self.y.shape, device=self.device)
        for k in range(K):
            wanted += self.weights[:, k, None] * apply_expert(x, self.ids[:, k])
        return float((self.y.float() - wanted).abs().nan_to_num(torch.inf).max())


def wide(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return x.float() if scales is None else x.float() * scales.repeat_interleave(128, dim=1)


def apply_expert(x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Apply another map for each expert, none of them linear."""
    return torch.tanh(x * (expert[:, None] + 1) / 4)


def run_steps(world: World, exact: bool, fp8: bool, layout: str) -> list[float]:
    """Run each step, or replay it three times with other tokens; return the errors."""
    fp8_wire: dict[str, Any] = {"wire": "float8_e4m3", "output": "raw"} if fp8 else {}
    spec = ExchangeSpec(64, H, 4 * world.size, K, layout=layout, alignment=1, depth=0, **fp8_wire)
    rows = ExpertRowsOfLayer(world, spec, Options(), exact=exact, first_id=4 * world.rank)
    errors, graphs = [], []
    with torch.inference_mode():
        for number, counts in enumerate(STEPS):
            step, most = Step(world, counts[world.rank], spec.experts, fp8), max(counts)
            step.fill(100 * number + world.rank)
            step.run(rows, most)
            errors.append(step.error())
            if exact:
                continue
            graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(world.device)
            torch.cuda.synchronize()  # no eager operation may run on another stream than the capture's
            with torch.cuda.stream(side):
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    step.run(rows, most)
                for seed in range(3):
                    step.fill(100 * number + 10 * seed + world.rank + 2)
                    graph.replay()
                    errors.append(step.error())
            torch.cuda.synchronize()
            graphs.append(graph)
    rows.largest.check()
    assert rows.largest.failure() is None
    return errors


@pytest.mark.parametrize("layout", ["expert", "token"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("fp8", [False, True])
def test_steps_equal_a_layer_without_ranks(ranks: GpuRanks, exact: bool, fp8: bool, layout: str) -> None:
    for errors in ranks.run(RANKS, run_steps, exact, fp8, layout):
        assert len(errors) == len(STEPS) * (1 if exact else 4)
        assert max(errors) < 2e-2


FFN = 256


def weights_of(experts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the weights of all experts, the same on every rank."""
    source = torch.Generator().manual_seed(11)
    gate_up = torch.randn(experts, 2 * FFN, H, generator=source) / H**0.5
    down = torch.randn(experts, H, FFN, generator=source) / FFN**0.5
    return gate_up.to(device, torch.bfloat16), down.to(device, torch.bfloat16)


def apart(step: Step, gate_up: torch.Tensor, down: torch.Tensor) -> float:
    """Return how far y is from a layer without ranks, as a part of its norm."""
    wanted = torch.zeros(step.y.shape, device=step.device)
    for k in range(K):
        up = torch.einsum("nfh,nh->nf", gate_up.float()[step.ids[:, k]], step.x.float())
        gate, up = up.split(FFN, dim=1)
        h = torch.nn.functional.silu(gate) * up
        wanted += step.weights[:, k, None] * torch.einsum("nhf,nf->nh", down.float()[step.ids[:, k]], h)
    return float(((step.y.float() - wanted).norm() / wanted.norm()).nan_to_num(torch.inf))


def run_products(world: World, fp8: bool) -> list[float]:
    """Run each step with raymoe's products as the experts, and replay it three times with other tokens."""
    fp8_wire: dict[str, Any] = {"wire": "float8_e4m3", "output": "raw"} if fp8 else {}
    spec = ExchangeSpec(64, H, 4 * world.size, K, alignment=16, depth=0, **fp8_wire)
    rows = ExpertRowsOfLayer(world, spec, Options(experts="raymoe"), exact=False, first_id=4 * world.rank)
    gate_up, down = weights_of(spec.experts, world.device)
    mine = slice(4 * world.rank, 4 * world.rank + 4)
    weights = ExpertWeights(gate_up[mine], down[mine])
    if fp8:
        (of_gate_up, of_down), scales = zip(quantise_weight(gate_up[mine]), quantise_weight(down[mine]), strict=True)
        weights = ExpertWeights(of_gate_up, of_down, scales)
    found, graphs = [], []
    with torch.inference_mode():
        for number, counts in enumerate(STEPS):
            step = Step(world, counts[world.rank], spec.experts, fp8=False)

            def run(step: Step = step, most: int = max(counts)) -> None:
                rows.send(step.x, step.ids, step.weights, most)
                rows.combine(rows.multiply(weights), True, step.y)

            step.fill(100 * number + world.rank)
            run()
            found.append(apart(step, gate_up, down))
            graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(world.device)
            torch.cuda.synchronize()  # no eager operation may run on another stream than the capture's
            with torch.cuda.stream(side):
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    run()
                for seed in range(3):
                    step.fill(100 * number + 10 * seed + world.rank + 2)
                    graph.replay()
                    found.append(apart(step, gate_up, down))
            torch.cuda.synchronize()
            graphs.append(graph)
    rows.largest.check()
    assert rows.largest.failure() is None
    return found


@pytest.mark.parametrize("fp8", [False, True])
def test_products_of_raymoe_equal_a_layer_without_ranks(ranks: GpuRanks, fp8: bool) -> None:
    for found in ranks.run(RANKS, run_products, fp8):
        assert len(found) == 4 * len(STEPS) and max(found) < (0.1 if fp8 else 0.01)
