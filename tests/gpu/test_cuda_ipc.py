"""Test device memory between processes on real GPUs: one for each rank if there are enough, else ranks share them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from raymoe.errors import PeerTimeout, PlacementError, WiringError
from raymoe.memory.cuda_ipc import GRANULE, KIND
from raymoe.memory.layout import Layout, Region
from raymoe.memory.world import World
from tests.gpu.ranks import DEADLINE_S, GPUS, NEEDS_GPU, RANKS, GpuRanks, RankGone, free_bytes

pytestmark = NEEDS_GPU

ROWS = Layout.of([Region.words("flag", RANKS), Region("rows", (RANKS, 1 << 20), "bfloat16"), Region.words("zero", 9)])
SLACK = 4 * GRANULE  # memory that a driver may keep for itself


# Functions that ranks run


def write_to_all(world: World) -> dict[str, Any]:
    heap = world.allocate(ROWS, "rows", where="device")
    clean = int(heap.tensor("rows").count_nonzero()) + int(heap.tensor("zero").count_nonzero())
    world.barrier("looked")
    for peer in range(world.size):
        rows = heap.tensor("rows", peer)
        assert (rows.data_ptr(), rows.device) == (heap.address("rows", peer), world.device)
        rows[world.rank].fill_(10 * world.rank + peer)
        heap.set_word("flag", world.rank, 100 * world.rank + peer, peer)
    torch.cuda.synchronize()
    world.barrier("written")
    rows = heap.tensor("rows")
    assert rows.data_ptr() == heap.address("rows")
    found = {
        "clean": clean,
        "rows": [(float(row.min()), float(row.max())) for row in rows[: world.size]],
        "flags": [heap.word("flag", writer) for writer in range(world.size)],
        "pulled": [float(heap.tensor("rows", peer)[world.rank, -1]) for peer in range(world.size)],
        "nbytes": heap.nbytes,
    }
    world.barrier("read")
    return found


def write_far(world: World) -> list[int]:
    far = Layout.of([Region("gap", (3 << 30,), "uint8"), Region("last", (world.size, 16), "int64")])
    heap = world.allocate(far, "far", where="device")
    for peer in range(world.size):
        heap.tensor("last", peer)[world.rank] = 7 * world.rank + peer
    torch.cuda.synchronize()
    world.barrier("written")
    return heap.tensor("last")[:, 15].tolist()


def make_and_close(world: World, order: list[str], tensor_outlives: bool) -> None:
    heaps = {name: world.allocate(ROWS, name, where="device") for name in ("first", "second")}
    kept = heaps["first"].tensor("rows") if tensor_outlives else None
    for name in order if world.rank % 2 else reversed(order):
        heaps[name].close()
    if kept is not None:
        assert float(kept.fill_(2).sum(dtype=torch.float64)) == 2 * kept.numel()


def keep_a_tensor(world: World) -> tuple[int, int, int]:
    before = free_bytes(world)
    heap = world.allocate(ROWS, "rows", where="device")
    rows = heap.tensor("rows")
    heap.close()
    world.barrier("closed")
    held = before - torch.cuda.mem_get_info()[0]
    world.barrier("looked")
    rows.fill_(1)
    torch.cuda.synchronize()
    del rows
    return held, before - free_bytes(world), heap.nbytes


def use_after_a_peer_closed(world: World) -> float:
    heap = world.allocate(ROWS, "rows", where="device")
    rows = heap.tensor("rows")
    world.barrier("made")
    if world.rank == 0:
        heap.close()  # its wait of 2 s fails, and it frees nothing
        world.barrier("closed")
        world.barrier("written")
        return float(rows[1, 0])
    world.barrier("closed")
    heap.tensor("rows", 0)[world.rank].fill_(world.rank)
    torch.cuda.synchronize()
    world.barrier("written")
    return 1.0


def kill_a_peer(world: World, nbytes: int) -> dict[str, Any]:
    layout = Layout.of([Region("rows", (nbytes,), "uint8")])
    heap = world.allocate(layout, "rows", where="device")
    pids = world.swap(os.getpid(), "pids")
    heap.tensor("rows").fill_(world.rank + 1)
    torch.cuda.synchronize()
    world.barrier("filled")
    if world.rank == 1:
        time.sleep(DEADLINE_S)
    os.kill(pids[1], signal.SIGKILL)
    while _alive(pids[1]):
        time.sleep(0.005)
    peer_rows = heap.tensor("rows", 1)
    found: dict[str, Any] = {"read": int(peer_rows[-1])}
    peer_rows[0] = 9
    torch.cuda.synchronize()
    found["written"] = int(peer_rows[0])
    try:
        world.barrier("lunch")
    except PeerTimeout as error:
        found["said"] = str(error)
    start = time.monotonic()
    heap.close()
    world.close()
    found["closing_s"] = time.monotonic() - start
    found["mine"] = int(torch.ones(4, device=world.device).sum())  # the context still works
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def fill_again(world: World, nbytes: int) -> int:
    layout = Layout.of([Region("rows", (nbytes,), "uint8")])
    return int(world.allocate(layout, "rows", where="device").tensor("rows").max())


def ask_for_too_much(world: World) -> None:
    total = torch.cuda.mem_get_info()[1]
    world.allocate(Layout.of([Region("rows", (2 * total,), "uint8")]), "rows", where="device")


def forge_a_handle(world: World) -> None:
    memory = world._gpu
    assert memory is not None
    memory.map_peer({"kind": KIND, "handle": bytes(range(64)), "nbytes": GRANULE})


# The tests


@pytest.mark.parametrize("size", range(1, RANKS + 1))
def test_ranks_write_to_and_read_from_one_another(ranks: GpuRanks, size: int) -> None:
    for rank, found in enumerate(ranks.run(size, write_to_all)):
        assert found["clean"] == 0
        assert found["rows"] == [(10.0 * writer + rank,) * 2 for writer in range(size)]
        assert found["flags"] == [100 * writer + rank for writer in range(size)]
        assert found["pulled"] == [10.0 * rank + peer for peer in range(size)]
        assert found["nbytes"] % GRANULE == 0


def test_a_region_at_an_offset_of_3_gib_is_right(ranks: GpuRanks) -> None:
    for rank, last in enumerate(ranks.run(RANKS, write_far)):
        assert last == [7 * writer + rank for writer in range(RANKS)]


def test_three_generations_leave_no_memory_behind(ranks: GpuRanks) -> None:
    before = ranks.run(RANKS, free_bytes)
    for generation in range(3):
        ranks.run(RANKS, write_to_all, generation=generation)
    after = ranks.run(RANKS, free_bytes, generation=3)
    assert all(abs(new - old) <= SLACK for new, old in zip(after, before, strict=True)), (before, after)


@pytest.mark.parametrize("order", [[], ["first"], ["first", "second"]])
@pytest.mark.parametrize("tensor_outlives", [False, True])
def test_heaps_are_closed_in_any_order(ranks: GpuRanks, order: list[str], tensor_outlives: bool) -> None:
    before = ranks.run(RANKS, free_bytes)
    ranks.run(RANKS, make_and_close, order, tensor_outlives)
    after = ranks.run(RANKS, free_bytes)
    assert all(abs(new - old) <= SLACK for new, old in zip(after, before, strict=True)), (before, after)


def test_own_memory_lives_as_long_as_its_tensors(ranks: GpuRanks) -> None:
    sharers = -(-RANKS // GPUS)  # on one GPU
    for held, left, nbytes in ranks.run(RANKS, keep_a_tensor):
        assert held >= nbytes
        assert left <= SLACK
        assert held <= sharers * nbytes + SLACK


def test_memory_outlives_a_close_that_comes_too_early(ranks: GpuRanks) -> None:
    assert ranks.run(2, use_after_a_peer_closed) == [1.0, 1.0]


def test_memory_of_a_killed_rank_stays_mapped_and_is_freed_later() -> None:
    with GpuRanks(1) as one:  # the test process makes no context
        nbytes = one.run(1, free_bytes)[0] // 3
    with GpuRanks(2) as pair:
        found, killed = pair.outcomes(2, kill_a_peer, nbytes, timeout_s=2.0)
        assert isinstance(killed, RankGone)
        print(found)
        assert found["said"].startswith("rank 0 waited")
        assert "for rank 1 in lunch" in found["said"]
        assert found["closing_s"] < 6
        assert (found["read"], found["written"], found["mine"]) == (2, 9, 4)
    # The next generation asks for the same memory, while the driver may still be freeing that of the killed rank.
    with GpuRanks(2) as pair:
        assert pair.run(2, fill_again, nbytes, generation=1) == [0, 0]


def test_a_heap_larger_than_the_gpu_is_refused(ranks: GpuRanks) -> None:
    for outcome in ranks.outcomes(2, ask_for_too_much):
        assert isinstance(outcome, PlacementError | WiringError)
        assert "bytes of device memory" in str(outcome)
    assert ranks.run(2, write_to_all)[0]["clean"] == 0


def test_a_forged_handle_is_refused(ranks: GpuRanks) -> None:
    [outcome] = ranks.outcomes(1, forge_a_handle)
    assert isinstance(outcome, WiringError)
    print(outcome)
    assert "cuIpcOpenMemHandle failed: CUDA_ERROR_" in str(outcome)


def test_two_ranks_on_one_gpu_need_share_gpu(ranks: GpuRanks) -> None:
    for outcome in ranks.outcomes(GPUS + 1, free_bytes, share_gpu=False):
        assert isinstance(outcome, WiringError)
        assert f"ranks 0 and {GPUS} are both on GPU" in str(outcome)
        assert "share_gpu" in str(outcome)
