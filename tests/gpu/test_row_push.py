"""Test that the baseline pushes the rows of its plan to their slots, eager and in graphs."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from raymoe.cuda.graph import Graph  # noqa: E402
from raymoe.errors import PeerTimeout  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe.weights import generator  # noqa: E402
from raymoe.transport.copy_kernel import Ring  # noqa: E402
from raymoe.workload.compare.row_push import RowPush, plan_of  # noqa: E402
from raymoe.workload.inputs import Routing  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU  # noqa: E402

pytestmark = NEEDS_GPU

RANKS = max(2, min(4, GPUS))
EXPERTS, RUNS = 8, 4


def rows_of(source: int, tokens: int, row_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (tokens, row_bytes), dtype=torch.uint8, generator=generator("rows", source))


def wrong_rows(world: World, rows: tuple[int, int], shape: tuple[int, int], captured: bool) -> int:
    """Count the slots that do not hold the expected row, over several runs of different plans."""
    (tokens, row_bytes), (blocks, stages) = rows, shape
    routing = Routing("uniform", seed=1, ranks=world.size, tokens=tokens, experts=EXPERTS, topk=2, masked=0.2)
    push = RowPush(world, tokens, row_bytes, (blocks, Ring(stages, row_bytes)))
    slots = push.heap.tensor("slots")
    xs = [rows_of(source, tokens, row_bytes) for source in range(world.size)]
    push.x.copy_(xs[world.rank])
    wrong = 0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = Graph.capture(world.gpu, stream.cuda_stream, push, push) if captured else None
        for run in range(RUNS):
            slots.fill_(0)
            push.take(plan_of(routing.draw(world.rank, run).ids, world.rank, world.size, EXPERTS).to(world.device))
            torch.cuda.synchronize()
            world.barrier("cleared")
            if graph is not None and run % 2:
                graph.replay(stream.cuda_stream)
            else:
                push()
            push.check()
            world.barrier("pushed")
            for source in range(world.size):
                want = torch.zeros(tokens, row_bytes, dtype=torch.uint8)
                plan = plan_of(routing.draw(source, run).ids, source, world.size, EXPERTS)
                here = (plan >> world.rank & 1).bool()
                tokens_here = plan[here] >> 32
                want[tokens_here] = xs[source][tokens_here]
                wrong += int((slots[source].cpu() != want).any(dim=1).sum())
            world.barrier("compared")
        if graph is not None:
            graph.close()
    push.close()
    return wrong


SHAPES = {
    (1, 16): (1, 1),
    (300, 14336): (12, 14),
    (257, 7392): (64, 8),
    (140, 14336): (132, 4),
    (40, 48): (3, 5),
}


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "mixed"])
@pytest.mark.parametrize(("rows", "shape"), SHAPES.items(), ids=["x".join(map(str, rows)) for rows in SHAPES])
def test_rows_arrive_in_their_slots_and_nowhere_else(ranks, rows, shape, captured):
    assert ranks.run(RANKS, wrong_rows, rows, shape, captured) == [0] * RANKS


def push_without_rank_1(world: World) -> str:
    push = RowPush(world, 8, 64)
    if world.rank == 0:
        push()
        try:
            push.check()
        except PeerTimeout as error:
            return str(error)
    else:
        time.sleep(1.5)
    return ""


def test_a_rank_that_does_not_come_is_named(ranks):
    message = ranks.run(2, push_without_rank_1, timeout_s=0.5)[0]
    assert "row push" in message and "rank 1" in message
