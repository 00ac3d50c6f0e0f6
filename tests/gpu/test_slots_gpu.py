"""Experts in slots on two GPUs: eager, captured with other placements between replays, stale tables, and layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.errors import DataRefused  # noqa: E402
from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.slots import SlotTable  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe import LayerForm, MoELayer, add_copy_gradients  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.exchange.exchange_cases import (  # noqa: E402
    ENGINE,
    MANY,
    ROUTINGS,
    Case,
    batches,
    expert_major,
    open_exchange,
    result_of,
)
from tests.unit.exchange.nccl.emulated_launcher import EmulatedLauncher  # noqa: E402
from tests.unit.exchange.test_slot_kernel import ids_of  # noqa: E402
from tests.unit.exchange.test_slots import (  # noqa: E402
    PlacedCase,
    apply_placed,
    drawn_experts,
    judge_placed,
    one_stale,
    run_placed,
)

RANKS = 2
HOPPER = torch.cuda.get_device_capability() >= FUSED_CAPABILITY if GPUS else False
CAPTURABLE = [*(("fused", MANY, "staged", ENGINE) if HOPPER else ()), "allgather"]
SPEC = ExchangeSpec(tokens=37, hidden=256, experts=7, topk=3, alignment=8, slots=6)

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(GPUS < RANKS, reason=f"NCCL needs a GPU for each of {RANKS} ranks: {GPUS} here"),
    pytest.mark.timeout(300),
]


def of(backend: str) -> Case:
    return Case(RANKS, SPEC, backend, ROUTINGS, seed=3)


@pytest.mark.parametrize("layout", ["expert", "rank", "token"])
@pytest.mark.parametrize("backend", [*CAPTURABLE, "collective"])
def test_placements_match_plan_and_oracle(ranks: GpuRanks, backend: str, layout: str) -> None:
    case = replace(of(backend), spec=replace(SPEC, layout=layout), weighted=layout != "token", prefix=True)
    placed = PlacedCase(case, (-1, 0, 0, 1, 2, 3))
    judge_placed(placed, ranks.run(RANKS, run_placed, placed))


def replay(world: World, placed: PlacedCase) -> list[Any]:
    """Capture a step once, and replay it for all batches, with the placement of each written before."""
    case, results = placed.case, []
    with open_exchange(world, case) as exchange, torch.cuda.stream(torch.cuda.Stream()):
        held = batches(case, 0)[world.rank].on(world.device)
        rows = torch.empty(case.spec.rows(RANKS), case.spec.hidden, dtype=held.x.dtype, device=world.device)
        exchange.combine(rows, exchange.dispatch(held.x, held.ids, held.weights))
        torch.cuda.synchronize()
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[0], stream=torch.cuda.current_stream()):
            got = exchange.dispatch(held.x, held.ids, held.weights)
        with torch.cuda.graph(graphs[1], stream=torch.cuda.current_stream()):
            y = exchange.combine(rows, got)
        for step, number in enumerate(placed.placements):
            if number >= 0:
                exchange.place(drawn_experts(case, number))
            batch = batches(case, step)[world.rank].on(world.device)
            for memory, values in ((held.x, batch.x), (held.ids, batch.ids), (held.weights, batch.weights)):
                memory.copy_(values)
            graphs[0].replay()
            x = expert_major(got)
            rows.copy_(apply_placed(exchange, got, x))
            graphs[1].replay()
            exchange.check()
            got.counted = None  # the host knows the number of another replay
            results.append(result_of(got, x, y))
    return results


@pytest.mark.parametrize("backend", CAPTURABLE)
def test_replays_read_what_was_placed_last(ranks: GpuRanks, backend: str) -> None:
    placed = PlacedCase(replace(of(backend), ragged=False), (-1, 0, 0, 1, 2, 3))
    judge_placed(placed, ranks.run(RANKS, replay, placed))


@pytest.mark.parametrize("how", ["not placed", "not written"])
@pytest.mark.parametrize("backend", [*CAPTURABLE, "collective"])
def test_a_stale_table_is_refused_on_all_ranks_and_the_next_step_works(ranks: GpuRanks, backend: str, how: str) -> None:
    case = replace(of(backend), routing=("uniform",) * 3)
    first, second, third = zip(*ranks.run(RANKS, one_stale, case, how), strict=True)
    assert set(first) == set(third) == {""}
    (said,) = set(second)
    assert said.startswith("rank 0 dispatched by placement ") and "and rank 1 by placement" in said


def split(world: World, placed: PlacedCase) -> list[Any]:
    case, results = placed.case, []
    with open_exchange(world, case) as exchange:
        for step, number in enumerate(placed.placements):
            exchange.place(drawn_experts(case, number))
            batch = batches(case, step)[world.rank].on(world.device)
            got = exchange.dispatch_receive(exchange.dispatch_send(batch.x, batch.ids, batch.weights))
            x = expert_major(got)
            sent = exchange.combine_send(apply_placed(exchange, got, x), got)
            results.append(result_of(got, x, exchange.combine_receive(sent)))
            exchange.check()
    return results


@pytest.mark.parametrize("backend", CAPTURABLE[:-1])
def test_split_operations_take_slots(ranks: GpuRanks, backend: str) -> None:
    placed = PlacedCase(of(backend), (0, 1, 2, 0, 1, 2))
    judge_placed(placed, ranks.run(RANKS, split, placed))


def slots_taken(world: World, case: Case) -> list[torch.Tensor]:
    table, taken = SlotTable(world, case.spec), []
    for number, dtype in enumerate((torch.int64, torch.int32)):
        table.write(drawn_experts(case, number))
        taken.append(table.slots_of(ids_of(case, case.spec.tokens, dtype).to(world.device)).cpu())
    return taken


def test_the_kernel_takes_the_slots_of_the_emulated_one(ranks: GpuRanks) -> None:
    from tests.unit.worlds import wired

    case = Case(RANKS, replace(SPEC, tokens=5000), "none", (), seed=2)
    for world, taken in zip(wired(RANKS), ranks.run(RANKS, slots_taken, case), strict=True):
        launcher: Any = EmulatedLauncher(seed=1)
        for number, dtype in enumerate((torch.int64, torch.int32)):
            for table in (SlotTable(world, case.spec), SlotTable(world, case.spec, launcher)):
                table.write(drawn_experts(case, number))
                assert torch.equal(taken[number], table.slots_of(ids_of(case, case.spec.tokens, dtype)))


def layers(world: World) -> tuple[float, bool, bool]:
    """Compare a layer's results before and after placements, captured too, and its copies' gradients."""
    spec = replace(SPEC, dtype="bfloat16", depth=0)
    plain = MoELayer(world, spec, LayerForm(ffn=128), seed=5)
    layer = MoELayer(world, spec, LayerForm(ffn=128), seed=5)
    x = torch.randn(37, 256, generator=torch.Generator().manual_seed(world.rank)).bfloat16().to(world.device)
    worst, equal = 0.0, True
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        want = plain(x).float()
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            y = layer(x)
        for number in range(3):
            layer.place(drawn_experts(Case(RANKS, spec, "auto", (), seed=9), number))
            graph.replay()
            torch.cuda.synchronize()
            worst = max(worst, float((y.float() - want).abs().max() / want.abs().max()))
            equal &= torch.equal(y, layer(x))
    layer(x).float().square().sum().backward()
    add_copy_gradients(layer)
    held = layer.exchange.placement(layer.number).tolist()
    own = layer.experts.down_proj.grad.float().cpu()
    every = [torch.tensor(rows) for rows in world.swap(own[:, 0, :4].tolist(), "gradients")]
    first: dict[int, torch.Tensor] = {}
    same = True
    for rank, experts in enumerate(held):
        for slot, expert in enumerate(experts):
            if expert >= 0:
                same &= torch.equal(first.setdefault(expert, every[rank][slot]), every[rank][slot])
    return worst, equal, same


@pytest.mark.skipif(not HOPPER, reason="the layer's products need compute capability 9.0")
def test_layers_with_copies_compute_what_they_do_without(ranks: GpuRanks) -> None:
    for worst, equal, same in ranks.run(RANKS, layers):
        assert worst < 2e-2 and equal and same


def test_ids_are_checked_against_the_experts(ranks: GpuRanks) -> None:
    for backend in (*CAPTURABLE, "collective"):
        for said in ranks.run(RANKS, refused, of(backend)):
            assert said.startswith("rank 1 asked for expert 7 for its token 2; ids are -1 to 6")


def refused(world: World, case: Case) -> str:
    with open_exchange(world, case) as exchange:
        ids = torch.zeros(4, 3, dtype=torch.int64)
        ids[2, 1] = 7 if world.rank == 1 else 6
        got = exchange.dispatch(
            torch.ones(4, 256, dtype=torch.bfloat16, device=world.device),
            ids.to(world.device),
            torch.ones(4, 3, device=world.device),
        )
        try:
            exchange.combine(expert_major(got), got)
            exchange.check()
        except DataRefused as error:
            return str(error)
    return ""
