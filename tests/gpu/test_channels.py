"""Channels between GPU ranks: every transport that ranks sharing a GPU can have, both protocols, eager and captured."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.device.graph import Graph  # noqa: E402
from raymoe.errors import Aborted, ConfigError, PeerTimeout  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.transport.channels import Channels, ChannelSpec  # noqa: E402
from raymoe.workload.p2p.gpu import fill_drawn, wrong_bytes  # noqa: E402
from tests.gpu.ranks import GPUS, GpuRanks  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason=f"needs an NVIDIA GPU; torch {torch.__version__} sees none here"),
]

RANKS = max(3, min(4, GPUS))
SIZES = [0, 1, 15, 16, 17, 4095, 4096, 100_003, (5 << 20) + 3]
both_protocols = pytest.mark.parametrize("protocol", ["put", "get"])
both_transports = pytest.mark.parametrize("transport", ["tma", "copy_engine"])


@pytest.fixture(scope="module")
def ranks() -> Iterator[GpuRanks]:
    with GpuRanks(RANKS) as started:
        yield started


def of(world: World, pairs: tuple, size: int, **options: Any) -> Channels:
    return Channels(world, ChannelSpec(pairs, (size,), **options))


def ring(world: World) -> tuple[tuple[tuple[int, int], ...], int, int]:
    size = world.size
    return tuple((r, (r + 1) % size) for r in range(size)), (world.rank - 1) % size, (world.rank + 1) % size


def around(world: World, receive_first: bool, options: dict[str, Any]) -> list[int]:
    """Bytes that came wrong, for each size."""
    pairs, left, right = ring(world)
    wrong = []
    for size in SIZES:
        channels = of(world, pairs, size, slots=2, **options)
        memory = torch.zeros(size + 32, dtype=torch.uint8, device=world.device)
        found = 0
        for step in range(4):
            message = memory[(0, 5, 16, 11)[step] :][:size]  # aligned as its slot, and not
            fill_drawn(message, world.rank, step)
            with channels.together():
                if receive_first:
                    got = channels.receive(left)
                channels.send(right, message)
                if not receive_first:
                    got = channels.receive(left)
            found += wrong_bytes(got, left, step)
            channels.release(left)
        channels.synchronise()
        assert (channels.transport, channels.nbytes) == (options["transport"], size)
        channels.close()
        wrong.append(found)
    return wrong


@both_protocols
@both_transports
@pytest.mark.parametrize("receive_first", [False, True])
def test_a_ring_in_either_order_of_asking(ranks, transport, protocol, receive_first):
    options = {"transport": transport, "protocol": protocol}
    assert ranks.run(RANKS, around, receive_first, options) == [[0] * len(SIZES)] * RANKS


def mixed(world: World, options: dict[str, Any]) -> int:
    """Eager on some ranks while others replay, by turns."""
    pairs, left, right = ring(world)
    channels = of(world, pairs, 30_001, **options)
    message = torch.zeros(30_001, dtype=torch.uint8, device=world.device)
    landed, wrong = {}, 0

    def step() -> None:
        with channels.together():
            landed[0] = channels.receive(left)
            channels.send(right, message)
        seen.copy_(landed[0])
        channels.release(left)

    seen = torch.zeros_like(message)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step()
        channels.synchronise()
        with Graph.capture(world.gpu, stream.cuda_stream, step, channels) as graph:
            for turn in range(8):
                fill_drawn(message, world.rank, turn)
                step() if (turn + world.rank) % 3 == 0 else graph.replay(stream.cuda_stream)
                wrong += wrong_bytes(seen, left, turn)
            channels.synchronise()
    channels.close()
    return wrong


@both_protocols
@both_transports
def test_graphs_and_eager_calls_mix(ranks, transport, protocol):
    assert ranks.run(RANKS, mixed, {"transport": transport, "protocol": protocol}) == [0] * RANKS


def everywhere(world: World, size: int, slots: int, options: dict[str, Any]) -> int:
    """All ranks to all, themselves too, all slots full before anything is received; twice."""
    size_of_world = range(world.size)
    pairs = tuple((a, b) for a in size_of_world for b in size_of_world)
    channels = of(world, pairs, size, slots=slots, **options)
    wrong = 0
    for turn in range(2):
        for slot in range(slots):
            with channels.together():
                for peer in size_of_world:
                    message = torch.empty(size, dtype=torch.uint8, device=world.device)
                    fill_drawn(message, world.rank, peer, slot, turn)
                    channels.send(peer, message)
        for slot in range(slots):
            with channels.together():
                got = {peer: channels.receive(peer) for peer in size_of_world}
            wrong += sum(wrong_bytes(got[peer], peer, world.rank, slot, turn) for peer in size_of_world)
        for peer in size_of_world:
            for _ in range(slots):
                channels.release(peer)
    channels.synchronise()
    channels.close()
    return wrong


@both_protocols
@both_transports
def test_many_channels_and_slots_at_once(ranks, transport, protocol):
    options = {"transport": transport, "protocol": protocol}
    assert ranks.run(RANKS, everywhere, 70_001, 3, options) == [0] * RANKS


def twice(world: World, options: dict[str, Any]) -> int:
    """Two sets of channels between the same ranks, on two streams at the same time."""
    wrong = 0
    sets = [of(world, ((0, 1),), 200_000, **options) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in sets]
    messages = torch.zeros(2, 200_000, dtype=torch.uint8, device=world.device)
    for turn in range(4):
        order = (0, 1) if turn % 2 == world.rank else (1, 0)
        for which in order if world.rank < 2 else ():
            channels = sets[which]
            with torch.cuda.stream(streams[which]):
                if world.rank == 0:
                    fill_drawn(messages[which], which, turn)
                    channels.send(1, messages[which])
                else:
                    wrong += wrong_bytes(channels.receive(0), which, turn)
                    channels.release(0)
    for channels, stream in zip(sets, streams, strict=True):
        with torch.cuda.stream(stream):
            channels.synchronise()
    for channels in sets:
        channels.close()
    return wrong


@both_protocols
@both_transports
def test_two_transfers_of_one_pair_do_not_mix(ranks, transport, protocol):
    assert ranks.run(2, twice, {"transport": transport, "protocol": protocol}) == [0, 0]


def in_place(world: World, transport: str) -> int:
    """With get, a message that is written into the slot is fetched from there."""
    channels = of(world, ((0, 1),), 5000, transport=transport, protocol="get", slots=2)
    wrong = 0
    for turn in range(5):
        if world.rank == 0:
            channels.synchronise()
            world.barrier("taken")
            room = channels.send_buffer(1)
            fill_drawn(room, turn)
            channels.send(1, room)
        else:
            world.barrier("taken")
            wrong += wrong_bytes(channels.receive(0), turn)
    channels.synchronise()
    channels.close()
    return wrong


@both_transports
def test_a_message_in_its_slot_is_fetched_from_there(ranks, transport):
    assert ranks.run(2, in_place, transport) == [0, 0]


def with_a_dead_peer(world: World, sends: bool, options: dict[str, Any]) -> str:
    channels = of(world, ((0, 1), (1, 0)), 100_000, **options)
    world.barrier("made")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    message = torch.zeros(100_000, dtype=torch.uint8, device=world.device)
    started = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        if sends:
            for _ in range(3):
                channels.send(1, message)
        else:
            channels.receive(1)
        channels.synchronise()
    assert time.monotonic() - started < 8
    assert (caught.value.peer, caught.value.rank, caught.value.op) == (1, 0, "send" if sends else "receive")
    with pytest.raises(PeerTimeout):
        channels.send(1, message)
    return str(caught.value)


@pytest.mark.parametrize(
    ("transport", "protocol", "sends"),
    [("tma", "put", True), ("copy_engine", "put", True), ("copy_engine", "get", False)],
)
def test_a_killed_peer_is_named(transport, protocol, sends):
    with GpuRanks(2) as started:
        options = {"transport": transport, "protocol": protocol}
        said = started.outcomes(2, with_a_dead_peer, sends, options, timeout_s=2.0)
        assert "for rank 1" in str(said[0])


def told_to_stop(world: World, transport: str) -> str:
    channels = of(world, ((0, 1),), 1000, transport=transport)
    if world.rank == 0:
        world.barrier("stopped")
    else:
        threading.Timer(0.3, world.waiter.abort, ["the test says so"]).start()
        with pytest.raises(Aborted, match="the test says so") as caught:
            channels.receive(0)
            channels.synchronise()
        assert caught.value.peer == 0
        world.waiter.reason = None  # the other rank waits in a round
        world.barrier("stopped")
    with contextlib.suppress(Aborted):
        channels.close()
    return "closed"


@both_transports
def test_an_abort_ends_a_wait(ranks, transport):
    assert ranks.run(2, told_to_stop, transport) == ["closed"] * 2


def refusals(world: World) -> list[str]:
    odd = world.rank % 2
    specs = [
        {"transport": ("tma", "copy_engine")[odd]},
        {"protocol": ("put", "get")[odd]},
        {"dtype": ("int32", "float32")[odd]},
        {"transport": "TMA"},
        {"transport": "host"},
        {"transport": "copy_engine", "sms": 4},
        {"slots": 0},
    ]
    if world.size > GPUS:
        specs.append({"transport": "collective"})
    said = []
    for options in specs:
        with pytest.raises(ConfigError) as caught:
            of(world, ((0, 1),), 16, **options)
        said.append(str(caught.value))
    channels = of(world, ((0, 1),), 16, transport="auto")
    said.append(channels.transport)
    channels.close()
    return said


def test_what_cannot_be_is_refused_and_both_values_are_named(ranks):
    for said in ranks.run(2, refusals):
        assert "tma" in said[0] and "copy_engine" in said[0]
        assert "put" in said[1] and "get" in said[1]
        assert "int32" in said[2] and "float32" in said[2]
        assert "'TMA'" in said[3] and "'host'" in said[4]
        assert "takes no number of SMs" in said[5] and "0 slots" in said[6]
        assert said[-1] == "tma"
        assert len(said) == 8 or "share GPU" in said[7]
