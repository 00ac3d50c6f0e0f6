"""Known defects of similar exchanges, and the tests that would catch them here.

The list is checked like the one in `test_known_defects.py`. Tests that fit in no other file are below it.
"""

from __future__ import annotations

import pytest
import torch

from raymoe.cuda.structs import MAX_RANKS, Peers
from raymoe.errors import ConfigError
from raymoe.exchange.peer.workspace import Workspace
from tests.emulator.build import compiler
from tests.emulator.cases import KINDS
from tests.emulator.machine import Emulator
from tests.emulator.ranks import backend, small, spec_for, workspaces
from tests.emulator.steps import Steps
from tests.unit.caught_by import missing
from tests.unit.exchange.exchange_cases import Case, Result, batches

HERE = "unit/exchange/peer/test_known_exchange_defects.py"
EMULATED, ON_GPUS = "unit/exchange/peer/test_kernels_emulated.py", "gpu/test_exchange_gpu.py"

NEEDS_COMPILER = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")

CAUGHT_BY = {
    "an element stride from an integer division that truncates": [
        f"{EMULATED}::test_rows_arrive_as_planned_and_return_summed",
        f"{ON_GPUS}::test_cases_at_the_limits_of_the_contract_are_right",
        "unit/exchange/test_plan.py::test_impossible_specs_are_refused",
    ],
    "checks of shapes and counts dropped because of graphs": [
        "unit/exchange/test_exchange_arguments.py::test_wrong_arguments_of_dispatch_are_refused",
        f"{ON_GPUS}::test_misuse_is_refused_before_anything_is_sent",
    ],
    "a result of zeros that hides missing or duplicate rows": [
        "unit/workload/test_oracle.py::test_an_injected_error_exceeds_the_bound",
        "unit/exchange/test_exchange.py::test_the_oracle_is_not_linear_through_zero",
        f"{ON_GPUS}::test_replays_and_eager_steps_mix_in_any_order",
    ],
    "padding rows taken for tokens downstream": [
        "unit/exchange/test_exchange.py::test_generated_cases_match_plan_and_oracle",
        f"{ON_GPUS}::test_drawn_cases_are_right",
    ],
    "a cached buffer reused for another dtype or width": [
        "unit/exchange/test_exchange.py::test_two_exchanges_in_one_world_give_correct_results",
        f"{EMULATED}::test_two_exchanges_of_one_workspace_are_correct_in_turns",
        f"{ON_GPUS}::test_exchanges_run_side_by_side",
    ],
    "a context bound to the global group while the caller passed a sub-group": [
        "unit/memory/test_world_group.py::test_an_exchange_over_a_group_uses_only_its_ranks",
        f"{ON_GPUS}::test_an_exchange_over_a_group_is_bound_to_the_group",
    ],
    "expert ids out of range that corrupt counts": [
        "unit/exchange/test_exchange_faults.py::test_all_ranks_raise_on_an_id_out_of_range",
        f"{EMULATED}::test_all_ranks_refuse_the_same_step_and_the_next_one_works",
        f"{ON_GPUS}::test_all_ranks_refuse_bad_data_and_the_next_step_works",
    ],
    "64-bit slots written by 32-bit operations": [f"{HERE}::test_epochs_have_more_than_32_bits"],
    "a reset that races the next signal": [
        "unit/transport/test_transport_words.py::test_no_interleaving_loses_or_doubles_a_signal",
        "unit/exchange/peer/test_protocol_explorer.py::test_the_protocol_holds_for_three_epochs_in_any_order",
        f"{EMULATED}::test_rows_arrive_as_planned_and_return_summed",
    ],
    "pointer tables not checked for size or device": [
        f"{HERE}::test_a_table_of_too_few_or_too_many_peers_is_refused",
        "unit/exchange/test_exchange_arguments.py::test_a_backend_is_refused_with_what_the_gpus_lack",
        f"{ON_GPUS}::test_misuse_is_refused_before_anything_is_sent",
    ],
    "a flag seen before the data that it announces": [
        f"{EMULATED}::test_an_injected_bug_is_found",
        f"{ON_GPUS}::test_many_replays_with_late_ranks_are_right",
    ],
    "grids sized by the worst case": [
        f"{EMULATED}::test_no_launch_has_more_blocks_than_the_given_sms",
        f"{ON_GPUS}::test_no_launch_takes_more_sms_than_asked_for",
    ],
    "a capacity from the local token count, so that unequal ranks write out of bounds": [
        "unit/exchange/test_exchange_arguments.py::test_all_ranks_raise_if_specs_or_backends_differ_or_are_impossible",
        "unit/exchange/test_plan.py::test_the_worst_capacity_holds_the_worst_routings",
        f"{EMULATED}::test_all_ranks_refuse_the_same_step_and_the_next_one_works",
        f"{ON_GPUS}::test_drawn_cases_are_right",
    ],
    "a smaller later call that fails on a larger cached buffer": [
        "unit/exchange/test_exchange.py::test_generated_cases_match_plan_and_oracle",
        f"{ON_GPUS}::test_replays_and_eager_steps_mix_in_any_order",
    ],
    "layers that share one buffer and overwrite saved activations": [
        "unit/exchange/test_exchange.py::test_several_dispatches_may_be_outstanding",
        "unit/exchange/test_exchange_arguments.py::test_depth_and_layout_decide_where_rows_arrive",
        f"{ON_GPUS}::test_several_dispatches_may_be_outstanding",
    ],
    "one byte a thread": [
        "unit/cuda/test_kernels_compile.py::bulk_kernels_move_bytes_by_bulk_copies",
        "unit/cuda/test_kernels_compile.py::kernels_without_bulk_copies_move_pieces_of_16_bytes",
    ],
    "counts exchanged twice": [f"{HERE}::test_a_combine_sends_no_counts"],
    "weights accepted and ignored": [
        "unit/exchange/test_plan.py::test_sums_equal_float64_sums_rounded_once",
        "unit/exchange/test_exchange.py::test_generated_cases_match_plan_and_oracle",
        f"{ON_GPUS}::test_drawn_cases_are_right",
    ],
    "only top-1": [
        f"{EMULATED}::test_rows_arrive_as_planned_and_return_summed",
        f"{ON_GPUS}::test_cases_at_the_limits_of_the_contract_are_right",
    ],
    "metadata keys deleted under a slow rank": [
        "unit/memory/test_world.py::test_swaps_are_correct_at_any_pace",
        "unit/exchange/test_exchange.py::test_dispatches_and_combines_in_any_order_give_correct_sums",
        f"{ON_GPUS}::test_several_dispatches_may_be_outstanding",
    ],
    "a first call inside capture": [
        f"{ON_GPUS}::test_replays_and_eager_steps_mix_in_any_order",
        f"{ON_GPUS}::test_misuse_is_refused_before_anything_is_sent",
        "gpu/test_graph_gpu.py::test_kernels_loaded_inside_a_capture_are_right_or_refused",
    ],
}


