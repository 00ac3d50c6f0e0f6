"""New weights under captured graphs, from another world by CUDA IPC, and weights that sleep, on GPU ranks."""

from __future__ import annotations

from typing import Any

import pytest

from raymoe.errors import WeightsMissing

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe import LayerForm, MoELayer, let_sleep, offer_weights, open_weights  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, RANKS, GpuRanks  # noqa: E402
from tests.unit.moe.bits import same_bits  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]
H, F, T = 512, 256, 64


def layer_of(world: World, seed: int, experts: int) -> MoELayer:
    spec = ExchangeSpec(tokens=T, hidden=H, experts=experts, topk=4, depth=0)
    return MoELayer(world, spec, LayerForm(F, shared=128, norm=1e-6, deterministic="batch"), seed=seed)


def drawn(seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


class CapturedLayer:
    """A layer's forward pass in a CUDA graph."""

    def __init__(self, layer: MoELayer, x: torch.Tensor) -> None:
        side: Any = torch.cuda.Stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        self.graph: Any = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.stream(side):
            layer(x)  # loads the kernels
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=side, capture_error_mode="thread_local"):
                self.y = layer(x)

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.y.clone()


def load_under_a_graph(world: World) -> list[bool]:
    layer, other = (layer_of(world, seed, 8 * world.size) for seed in (1, 2))
    x = drawn(world.rank, world.device)
    with torch.no_grad():
        old, new = layer(x), other(x)
    captured = CapturedLayer(layer, x)
    checks = [same_bits(captured.replay(), old)]
    with layer.loading() as weights:
        for name, each in other.named_parameters():
            weights.load(each.detach(), name)
            checks.append(same_bits(captured.replay(), old))
    checks.append(same_bits(captured.replay(), new))
    layer.exchange.check()
    return checks


def test_a_replay_reads_old_weights_before_a_load_and_new_ones_after_it(ranks: GpuRanks) -> None:
    size = min(RANKS, 4)
    for checks in ranks.run(size, load_under_a_graph):
        assert len(checks) > 5 and all(checks)


def wired(outer: World, ranks: list[int], name: str) -> World | None:
    """Make a world of some of the ranks, as one of other processes, with contexts of its own."""
    descriptor, world = None, None
    if outer.rank in ranks:
        options = {"name": name, "device": "cuda", "share_gpu": True, "timeout_s": outer.timeout_s}
        world = World.open(ranks.index(outer.rank), len(ranks), **options)
        descriptor = world.descriptor()
    theirs: list[Any] = outer.swap(descriptor, f"descriptors of {name}")
    if world is not None:
        world.wire([theirs[rank] for rank in ranks])
    return world


def load_from_another_world(outer: World) -> bool:
    """Rank 0 trains, the other ranks serve."""
    engines = list(range(1, outer.size))
    train, serve = wired(outer, [0], "train"), wired(outer, engines, "serve")
    experts, right = 4 * len(engines), True
    if train is not None:
        trainer = layer_of(train, 1, experts)
        with offer_weights(trainer, readers=len(engines)) as offered:
            outer.swap(offered.descriptor(), "offer")
            for seed in (2, 3):
                trainer.load({name: each.detach() for name, each in layer_of(train, seed, experts).named_parameters()})
                offered.publish()
                outer.barrier("published")
                outer.barrier("loaded")
            outer.barrier("closed")
        train.close()
        return True
    assert serve is not None
    layer, x = layer_of(serve, 1, experts), drawn(serve.rank, serve.device)
    captured = CapturedLayer(layer, x)
    offer: Any = outer.swap(None, "offer")[0]
    with open_weights(serve, [offer]) as opened:
        for seed in (2, 3):
            with torch.no_grad():
                wanted = layer_of(serve, seed, experts)(x)
            outer.barrier("published")
            layer.load(opened)
            right = right and same_bits(captured.replay(), wanted)
            outer.barrier("loaded")
    outer.barrier("closed")
    layer.exchange.check()
    serve.close()
    return right


def test_an_engine_loads_what_a_trainer_offers_by_cuda_ipc(ranks: GpuRanks) -> None:
    size = min(RANKS, 4)
    assert ranks.run(size, load_from_another_world) == [True] * size


def sleep_under_a_graph(world: World) -> list[bool]:
    layer, other = (layer_of(world, seed, 64 * world.size) for seed in (1, 2))
    x = drawn(world.rank, world.device)
    with torch.no_grad():
        old, new = layer(x), other(x)
    nbytes = let_sleep(layer)
    captured = CapturedLayer(layer, x)
    checks = [same_bits(captured.replay(), old)]
    world.barrier("measured one after the other")
    before = torch.cuda.mem_get_info(world.device)[0]
    world.barrier("awake")
    times = world.sleep()
    freed = torch.cuda.mem_get_info(world.device)[0] - before
    checks += [times.nbytes == nbytes, freed >= nbytes, 0 < times.pinning_s <= times.seconds]
    world.barrier("asleep")
    with pytest.raises(WeightsMissing, match="they sleep"), torch.no_grad():
        layer(x)
    world.wake()
    checks.append(same_bits(captured.replay(), old))
    again = world.sleep()
    checks.append(again.pinning_s < 0.01)
    world.wake("empty")
    layer.load({name: each.detach() for name, each in other.named_parameters()})
    checks.append(same_bits(captured.replay(), new))
    with torch.no_grad():
        checks.append(same_bits(layer(x), new))
    layer.exchange.check()
    return checks


def test_a_graph_is_replayed_after_its_weights_slept(ranks: GpuRanks) -> None:
    size = min(RANKS, 4)
    assert ranks.run(size, sleep_under_a_graph) == [[True] * 8] * size
