"""Known defects of similar systems, and the tests that would catch them here.

The list is checked: every test that it names must exist. Tests that fit in no other file are below it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from raymoe.errors import RaymoeError
from raymoe.memory.world import World
from raymoe.transport import channels as channels_module
from raymoe.transport import choice
from raymoe.transport.channels import Channels, ChannelSpec
from raymoe.transport.choice import CANDIDATES, Table, TransportRule
from raymoe.transport.copy_kernel import Transfer
from tests.unit.caught_by import missing
from tests.unit.ranks import RankPool

HERE = "unit/transport/test_known_defects.py"

CAUGHT_BY = {
    "threads that race through a lazy initialisation": [
        "unit/cuda/test_jit.py::test_threads_that_race_compile_once",
        "unit/cuda/test_jit.py::test_processes_that_race_get_the_same_cubin",
        "unit/cuda/test_jit.py::test_a_process_has_one_shared_compiler",
        "unit/cuda/test_kernels_load.py::test_threads_that_race_load_once",
        "gpu/test_jit_gpu.py::test_threads_that_race_load_a_kernel_once",
    ],
    "a program, module or memory that leaks when compiling, loading or looking up fails": [
        "unit/cuda/test_jit.py::test_a_compile_error_holds_log_and_command_and_leaves_no_files",
        "unit/cuda/test_kernels_load.py::test_a_failed_load_leaves_no_module_and_can_be_retried",
        "unit/memory/test_cuda_ipc.py::test_an_allocation_that_fails_half_way_frees_all_memory",
        "gpu/test_jit_gpu.py::test_a_load_that_fails_leaves_no_module",
    ],
    "a half-made cache entry that is launched later": [
        "unit/cuda/test_jit.py::test_a_failure_is_raised_in_all_waiting_threads_and_a_retry_compiles",
        "unit/cuda/test_jit.py::test_a_killed_writer_leaves_no_cache_entry",
        "unit/cuda/test_jit.py::test_a_damaged_cache_entry_is_compiled_again_and_replaced",
        "unit/cuda/test_kernels_load.py::test_a_failed_load_leaves_no_module_and_can_be_retried",
    ],
    "an option value that is ignored because of upper or lower case": [
        "unit/config/test_config_problems.py::test_a_problem_is_reported_with_its_line_key_and_value",
        "unit/transport/test_transport_choice.py::test_an_impossible_channel_spec_is_refused",
        "gpu/test_channels.py::test_invalid_specs_are_refused_with_both_values",
    ],
    "a size that is cast to 32 bits": [
        f"{HERE}::test_sizes_and_offsets_have_64_bits",
        "gpu/test_copy_gpu.py::test_copies_above_two_and_four_gigabytes_are_right",
        "gpu/test_known_defects.py::test_a_message_of_more_than_two_gigabytes_arrives",
        "gpu/test_cuda_ipc.py::test_a_region_at_an_offset_of_3_gib_is_right",
    ],
    "a size of 0 that launches no block": [
        "gpu/test_copy_gpu.py::test_copies_of_any_alignment_are_right",
        "gpu/test_channels.py::test_a_ring_works_with_send_or_receive_first",
        "gpu/test_jit_gpu.py::test_launches_that_cannot_run_are_refused",
    ],
    "alignment that is checked for sizes but not for pointers": [
        "gpu/test_copy_gpu.py::test_copies_of_any_alignment_are_right",
        "gpu/test_copy_gpu.py::test_copies_about_as_large_as_the_stages_are_right",
        "gpu/test_channels.py::test_a_ring_works_with_send_or_receive_first",
    ],
    "a module that is cached for the process and used on another GPU": [
        "unit/cuda/test_kernels_load.py::test_every_gpu_has_its_own_module",
        "gpu/test_jit_gpu.py::test_every_gpu_of_the_process_loads_its_own_module",
        "gpu/test_jit_gpu.py::test_code_for_another_gpu_is_refused_and_not_kept",
    ],
    "two transfers of one pair that overwrite each other's rendezvous": [
        f"{HERE}::test_two_sets_of_channels_between_one_pair_do_not_mix",
        "unit/transport/test_transport_choice.py::test_mailboxes_share_no_place_and_no_word",
        "gpu/test_channels.py::test_two_transfers_of_one_pair_do_not_mix",
    ],
    "memory that its owner frees while a peer maps it": [
        "unit/memory/test_cuda_ipc.py::test_every_mapping_is_closed_before_any_memory_is_freed",
        "unit/memory/test_cuda_ipc.py::test_heaps_may_be_closed_in_any_order",
        "unit/memory/test_cuda_ipc.py::test_memory_that_a_dead_peer_may_map_is_not_freed",
        "gpu/test_cuda_ipc.py::test_memory_outlives_a_close_that_comes_too_early",
        "gpu/test_cuda_ipc.py::test_memory_of_a_killed_rank_stays_mapped_and_is_freed_later",
    ],
    "bulk stores taken as arrived when only their source was read": [
        "unit/cuda/test_kernels_compile.py::a_flag_is_stored_after_the_bulk_stores_have_arrived",
        "gpu/test_copy_gpu.py::test_a_signal_never_comes_before_the_bytes",
    ],
    "an endless wait for a dead peer": [
        "unit/transport/test_channels.py::test_a_silent_peer_is_named_and_later_calls_raise_the_same_error",
        "gpu/test_channels.py::test_a_killed_peer_is_named",
        "gpu/test_known_defects.py::test_a_killed_peer_does_not_block_nccl_for_ever",
        "gang/test_faults.py::test_a_rank_that_stops_answering_is_named_and_ends_the_run",
    ],
    "a ring that is blocked by the order of sends and receives": [
        f"{HERE}::test_a_ring_that_receives_before_it_sends_does_not_block",
        "gpu/test_channels.py::test_a_ring_works_with_send_or_receive_first",
    ],
    "a process-wide choice that each call reads again, so that two ends differ": [
        f"{HERE}::test_only_rank_0_reads_the_transport_table",
        f"{HERE}::test_channels_choose_their_transport_once",
        "gpu/test_known_defects.py::test_two_ends_with_different_tables_use_one_transport",
    ],
    "tests with one chunk only": [
        "gpu/test_copy_gpu.py::test_copies_of_many_chunks_are_right",
        "gpu/test_channels.py::test_many_channels_and_slots_work_at_once",
        "gpu/test_p2p_gpu.py::test_every_line_is_complete_and_verified",
    ],
}


@pytest.mark.parametrize("defect", CAUGHT_BY)
def test_every_test_named_for_a_defect_exists(defect: str) -> None:
    assert not missing(CAUGHT_BY[defect])


def test_sizes_and_offsets_have_64_bits() -> None:
    size = (5 << 30) + 7
    packed = bytes(Transfer(1 << 40, 3 << 40, size).packed())
    at = Transfer.offsets()["bytes"]
    assert int.from_bytes(packed[at : at + 8], "little") == size
    spec = ChannelSpec(((0, 1), (2, 1)), (size,), slots=2)
    assert spec.nbytes == size
    assert spec.layout("cuda").nbytes > 4 * size
    assert spec.mailbox(2, 1, slot=1).place * spec.stride > 3 * size


def use_two_sets(world: World) -> list[list[int]]:
    """Rank 0 sends on one set, then on the other; rank 1 receives in the other order. Return each set's values."""
    sets = [Channels(world, ChannelSpec(((0, 1),), (5000,))) for _ in range(2)]
    received: list[list[int]] = [[], []]
    for turn in range(4):
        if world.rank == 0:
            for which in (0, 1):
                sets[which].send(1, torch.full((5000,), 100 * which + turn, dtype=torch.uint8))
        else:
            for which in (1, 0):
                received[which] += set(sets[which].receive(0).tolist())
                sets[which].release(0)
    for channels in sets:
        channels.close()
    return received


