"""Messages between ranks: put and get, to the rank itself, all to all; and the errors."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from raymoe.errors import ConfigError, PeerTimeout
from raymoe.memory.world import World
from raymoe.transport.channels import Channels, ChannelSpec
from tests.unit.ranks import RankPool
from tests.unit.worlds import close, each, wired

MESSAGES = 7


def send_and_receive(world: World, spec: ChannelSpec) -> dict[int, list[list[int]]]:
    """Send MESSAGES distinct messages on each channel of this rank; return the messages received from each source."""
    channels = Channels(world, spec)
    messages: dict[int, list[list[int]]] = {}
    for step in range(MESSAGES):
        for source, destination in spec.pairs:
            if source == world.rank:
                message = torch.full(spec.shape, 50 * source + 10 * destination + step, dtype=torch.uint8)
                channels.send(destination, message)
        for source, destination in spec.pairs:
            if destination == world.rank:
                got = channels.receive(source)
                messages.setdefault(source, []).append(sorted(set(got.flatten().tolist())))
                channels.release(source)
    assert channels.nbytes == torch.Size(spec.shape).numel()
    channels.close()
    return messages


@pytest.mark.parametrize("protocol", ["put", "get"])
@pytest.mark.parametrize(
    ("size", "pairs"),
    [
        (1, ((0, 0),)),
        (2, ((0, 1),)),
        (3, ((0, 1), (1, 2), (2, 0), (1, 1))),
        (4, tuple((a, b) for a in range(4) for b in range(4) if a != b)),
    ],
)
def test_messages_arrive_complete_and_in_order(pool: RankPool, protocol: str, size: int, pairs: tuple) -> None:
    spec = ChannelSpec(pairs, shape=(33, 1000), protocol=protocol)
    messages = pool.run(size, send_and_receive, spec)
    for source, destination in pairs:
        want = [[50 * source + 10 * destination + step] for step in range(MESSAGES)]
        assert messages[destination][source] == want


@pytest.fixture
def two_worlds():
    worlds = wired(2, timeout_s=0.4)
    yield worlds
    close(worlds)


def test_different_specs_at_the_two_ends_are_refused(two_worlds: list[World]) -> None:
    specs = [ChannelSpec(((0, 1),), shape=(16,)), ChannelSpec(((0, 1),), shape=(32,))]
    for outcome in each(two_worlds, lambda world: Channels(world, specs[world.rank])):
        assert isinstance(outcome, ConfigError)
        assert "(32,)" in str(outcome)
        assert "(16,)" in str(outcome)
    kinds = [ChannelSpec(((0, 1),), (16,), "int32"), ChannelSpec(((0, 1),), (16,), "float32")]
    for outcome in each(two_worlds, lambda world: Channels(world, kinds[world.rank])):
        assert "int32" in str(outcome)
        assert "float32" in str(outcome)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (ChannelSpec(((0, 2),), (4,)), "from rank 0 to rank 2 in a world of 2"),
        (ChannelSpec(((0, 1), (0, 1)), (4,)), "each pair is named once"),
        (ChannelSpec((), (4,)), "at least one"),
        (ChannelSpec(((0, 1),), (4,), protocol="push"), "protocol is 'push'; it is one of put, get"),
    ],
)
def test_impossible_channel_specs_are_refused(two_worlds: list[World], spec: ChannelSpec, says: str) -> None:
    for outcome in each(two_worlds, lambda world: Channels(world, spec)):
        assert isinstance(outcome, ConfigError)
        assert says in str(outcome)


def make_every_mistake(world: World) -> list[str]:
    channels = Channels(world, ChannelSpec(((0, 1),), shape=(8,)))
    said = []
    attempts = [lambda: channels.send(0, torch.zeros(8)), lambda: channels.receive(5)]
    if world.rank == 0:
        attempts.append(lambda: channels.send(1, torch.zeros(9, dtype=torch.uint8)))
        attempts.append(lambda: channels.send(1, torch.zeros(8)))
    for attempt in attempts:
        with pytest.raises(ConfigError) as caught:
            attempt()
        said.append(str(caught.value))
    return said


def test_misuse_raises_config_error(two_worlds: list[World]) -> None:
    first, second = each(two_worlds, make_every_mistake)
    assert "no channel from rank 0 to rank 0" in first[0]
    assert "torch.uint8 [9] to be copied into torch.uint8 [8]" in first[2]
    assert "torch.float32 [8] to be copied into torch.uint8 [8]" in first[3]
    assert "no channel from rank 5 to rank 1" in second[1]


def wait_for_a_silent_peer(world: World) -> str:
    channels = Channels(world, ChannelSpec(((0, 1), (1, 0)), shape=(8,)))
    said = ""
    if world.rank == 0:
        with pytest.raises(PeerTimeout, match=r"rank 0 waited .* for rank 1 in receive") as caught:
            channels.receive(1)
        with pytest.raises(PeerTimeout) as again:
            channels.send(1, torch.zeros(8, dtype=torch.uint8))
        assert again.value is caught.value
        said = str(caught.value)
    return said


def test_a_silent_peer_is_named_and_later_calls_raise_the_same_error(two_worlds: list[World]) -> None:
    said, _ = each(two_worlds, wait_for_a_silent_peer)
    assert "expected 1, seen 0" in said


def mapped_regions() -> int:
    return sum("memfd:raymoe-test-channels" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_dropped_channels_are_unmapped_at_once_with_a_warning(two_worlds: list[World]) -> None:
    def drop(world: World) -> None:
        channels = Channels(world, ChannelSpec(((0, 1), (1, 0)), shape=(8,)))
        channels.send(1 - world.rank, torch.full((8,), world.rank, dtype=torch.uint8))
        assert channels.receive(1 - world.rank).eq(1 - world.rank).all()

    gc.collect()  # errors in earlier tests may still hold channels
    gc.disable()
    try:
        with pytest.warns(ResourceWarning, match=r"channels by host of rank"):
            assert each(two_worlds, drop) == [None, None]
        assert mapped_regions() == 0
    finally:
        gc.enable()


def test_channels_of_a_closed_world_refuse_to_send() -> None:
    [world] = wired(1)
    channels = Channels(world, ChannelSpec(((0, 0),), shape=(8,)))
    close([world])
    with pytest.raises(ConfigError, match="the world of these channels is closed"):
        channels.send(0, torch.zeros(8, dtype=torch.uint8))
    channels.close()
