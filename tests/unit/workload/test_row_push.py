"""The plan of the baseline `row_push` sends exactly the rows that are counted for all backends."""

import pytest
import torch

from raymoe.workload.compare.row_push import plan_of
from raymoe.workload.inputs import Routing
from raymoe.workload.memory_needed import push_layout
from raymoe.workload.traffic import rows_for


@pytest.mark.parametrize("kind", ["uniform", "zipf", "hot"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_plan_pushes_the_counted_rows_and_no_local_ones(kind, ranks):
    experts = 16
    routing = Routing(kind, seed=2, ranks=ranks, tokens=100, experts=experts, topk=3, masked=0.3)
    for rank in range(ranks):
        ids = routing.draw(rank, 0).ids
        plan = plan_of(ids, rank, ranks, experts)
        pushed = [int((plan >> peer & 1).sum()) for peer in range(ranks)]
        counted = rows_for(ids, ranks, experts)
        assert pushed == [0 if peer == rank else rows for peer, rows in enumerate(counted)]
        tokens = (plan >> 32).tolist()
        assert tokens == sorted(set(tokens)) and all(int(entry) & 0xFFFFFFFF for entry in plan)


def test_a_plan_of_masked_ids_is_empty():
    assert plan_of(torch.full((4, 2), -1), 0, 2, 4).tolist() == []


def test_the_heap_has_a_slot_for_every_token_of_every_rank():
    layout = push_layout(4, 4096, 14336)
    assert layout.region("slots").nbytes == 4 * 4096 * 14336
    assert layout.find("slots").offset % 16 == 0 and layout.region("arrived").shape == (4, 16)
