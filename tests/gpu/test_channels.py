"""Test channels between GPU ranks: every transport that works on a shared GPU, both protocols, eager and captured."""

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

from raymoe.cuda.graph import Graph  # noqa: E402
from raymoe.errors import Aborted, ConfigError, PeerTimeout  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.transport.channels import Channels, ChannelSpec  # noqa: E402
from raymoe.workload.p2p.gpu_copies import fill_drawn, wrong_bytes  # noqa: E402
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


def open_channels(world: World, pairs: tuple, size: int, **options: Any) -> Channels:
    return Channels(world, ChannelSpec(pairs, (size,), **options))


def ring(world: World) -> tuple[tuple[tuple[int, int], ...], int, int]:
    size = world.size
    return tuple((r, (r + 1) % size) for r in range(size)), (world.rank - 1) % size, (world.rank + 1) % size


def wrong_around_a_ring(world: World, receive_first: bool, options: dict[str, Any]) -> list[int]:
    """Send messages around a ring; return the number of wrong bytes for each size."""
    pairs, left, right = ring(world)
    wrong = []
    for size in SIZES:
        channels = open_channels(world, pairs, size, slots=2, **options)
        memory = torch.zeros(size + 32, dtype=torch.uint8, device=world.device)
        found = 0
        for step in range(4):
            message = memory[(0, 5, 16, 11)[step] :][:size]  # aligned like its slot, and not
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
def test_a_ring_works_with_send_or_receive_first(ranks, transport, protocol, receive_first):
    options = {"transport": transport, "protocol": protocol}
    assert ranks.run(RANKS, wrong_around_a_ring, receive_first, options) == [[0] * len(SIZES)] * RANKS


def wrong_with_mixed_calls(world: World, options: dict[str, Any]) -> int:
    """Run eager steps on some ranks while others replay, in turns; return the number of wrong bytes."""
    pairs, left, right = ring(world)
    channels = open_channels(world, pairs, 30_001, **options)
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
    assert ranks.run(RANKS, wrong_with_mixed_calls, {"transport": transport, "protocol": protocol}) == [0] * RANKS


def wrong_from_all_to_all(world: World, size: int, slots: int, options: dict[str, Any]) -> int:
    """Send from all ranks to all, themselves included, with all slots full before any receive; twice."""
    size_of_world = range(world.size)
    pairs = tuple((a, b) for a in size_of_world for b in size_of_world)
    channels = open_channels(world, pairs, size, slots=slots, **options)
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
def test_many_channels_and_slots_work_at_once(ranks, transport, protocol):
    options = {"transport": transport, "protocol": protocol}
    assert ranks.run(RANKS, wrong_from_all_to_all, 70_001, 3, options) == [0] * RANKS


def wrong_on_two_streams(world: World, options: dict[str, Any]) -> int:
    """Use two sets of channels between the same ranks on two streams at the same time."""
    wrong = 0
    sets = [open_channels(world, ((0, 1),), 200_000, **options) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in sets]
    messages = torch.zeros(2, 200_000, dtype=torch.uint8, device=world.device)
    for turn in range(4):
        order = (0, 1) if turn % 2 == world.rank else (1, 0)
        for index in order if world.rank < 2 else ():
            channels = sets[index]
            with torch.cuda.stream(streams[index]):
                if world.rank == 0:
                    fill_drawn(messages[index], index, turn)
                    channels.send(1, messages[index])
                else:
                    wrong += wrong_bytes(channels.receive(0), index, turn)
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
    assert ranks.run(2, wrong_on_two_streams, {"transport": transport, "protocol": protocol}) == [0, 0]


def wrong_from_slots(world: World, transport: str) -> int:
    """With get, write messages into the slot, from which they are fetched; return the number of wrong bytes."""
    channels = open_channels(world, ((0, 1),), 5000, transport=transport, protocol="get", slots=2)
    wrong = 0
    for turn in range(5):
        if world.rank == 0:
            channels.synchronise()
            world.barrier("taken")
            buffer = channels.send_buffer(1)
            fill_drawn(buffer, turn)
            channels.send(1, buffer)
        else:
            world.barrier("taken")
            wrong += wrong_bytes(channels.receive(0), turn)
    channels.synchronise()
    channels.close()
    return wrong


@both_transports
def test_get_fetches_a_message_from_its_slot(ranks, transport):
    assert ranks.run(2, wrong_from_slots, transport) == [0, 0]


def error_with_a_dead_peer(world: World, sends: bool, options: dict[str, Any]) -> str:
    channels = open_channels(world, ((0, 1), (1, 0)), 100_000, **options)
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
        errors = started.outcomes(2, error_with_a_dead_peer, sends, options, timeout_s=2.0)
        assert "for rank 1" in str(errors[0])


def aborted_wait(world: World, transport: str) -> str:
    channels = open_channels(world, ((0, 1),), 1000, transport=transport)
    if world.rank == 0:
        world.barrier("stopped")
    else:
        threading.Timer(0.3, world.waiter.abort, ["the test says so"]).start()
        with pytest.raises(Aborted, match="the test says so") as caught:
            channels.receive(0)
            channels.synchronise()
        assert caught.value.peer == 0
        world.waiter.reason = None  # the other rank waits in a barrier
        world.barrier("stopped")
    with contextlib.suppress(Aborted):
        channels.close()
    return "closed"


@both_transports
def test_an_abort_ends_a_wait(ranks, transport):
    assert ranks.run(2, aborted_wait, transport) == ["closed"] * 2


def errors_of_specs(world: World) -> list[str]:
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
    errors = []
    for options in specs:
        with pytest.raises(ConfigError) as caught:
            open_channels(world, ((0, 1),), 16, **options)
        errors.append(str(caught.value))
    channels = open_channels(world, ((0, 1),), 16, transport="auto")
    errors.append(channels.transport)
    channels.close()
    return errors


def test_invalid_specs_are_refused_with_both_values(ranks):
    for errors in ranks.run(2, errors_of_specs):
        assert "tma" in errors[0] and "copy_engine" in errors[0]
        assert "put" in errors[1] and "get" in errors[1]
        assert "int32" in errors[2] and "float32" in errors[2]
        assert "'TMA'" in errors[3] and "'host'" in errors[4]
        assert "takes no number of SMs" in errors[5] and "0 slots" in errors[6]
        assert errors[-1] == "tma"
        assert len(errors) == 8 or "share GPU" in errors[7]
