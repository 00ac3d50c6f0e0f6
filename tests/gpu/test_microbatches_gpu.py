"""Layers in microbatches on GPU ranks: the results of the layer, eager and captured, with few SMs and with all."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe import in_microbatches  # noqa: E402
from raymoe.moe.layer import LayerForm, MoELayer  # noqa: E402
from raymoe.moe.router_formulas import RouterForm  # noqa: E402
from raymoe.report.environment import commit  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, RANKS  # noqa: E402
from tests.gpu.replay_ranks import COMPARED_EVERY, Replays, replay_many  # noqa: E402
from tests.gpu.test_exchange_workload import run  # noqa: E402
from tests.gpu.test_layer_workload_gpu import job  # noqa: E402

pytestmark = NEEDS_GPU

TOKENS, HIDDEN, FP8 = 600, 512, "float8_e4m3"


@dataclass(frozen=True)
class Layers:
    """A layer, and one with the same weights whose exchange carries a part of its rows."""

    size: int
    count: int
    sms: int | str
    experts_dtype: str | None = None

    def make(self, world: World, tokens: int, sms: int | str) -> MoELayer:
        experts = 4 * self.size
        router = RouterForm(experts, 3, score="sigmoid")
        form = LayerForm(256, router, shared=128, norm=1e-6, residual=True, experts_dtype=self.experts_dtype)
        spec = ExchangeSpec(tokens, HIDDEN, experts, topk=3, depth=0)
        return MoELayer(world, spec, form, sms=sms, seed=7).eval()


def errors(world: World, layers: Layers) -> list[float]:
    """Return the largest differences from the whole layer: of eager calls, and of replays with other rows."""
    stream, found = torch.cuda.Stream(world.device), []
    with torch.no_grad():
        with torch.cuda.stream(stream):  # which draws the weights too, before it uses them
            whole = layers.make(world, TOKENS, "auto")
            parted = layers.make(world, -(-TOKENS // layers.count), layers.sms)
            x = torch.zeros(TOKENS - 7 * world.rank, HIDDEN, dtype=torch.bfloat16, device=world.device)
            for seed in range(3):
                torch.manual_seed(10 * seed + world.rank)
                x.normal_()
                y = in_microbatches(parted, x, layers.count)
                torch.cuda.synchronize()  # exchanges on two streams, of which one may take all SMs, are refused
                found.append(float((y - whole(x)).abs().max()))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = in_microbatches(parted, x, layers.count)
        with torch.cuda.stream(stream):
            for seed in range(3, 6):
                torch.manual_seed(10 * seed + world.rank)
                x.normal_()
                y.fill_(torch.nan)
                graph.replay()
                torch.cuda.synchronize()
                found.append(float((y - whole(x)).abs().max()))
        for layer in (whole, parted):
            layer.exchange.check()
        del graph
    return found


@pytest.mark.parametrize("experts_dtype", [None, FP8])
@pytest.mark.parametrize(("count", "sms"), [(2, 16), (3, 16), (2, "auto")])
def test_microbatches_give_what_the_layer_gives(ranks, count, sms, experts_dtype):
    if experts_dtype == FP8 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("8-bit products need wgmma")
    for of_rank in ranks.run(RANKS, errors, Layers(RANKS, count, sms, experts_dtype)):
        assert max(of_rank) < 0.05, of_rank


@pytest.mark.skipif(GPUS < 2, reason=f"ranks that share a GPU leave no SM of it to others; {GPUS} here")
def test_a_job_in_microbatches_is_verified(ranks):
    given = job(300, "sigmoid", microbatches=2) | {"exchange": {"sms": 16}}
    lines = ranks.run(2, run, given)[0]
    assert [(line["op"], line["l2"]) for line in lines] == [("step", "cold"), ("step", "warm")]
    assert all(line["verified"] and line["graph"] for line in lines)


@pytest.mark.thorough
@pytest.mark.skipif(GPUS < 2, reason=f"ranks that share a GPU wait 5 ms for each other; {GPUS} here")
@pytest.mark.parametrize(
    "asked",
    [
        Replays(10_000, tokens=128),
        Replays(10_000, tokens=256, few=False),
        Replays(10_000, tokens=256, few=False, experts_dtype=FP8),
    ],
    ids=["few", "many", "8 bits"],
)
def test_10000_replays_beside_other_kernels_give_the_bits_of_the_first(ranks, asked):
    if asked.experts_dtype == FP8 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("8-bit products need wgmma")
    found = ranks.run(2, replay_many, asked)
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    print(json.dumps({"op": "replays", **asdict(asked), "ranks": found, "commit": commit(), **facts}), flush=True)
    for of_rank in found:
        assert of_rank["replays"] == dict.fromkeys(asked.steps, asked.of_each), of_rank
        assert set(of_rank["wrong"].values()) == {0} and of_rank["distance"] < 0.05, of_rank
        assert of_rank["compared_by_host"] == len(asked.steps) * asked.of_each // COMPARED_EVERY, of_rank
        assert of_rank["wrong_by_host"] == 0 and of_rank["delays_before"] and of_rank["kernels_beside"], of_rank
