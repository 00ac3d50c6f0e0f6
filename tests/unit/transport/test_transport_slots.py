"""Several outstanding messages of a channel, and batches by `together`, between CPU ranks."""

from __future__ import annotations

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.memory.world import World
from raymoe.transport.channels import Channels, ChannelSpec
from tests.unit.worlds import close, each, wired


@pytest.fixture
def three_worlds():
    worlds = wired(3, timeout_s=5.0)
    yield worlds
    close(worlds)


def message(*key: int) -> torch.Tensor:
    return torch.tensor([*key, 7], dtype=torch.int32)


def send_ahead(world: World, protocol: str) -> list[list[int]]:
    """Send two messages before receiving any; hold both slots while reading them; return what arrived."""
    right, left = (world.rank + 1) % 3, (world.rank - 1) % 3
    spec = ChannelSpec(((0, 1), (1, 2), (2, 0)), (2,), "int32", protocol, slots=2)
    channels = Channels(world, spec)
    received = []
    for turn in range(3):
        for part in range(2):
            channels.send(right, message(10 * turn + part))
        got = [channels.receive(left) for _ in range(2)]
        received.append([int(row[0]) for row in got])
        for _ in range(2):
            channels.release(left)
    channels.close()
    return received


@pytest.mark.parametrize("protocol", ["put", "get"])
def test_a_channel_carries_as_many_messages_as_it_has_slots(three_worlds: list[World], protocol: str) -> None:
    assert each(three_worlds, lambda world: send_ahead(world, protocol)) == [[[0, 1], [10, 11], [20, 21]]] * 3


def receive_first(world: World, protocol: str) -> list[int]:
    right, left = (world.rank + 1) % 3, (world.rank - 1) % 3
    channels = Channels(world, ChannelSpec(((0, 1), (1, 2), (2, 0)), (2,), "int32", protocol))
    received = []
    for turn in range(4):
        with channels.together():
            got = channels.receive(left)
            channels.send(right, message(10 * world.rank + turn))
        received.append(int(got[0]) - 10 * left)
    channels.close()
    return received


@pytest.mark.parametrize("protocol", ["put", "get"])
def test_a_ring_that_receives_first_does_not_block(three_worlds: list[World], protocol: str) -> None:
    assert each(three_worlds, lambda world: receive_first(world, protocol)) == [[0, 1, 2, 3]] * 3


def two_in_one_slot(world: World) -> str:
    channels = Channels(world, ChannelSpec(((0, 1),), (2,), "int32"))
    said = ""
    if world.rank == 0:
        with pytest.raises(ConfigError) as caught, channels.together():
            channels.send(1, message(1))
            channels.send(1, message(2))
        said = str(caught.value)
    channels.close()
    return said


def test_two_messages_together_need_two_slots(three_worlds: list[World]) -> None:
    assert "together in one slot; a channel carries as many at a time as it has slots, here 1" in str(
        each(three_worlds, two_in_one_slot)[0]
    )


def early_release(world: World) -> str:
    channels = Channels(world, ChannelSpec(((0, 1),), (2,), "int32"))
    said = ""
    if world.rank == 0:
        channels.send(1, message(3))
    elif world.rank == 1:
        with pytest.raises(ConfigError) as caught, channels.together():
            channels.receive(0)
            channels.release(0)
        said = str(caught.value)
        assert int(channels.receive(0)[0]) == 3  # nothing of the refused batch was executed
    channels.close()
    return said


def test_a_release_together_with_its_receive_is_refused(three_worlds: list[World]) -> None:
    assert "so release it after that" in each(three_worlds, early_release)[1]


def test_a_message_that_is_not_contiguous_is_refused(three_worlds: list[World]) -> None:
    def try_it(world: World) -> str:
        channels = Channels(world, ChannelSpec(((0, 1),), (2,), "int32"))
        said = ""
        if world.rank == 0:
            with pytest.raises(ConfigError) as caught:
                channels.send(1, torch.zeros(4, dtype=torch.int32)[::2])
            said = str(caught.value)
        channels.close()
        return said

    assert "it must be contiguous" in each(three_worlds, try_it)[0]
