"""Test known defects of similar systems that no other file of this folder tests; tests/unit has the whole list."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from raymoe.errors import PeerTimeout
from raymoe.memory.world import World
from raymoe.transport.channels import Channels, ChannelSpec
from raymoe.transport.choice import CANDIDATES, Table, TransportRule
from raymoe.workload.p2p.gpu_copies import fill_drawn, wrong_bytes
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks, RankGone

pytestmark = NEEDS_GPU

LARGE = (2 << 30) + 5
MEMORY_NEEDED = 14 << 30  # two slots, a source and a landing, if all are on one GPU


def send_large(world: World, options: dict[str, Any]) -> tuple[int, int]:
    """Send a large message; return the bytes free at the start, and the number of wrong bytes."""
    torch.cuda.empty_cache()
    free = min(int(str(each)) for each in world.swap(torch.cuda.mem_get_info()[0], "free"))
    if free < MEMORY_NEEDED:
        return free, 0
    channels = Channels(world, ChannelSpec(((0, 1),), (LARGE,), **options))
    wrong = 0
    if world.rank == 0:
        message = torch.empty(LARGE + 16, dtype=torch.uint8, device=world.device)[3:][:LARGE]
        fill_drawn(message, 7)
        channels.send(1, message)
    else:
        wrong = wrong_bytes(channels.receive(0), 7)
        channels.release(0)
    channels.synchronise()
    channels.close()
    torch.cuda.empty_cache()
    return free, wrong


@pytest.mark.parametrize("protocol", ["put", "get"])
@pytest.mark.parametrize("transport", CANDIDATES)
def test_a_message_of_more_than_two_gigabytes_arrives(ranks: GpuRanks, transport: str, protocol: str) -> None:
    answers = ranks.run(2, send_large, {"transport": transport, "protocol": protocol})
    if answers[0][0] < MEMORY_NEEDED:
        pytest.skip(f"needs {MEMORY_NEEDED} bytes of GPU memory free; {answers[0][0]} are")
    assert [wrong for _, wrong in answers] == [0, 0]


def choose_by_tables_that_differ(world: World, folder: str) -> list[str]:
    """Give each rank a table of its own, and others after the channels are made; return the transports used."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAYMOE_CACHE_DIR", str(Path(folder, str(world.rank))))
        return _choose(world)


def _choose(world: World) -> list[str]:
    def save_table(transport: str) -> None:
        rules = tuple(TransportRule("pairs", protocol, 0, transport) for protocol in ("put", "get"))
        Table(world.gpu.name, rules).save()

    save_table(CANDIDATES[world.rank % 2])
    channels = Channels(world, ChannelSpec(((0, 1), (1, 0)), (1000,)))
    used = [channels.transport]
    message = torch.zeros(1000, dtype=torch.uint8, device=world.device)
    for turn in range(3):
        save_table(CANDIDATES[(world.rank + turn) % 2])
        fill_drawn(message, world.rank, turn)
        with channels.together():
            got = channels.receive(1 - world.rank)
            channels.send(1 - world.rank, message)
        assert wrong_bytes(got, 1 - world.rank, turn) == 0
        channels.release(1 - world.rank)
        used.append(channels.transport)
    channels.synchronise()
    channels.close()
    return used


def test_two_ends_with_different_tables_use_one_transport(ranks: GpuRanks, tmp_path: Path) -> None:
    assert ranks.run(2, choose_by_tables_that_differ, str(tmp_path)) == [[CANDIDATES[0]] * 4] * 2


def error_with_a_dead_nccl_peer(world: World) -> str:
    channels = Channels(world, ChannelSpec(((0, 1), (1, 0)), (100_000,), transport="collective"))
    message = torch.zeros(100_000, dtype=torch.uint8, device=world.device)

    def step() -> None:
        with channels.together():
            channels.receive(1 - world.rank)
            channels.send(1 - world.rank, message)
        channels.synchronise()

    step()
    world.barrier("met")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        step()
    assert time.monotonic() - started < 8
    assert caught.value.peer == 1
    return str(caught.value)


@pytest.mark.skipif(GPUS < 2, reason=f"NCCL needs a GPU for each rank; {GPUS} here")
def test_a_killed_peer_does_not_block_nccl_for_ever() -> None:
    with GpuRanks(2) as started:
        error, killed = started.outcomes(2, error_with_a_dead_nccl_peer, timeout_s=2.0)
        assert isinstance(killed, RankGone)
        assert "for rank 1" in str(error)