def test_two_sets_of_channels_between_one_pair_do_not_mix(pool: RankPool) -> None:
    assert pool.run(2, use_two_sets)[1] == [[0, 1, 2, 3], [100, 101, 102, 103]]


def round_the_ring(world: World) -> list[int]:
    pairs = tuple((rank, (rank + 1) % world.size) for rank in range(world.size))
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    channels = Channels(world, ChannelSpec(pairs, (100_000,)))
    received = []
    for turn in range(5):
        with channels.together():
            got = channels.receive(left)
            channels.send(right, torch.full((100_000,), 10 * world.rank + turn, dtype=torch.uint8))
        received += sorted(set(got.tolist()))
        channels.release(left)
    channels.close()
    return received


def test_a_ring_that_receives_before_it_sends_does_not_block(pool: RankPool) -> None:
    assert pool.run(3, round_the_ring) == [[10 * ((rank - 1) % 3) + turn for turn in range(5)] for rank in range(3)]


class FakeGpuWorld:
    """The world of a GPU rank. The ranks call it in turns, rank 0 first."""

    device = SimpleNamespace(type="cuda")
    gpu = SimpleNamespace(name="NVIDIA H200", capability=(9, 0))

    def __init__(self, rank: int, swapped: dict[str, list[Any]]) -> None:
        self.rank, self.size, self._swapped = rank, 2, swapped

    def swap(self, value: object, what: str) -> list[Any]:
        values = self._swapped.setdefault(what, [None, None])
        values[self.rank] = value
        return values

    def agree(self, problem: RaymoeError | None, what: str) -> None:  # noqa: ARG002 - the signature of World.agree
        if problem is not None:
            raise problem


@pytest.mark.parametrize("transport", CANDIDATES)
def test_only_rank_0_reads_the_transport_table(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    other = CANDIDATES[1 - CANDIDATES.index(transport)]
    tables = [Table("NVIDIA H200", (TransportRule("pairs", "put", 0, way),)) for way in (transport, other)]
    monkeypatch.setattr(choice.Table, "load", lambda: tables.pop(0))
    swapped: dict[str, list[Any]] = {}
    spec = ChannelSpec(((0, 1),), (4096,))
    assert [choice.choose_transport(cast(World, FakeGpuWorld(rank, swapped)), spec) for rank in (0, 1)] == [
        transport
    ] * 2
    assert len(tables) == 1


def test_channels_choose_their_transport_once(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = []

    def count(world: World, spec: ChannelSpec) -> str:
        choices.append(spec)
        return choice.choose_transport(world, spec)

    monkeypatch.setattr(channels_module, "choose_transport", count)
    with World.open(0, 1) as world:
        world.wire([world.descriptor()])
        channels = Channels(world, ChannelSpec(((0, 0),), (8,)))
        for turn in range(3):
            channels.send(0, torch.full((8,), turn, dtype=torch.uint8))
            assert channels.receive(0).tolist() == [turn] * 8
            channels.release(0)
        channels.close()
    assert len(choices) == 1
