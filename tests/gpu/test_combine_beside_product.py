"""Test on GPUs that a layer whose combine runs beside its last product gives the bits of a layer without."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.backend import column_pieces  # noqa: E402
from raymoe.exchange.peer import column_pieces as in_pieces  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe.experts import GPT_OSS, SWIGLU  # noqa: E402
from raymoe.moe.layer import LayerForm, MoELayer  # noqa: E402
from raymoe.report.environment import commit  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, RANKS  # noqa: E402
from tests.gpu.replay_ranks import COMPARED_EVERY, Replays, replay_many  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(GPUS > 0 and torch.cuda.get_device_capability() != (9, 0), reason="its products need wgmma"),
]

TOKENS, FP8 = 700, "float8_e4m3"
ROUTINGS = ("uniform", "one expert", "masked", "one rank")


@dataclass(frozen=True)
class Layers:
    """A layer of random weights, and how its tokens are routed."""

    hidden: int = 2304
    dtype: str = "bfloat16"
    experts_dtype: str | None = None
    biases: bool = False
    deterministic: str | None = None
    told: bool = True
    """Whether the last product stores pieces: not where a bias is added after it."""
    many_tiles: bool = False
    """Whether a piece has several tiles side by side, as those of large layers have."""

    def make(self, world: World) -> MoELayer:
        spec = ExchangeSpec(TOKENS, self.hidden, 8 * world.size, topk=4, dtype=self.dtype, depth=0)
        activation = GPT_OSS if self.biases else SWIGLU
        form = LayerForm(
            384,
            activation=activation,
            biases=self.biases,
            experts_dtype=self.experts_dtype,
            deterministic=self.deterministic,
        )
        with mock.patch("raymoe.exchange.peer.workspace.FEW_TOKENS", 0):  # few tokens have another combine
            return MoELayer(world, spec, form, backend="fused", seed=7).eval()


def routed(world: World, routing: str, seed: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Draw tokens, ids and weights of a rank."""
    source = torch.Generator().manual_seed(100 * seed + world.rank)
    tokens, experts = TOKENS - 61 * world.rank, 8 * world.size
    x = torch.randn(tokens, hidden, generator=source)
    weights, ids = torch.rand(tokens, experts, generator=source).topk(4)
    if routing == "one expert":
        ids[:] = 3
    elif routing == "masked":
        ids[torch.rand(ids.shape, generator=source) < 0.5] = -1
    elif routing == "one rank":
        ids %= 8
    return x.to(world.device, dtype), ids.to(world.device), weights.to(world.device)


def compare(world: World, layers: Layers) -> dict[str, int]:
    """Count elements that differ: in eager calls, and in replays of a captured call with other rows and routing."""
    with (
        torch.no_grad(),
        mock.patch.object(in_pieces, "LEAST_TILES", 4 if layers.many_tiles else 1),
        torch.cuda.stream(torch.cuda.Stream(world.device)),
    ):
        layer = layers.make(world)
        dtype = getattr(torch, layers.dtype)
        x, ids, weights = routed(world, "uniform", 0, layers.hidden, dtype)
        differing = {}

        def run(overlap: str) -> torch.Tensor:
            layer.overlap = overlap
            return layer.routed(x, ids, weights)

        assert column_pieces(layer.dispatch_rows(x, ids, weights)) is not None
        for seed, routing in enumerate(ROUTINGS):
            for into, part in zip((x, ids, weights), routed(world, routing, seed, layers.hidden, dtype), strict=True):
                into.copy_(part)
            differing[f"eager, {routing}"] = int((run("none") != run("combine")).sum())
        ran = layer.exchange._backend._later
        assert ("combine_beside_product" in ran) == layers.told
        if layers.told:
            (launch,) = ran["combine_beside_product"].launches
            assert launch.fields.stored, "the product told nothing"
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            y = run("combine")
        for seed, routing in enumerate(ROUTINGS * 5):
            for into, part in zip((x, ids, weights), routed(world, routing, seed, layers.hidden, dtype), strict=True):
                into.copy_(part)
            want = run("none")
            y.fill_(torch.nan)
            if seed % 3 == world.rank % 3:
                torch.cuda._sleep(400_000)
            graph.replay()
            key = f"replayed, {routing}"
            differing[key] = differing.get(key, 0) + int((want != y).sum())
        layer.exchange.check()
        graph.reset()
    return differing


@pytest.mark.parametrize(
    "layers",
    [
        Layers(),
        Layers(dtype="float16", hidden=1040),
        Layers(experts_dtype=FP8),
        Layers(many_tiles=True),
        Layers(experts_dtype=FP8, many_tiles=True),
        Layers(biases=True),
        Layers(deterministic="batch"),
        Layers(biases=True, deterministic="batch", told=False),
    ],
    ids=str,
)
def test_a_layer_gives_the_same_bits_with_its_combine_beside_its_product(ranks, layers):
    for of_rank in ranks.run(RANKS, compare, layers):
        assert set(of_rank.values()) == {0}, of_rank


@pytest.mark.thorough
@pytest.mark.skipif(GPUS < 2, reason=f"ranks that share a GPU wait 5 ms for each other; {GPUS} here")
@pytest.mark.parametrize("experts_dtype", [None, FP8])
def test_10000_replays_beside_other_kernels_give_the_bits_of_the_first(ranks, experts_dtype):
    # Pieces of 2, 2 and 1 tiles.
    asked = Replays(10_000, 256, experts_dtype=experts_dtype, hidden=1280, piece_tiles=2, few=False, steps=("overlap",))
    found = ranks.run(2, replay_many, asked)
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    print(json.dumps({"op": "replays", **asdict(asked), "ranks": found, "commit": commit(), **facts}), flush=True)
    for of_rank in found:
        assert of_rank["replays"] == {"overlap": asked.of_each}, of_rank
        assert set(of_rank["wrong"].values()) == {0} and of_rank["distance"] < 0.05, of_rank
        assert of_rank["compared_by_host"] == asked.of_each // COMPARED_EVERY and of_rank["wrong_by_host"] == 0, of_rank
