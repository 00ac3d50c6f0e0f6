"""Several messages of a channel under way, and asking for things together, between CPU ranks."""

from __future__ import annotations

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.memory.world import World
from raymoe.transport.channels import Channels, ChannelSpec
from tests.unit.worlds import close, each, wired


@pytest.fixture
def three():
    worlds = wired(3, timeout_s=5.0)
    yield worlds
    close(worlds)


def message(*key: int) -> torch.Tensor:
    return torch.tensor([*key, 7], dtype=torch.int32)


def ahead(world: World, protocol: str) -> list[list[int]]:
    """Two messages are sent before any is received; they come in order, and stay while their slots are held."""
    right, left = (world.rank + 1) % 3, (world.rank - 1) % 3
    spec = ChannelSpec(((0, 1), (1, 2), (2, 0)), (2,), "int32", protocol, slots=2)
    channels = Channels(world, spec)
    heard = []
    for turn in range(3):
        for part in range(2):
            channels.send(right, message(10 * turn + part))
        got = [channels.receive(left) for _ in range(2)]
        heard.append([int(each[0]) for each in got])
        for _ in range(2):
            channels.release(left)
    channels.close()
    return heard


@pytest.mark.parametrize("protocol", ["put", "get"])
def test_as_many_messages_are_under_way_as_there_are_slots(three: list[World], protocol: str) -> None:
    assert each(three, lambda world: ahead(world, protocol)) == [[[0, 1], [10, 11], [20, 21]]] * 3


def receive_first(world: World, protocol: str) -> list[int]:
    right, left = (world.rank + 1) % 3, (world.rank - 1) % 3
    channels = Channels(world, ChannelSpec(((0, 1), (1, 2), (2, 0)), (2,), "int32", protocol))
    heard = []
    for turn in range(4):
        with channels.together():
            got = channels.receive(left)
            channels.send(right, message(10 * world.rank + turn))
        heard.append(int(got[0]) - 10 * left)
    channels.close()
    return heard


@pytest.mark.parametrize("protocol", ["put", "get"])
def test_a_ring_whose_ranks_ask_for_their_receives_first(three: list[World], protocol: str) -> None:
    assert each(three, lambda world: receive_first(world, protocol)) == [[0, 1, 2, 3]] * 3


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


def test_two_messages_together_need_two_slots(three: list[World]) -> None:
    assert "together in one slot; a channel carries as many at a time as it has slots, here 1" in str(
        each(three, two_in_one_slot)[0]
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
        assert int(channels.receive(0)[0]) == 3  # nothing of the batch has happened
    channels.close()
    return said


def test_a_release_does_not_go_together_with_its_receive(three: list[World]) -> None:
    assert "so release it after that" in each(three, early_release)[1]


def test_a_message_that_is_not_contiguous_is_refused(three: list[World]) -> None:
    def try_it(world: World) -> str:
        channels = Channels(world, ChannelSpec(((0, 1),), (2,), "int32"))
        said = ""
        if world.rank == 0:
            with pytest.raises(ConfigError) as caught:
                channels.send(1, torch.zeros(4, dtype=torch.int32)[::2])
            said = str(caught.value)
        channels.close()
        return said

    assert "it must be contiguous" in each(three, try_it)[0]