@pytest.mark.parametrize("defect", CAUGHT_BY)
def test_every_test_named_for_a_defect_exists(defect: str) -> None:
    assert not missing(CAUGHT_BY[defect])


@pytest.mark.parametrize("ranks", [0, MAX_RANKS + 1])
def test_a_table_of_too_few_or_too_many_peers_is_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"rank 0 of {ranks}; kernels reach 1 to {MAX_RANKS} ranks"):
        Peers.of([4096] * ranks, rank=0)


def in_steps(emulator: Emulator, kind: str, routings: tuple[str, ...]) -> tuple[list[Workspace], Steps]:
    case = Case(emulator.ranks, spec_for(kind), "auto", routings, seed=7)
    spaces = workspaces(emulator, case.spec)
    return spaces, Steps(emulator, case, [backend(kind, space, case.spec, small) for space in spaces])


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", KINDS)
def test_epochs_have_more_than_32_bits(kind: str) -> None:
    """Runs 2^32 - 1 to 2^32 + 2. Code that keeps half of a word waits for ever, or takes an old row for a new one."""
    with Emulator(3) as emulator:
        spaces, steps = in_steps(emulator, kind, ("uniform", "masked", "none", "skewed"))
        for space in spaces:
            for op in (0, 1):  # dispatch and combine
                space.heap.tensor("own")[op, 0] = 2**32 - 2
        for step in range(4):
            steps.enqueue(step)
        emulator.run(seed=1)
        steps.judge()
        for space in spaces:
            assert space.heap.tensor("own")[:2, 0].tolist() == [2**32 + 2] * 2


def routing_of(space: Workspace) -> dict[str, torch.Tensor]:
    """Return the regions in which sources announce their rows."""
    names = [placed.region.name for placed in space.heap.layout.placed]
    return {name: space.heap.tensor(name).clone() for name in names if name.endswith(("counts", "routing_entries"))}


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", KINDS)
def test_a_combine_sends_no_counts(kind: str) -> None:
    """The slots are known from the dispatch, so its counts are not sent again."""
    with Emulator(2) as emulator:
        spaces, steps = in_steps(emulator, kind, ("uniform",))
        results = [Result(*[torch.zeros(0).numpy()] * 2, [], [], torch.zeros(0).numpy()) for _ in spaces]
        handed = zip(steps.backends, batches(steps.case, 0), results, strict=True)
        combines = [steps._dispatch(owner, batch, "whole", result) for owner, batch, result in handed]
        emulator.run(seed=1)
        before = [routing_of(space) for space in spaces]
        assert any(region.any() for region in before[0].values())
        for combine in combines:
            combine()
        emulator.run(seed=2)
        steps.results.append(results)
        steps.judge()
        for space, then in zip(spaces, before, strict=True):
            assert all(torch.equal(region, then[name]) for name, region in routing_of(space).items())
