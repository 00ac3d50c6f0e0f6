"""`raymoe.Channel` between CPU ranks: messages arrive complete and in order; each misuse raises one sentence."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from raymoe import errors
from raymoe.memory.world import World
from raymoe.transport import channel as channel_module
from raymoe.transport.channel import Channel
from tests.unit.ranks import RankPool
from tests.unit.worlds import close, each, wired

STEPS, NBYTES = 5, 4096
both_protocols = pytest.mark.parametrize("protocol", ["put", "get"])


def message_of(rank: int, step: int) -> torch.Tensor:
    """Return a message that no other rank sends in any step."""
    return torch.arange(NBYTES // 4, dtype=torch.float32).view(32, -1) + 100_000 * rank + 2000 * step


def wrong_steps(channel: Channel, how: str) -> list[int]:
    """Send a message in both directions in each step; return the steps in which a wrong message arrived."""
    wrong = []
    for step in range(STEPS):
        own = message_of(channel.world.rank, step)
        if how == "one by one":
            channel.send(own)
            theirs = channel.receive(own.shape, own.dtype)
        else:
            with channel.together():
                theirs = channel.receive(own.shape, own.dtype)
                channel.send(own)
        assert channel.peer is not None
        if not torch.equal(theirs, message_of(channel.peer, step)):
            wrong.append(step)
        if how != "together, without release":
            channel.release()
    channel.check()
    return wrong


def run_channel(world: World, peers: list[int | None], protocol: str, how: str) -> list[int] | None:
    with Channel(world, peers[world.rank], NBYTES, protocol) as channel:
        assert (channel.transport, channel.nbytes, channel.protocol) == ("host", NBYTES, protocol)
        return None if channel.peer is None else wrong_steps(channel, how)


@both_protocols
@pytest.mark.parametrize("how", ["one by one", "together", "together, without release"])
@pytest.mark.parametrize("peers", [[1, 0], [3, None, None, 0], [2, 3, 0, 1]], ids=str)
def test_messages_arrive_unchanged_in_both_directions(
    pool: RankPool, protocol: str, how: str, peers: list[int | None]
) -> None:
    results = pool.run(len(peers), run_channel, peers, protocol, how)
    assert results == [None if peer is None else [] for peer in peers]


def run_channel_in_a_group(world: World) -> list[int] | None:
    group = world.group((2, 0))
    if group is None:
        return None
    with Channel(group, 1 - group.rank, NBYTES) as channel:
        return wrong_steps(channel, "together")


def test_a_channel_works_in_a_group_of_ranks(pool: RankPool) -> None:
    assert pool.run(3, run_channel_in_a_group) == [[], None, []]


@pytest.fixture
def two_worlds() -> Iterator[list[World]]:
    worlds = wired(2, timeout_s=0.4)
    yield worlds
    close(worlds)


def receive_as_other_types(world: World) -> list[Any]:
    """Send messages of one dtype and shape, receive them as another; return the received values."""
    seen: list[Any] = []
    with torch.inference_mode():
        other = Channel(world, 1 - world.rank, 8)
    with other as channel:
        messages = [torch.tensor(-2.0, dtype=torch.float64), torch.tensor([[1], [2]], dtype=torch.int32)]
        messages += [torch.ones(2, 4, dtype=torch.bool), torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)]
        views: list[tuple[Any, ...]] = [((), torch.float64), (None, torch.int32), (None,), ((2, 2), torch.float16)]
        for message, view in zip(messages, views, strict=True):
            channel.send(message)
            seen.append(channel.receive(*view[:1], **({"dtype": view[1]} if view[1:] else {})).tolist())
            channel.release()
    with Channel(world, 1 - world.rank, 0) as signal:
        signal.send(torch.empty(0, 3))
        seen.append(signal.receive().tolist())
    return seen


def test_a_message_can_be_received_as_any_dtype_and_shape_of_its_size(two_worlds: list[World]) -> None:
    assert each(two_worlds, receive_as_other_types) == [[-2.0, [1, 2], [1] * 8, [[0.0, 0.0], [0.0, 0.0]], []]] * 2


def send_without_release(world: World) -> str | None:
    channel = Channel(world, 1 - world.rank, 8)
    message = torch.zeros(8, dtype=torch.uint8)
    if world.rank == 1:
        channel.receive()
        world.swap(None, "test: received")
        return None
    channel.send(message)
    world.swap(None, "test: received")
    with pytest.raises(errors.PeerTimeout) as caught:
        channel.send(message)
    for call in (lambda: channel.send(message), channel.receive, channel.release, channel.check):
        with pytest.raises(errors.PeerTimeout) as again:
            call()
        assert str(again.value) == str(caught.value)
    return str(caught.value)


def test_a_send_without_a_release_times_out_and_fails_the_channel(two_worlds: list[World]) -> None:
    said, _ = each(two_worlds, send_without_release)
    assert re.search(r"rank 0 waited 0\.\d s for rank 1 in send", said), said  # 0.4 s, or more under load


Asked = Callable[[World], Channel]
IMPOSSIBLE: dict[str, tuple[Asked, str]] = {
    "itself": (lambda world: Channel(world, 0, 8), "rank 0 names rank 0 as its peer in a world of 3"),
    "out of range": (lambda world: Channel(world, 3, 8), "rank 0 names rank 3 as its peer in a world of 3"),
    "negative": (lambda world: Channel(world, -1, 8), "rank 0 names rank -1"),
    "a ring": (lambda w: Channel(w, (w.rank + 1) % 3, 8), "rank 0 names rank 1 as its peer and rank 1 names rank 2"),
    "one-sided": (
        lambda world: Channel(world, (1, None, None)[world.rank], 8),
        "rank 0 names rank 1 as its peer and rank 1 names none; both ends must name one another",
    ),
    "nobody": (lambda world: Channel(world, None, 8), "no rank names a peer"),
    "two sizes": (lambda world: Channel(world, (1, 0, None)[world.rank], 8 * (world.rank + 1)), "nbytes is"),
    "two protocols": (lambda w: Channel(w, (1, 0, None)[w.rank], 8, ("put", "get", "put")[w.rank]), "protocol is"),
    "no protocol": (lambda world: Channel(world, (1, 0, None)[world.rank], 8, "push"), "it is one of put, get"),
    "no transport": (
        lambda world: Channel(world, (1, 0, None)[world.rank], 8, transport="tma"),
        "transport is 'tma'; between cpu ranks it is one of auto, host",
    ),
    "a name": (lambda world: Channel(world, "1", 8), "peer is '1'"),
    "bytes that are no number": (lambda world: Channel(world, None, 8.0), "nbytes is 8.0"),
    "negative bytes": (lambda world: Channel(world, None, -1), "nbytes is -1"),
    "a protocol that is no name": (lambda world: Channel(world, None, 8, lambda: None), "names are needed"),
    "one rank alone": (lambda w: Channel(w, (1, 0, None)[w.rank], (8, 8, None)[w.rank]), "nbytes is None"),
}


def test_impossible_channels_are_refused_on_all_ranks() -> None:
    worlds = wired(3, timeout_s=5.0)
    for what, (ask, says) in IMPOSSIBLE.items():
        for outcome in each(worlds, ask):
            assert isinstance(outcome, errors.ConfigError), (what, outcome)
            assert says in str(outcome), what
    channels = each(worlds, lambda world: Channel(world, (1, 0, None)[world.rank], 8))
    assert [type(channel) for channel in channels] == [Channel] * 3, "the worlds must still work"
    with pytest.raises(errors.ConfigError, match="rank 2, which named no peer"):
        channels[2].send(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(errors.ConfigError, match="rank 2, which named no peer"):
        channels[2].receive()
    channels[2].check()
    close(worlds)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(8, dtype=torch.uint8)


def freed() -> torch.Tensor:
    message = torch.zeros(2)
    message.untyped_storage().resize_(0)
    return message


def send_inside_vmap(channel: Channel) -> None:
    def send(message: torch.Tensor) -> torch.Tensor:
        channel.send(message)
        return message

    torch.vmap(send)(torch.zeros(3, 2))


MESSAGES: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: [0] * 8, "the message is a list; a tensor is needed"),
    "another size": (
        lambda: torch.zeros(3, 3, dtype=torch.int16),
        r"the message has 18 bytes \(torch.int16 \[3, 3\]\); this channel was made for messages of exactly 8",
    ),
    "no memory": (lambda: torch.zeros(2, device="meta"), "the message is on meta; this world's ranks are on cpu"),
    "strides": (lambda: torch.zeros(2, 4, dtype=torch.uint8).T, r"strides \(1, 4\); it must be contiguous"),
    "fake": (fake, "a FakeTensor without memory of its own"),
    "freed": (freed, "without memory of its own"),
    "sparse": (lambda: torch.ones(2).to_sparse(), "without memory of its own"),
    "negative view": (lambda: torch._neg_view(torch.ones(2)), "a lazy negative"),
    "conjugate": (lambda: torch.ones(1, dtype=torch.complex64).conj(), "conjugate; call .resolve_neg"),
}


def make_every_mistake(world: World) -> list[str]:
    """Make every mistake, with a good message after each; return the errors."""
    channel = Channel(world, 1 - world.rank, 8)
    calls: list[Callable[[], object]] = [lambda make=make: channel.send(make()) for make, _ in MESSAGES.values()]
    calls += [
        lambda: send_inside_vmap(channel),
        lambda: channel.receive((3,)),
        lambda: channel.receive((-2, -4)),
        lambda: channel.receive(8),
        lambda: channel.receive((2,), "float32"),
        lambda: channel.receive(dtype=torch.complex128),
    ]
    said = []
    for call in calls:
        with pytest.raises(errors.ConfigError) as caught:
            call()
        said.append(str(caught.value))
        channel.send(torch.full((8,), world.rank, dtype=torch.uint8))
        assert channel.receive().tolist() == [1 - world.rank] * 8
        channel.release()
    channel.close()
    channel.close()
    for call in (channel.check, channel.receive, channel.release, lambda: channel.send(torch.zeros(2))):
        with pytest.raises(errors.ConfigError, match=r"this channel is closed; make a new one"):
            call()
    with pytest.raises(errors.ConfigError, match="this channel is closed"), channel.together():
        pass
    return said


def test_misuse_raises_config_error_and_the_channel_still_works(two_worlds: list[World]) -> None:
    wanted = [says for _, says in MESSAGES.values()]
    wanted += [
        "without memory of its own",
        r"received as torch.uint8 \[3\], 3 bytes; this channel was made for messages of exactly 8",
        r"shape \[-2, -4\]; whole numbers of at least 0",
        r"a message of shape 8; a sequence of whole numbers is needed, for example \(8,\)",
        "dtype is 'float32'; a torch.dtype is needed",
        r"torch.complex128 \[0\], 0 bytes",
    ]
    for said in each(two_worlds, make_every_mistake):
        for sentence, want in zip(said, wanted, strict=True):
            assert re.search(want, sentence), (sentence, want)


def raise_inside_together(world: World) -> list[int]:
    message = torch.full((8,), 7, dtype=torch.uint8)
    with Channel(world, 1 - world.rank, 8) as channel:
        with pytest.raises(ZeroDivisionError), channel.together():
            channel.send(message)
            channel.receive()
            _ = 1 // 0
        message.fill_(world.rank)
        with channel.together():
            channel.send(message)
            got = channel.receive()
        return got.tolist()


def test_an_exception_in_together_cancels_its_send_and_receive(two_worlds: list[World]) -> None:
    assert each(two_worlds, raise_inside_together) == [[1] * 8, [0] * 8]


def send_back_what_arrived(world: World, protocol: str) -> list[list[int]]:
    """Send back what was received, twice; return what arrived."""
    seen = []
    with Channel(world, 1 - world.rank, 8, protocol) as channel:
        with channel.together():
            channel.send(torch.full((8,), world.rank, dtype=torch.uint8))
            theirs = channel.receive()
        says = r"the memory of received messages.*call \.clone\(\)"
        with pytest.raises(errors.ConfigError, match=says), channel.together():
            channel.send(theirs)
            channel.receive()
        for _ in range(2):
            with channel.together():
                channel.send(theirs.clone())
                theirs = channel.receive()
            seen.append(theirs.tolist())
    return seen


@both_protocols
def test_together_sends_a_clone_of_a_received_message_but_not_the_message(
    two_worlds: list[World], protocol: str
) -> None:
    messages = [[rank] * 8 for rank in range(2)]
    assert each(two_worlds, lambda world: send_back_what_arrived(world, protocol)) == [
        [messages[0], messages[1]],
        [messages[1], messages[0]],
    ]


def test_a_world_closes_its_channels() -> None:
    worlds = wired(2)
    channels = each(worlds, lambda world: [Channel(world, 1 - world.rank, 8) for _ in range(3)])
    channels[0][1].close()
    channels[1][1].close()
    close(worlds)
    for channel in channels[0] + channels[1]:
        with pytest.raises(errors.ConfigError, match="this channel is closed; make a new one"):
            channel.send(torch.zeros(8, dtype=torch.uint8))
        channel.close()


def test_a_dropped_channel_is_freed_with_a_warning(two_worlds: list[World]) -> None:
    def drop(world: World) -> weakref.ref[Channel]:
        return weakref.ref(Channel(world, 1 - world.rank, 8))

    with pytest.warns(ResourceWarning, match=r"channels by host of rank"):
        assert [dropped() for dropped in each(two_worlds, drop)] == [None, None]


def test_an_exception_inside_the_with_block_is_raised_unchanged(two_worlds: list[World]) -> None:
    def fails(world: World) -> None:
        with Channel(world, 1 - world.rank, 8):
            raise ZeroDivisionError

    assert [type(outcome) for outcome in each(two_worlds, fails)] == [ZeroDivisionError] * 2


def call_in_captures(world: World, in_capture: list[bool]) -> list[str]:
    """Call inside and outside captures, which `in_capture` simulates; return the errors."""
    said = []

    def refused(kind: type[errors.RaymoeError], call: Callable[[], object]) -> None:
        with pytest.raises(kind) as caught:
            call()
        said.append(str(caught.value))

    channel = Channel(world, 1 - world.rank, 8)
    message = torch.zeros(8, dtype=torch.uint8)
    world.swap(None, "test: made")
    in_capture[0] = True
    refused(errors.CaptureError, lambda: Channel(world, 1 - world.rank, 8))
    refused(errors.CaptureError, channel.check)
    channel.send(message)
    assert len(channel._captured_messages) == 1, "the message must live on for replays"
    channel.receive()
    world.swap(None, "test: received in a capture")
    in_capture[0] = False
    refused(errors.ConfigError, channel.release)
    refused(errors.ConfigError, channel.receive)
    world.swap(None, "test: refused")
    in_capture[0] = True
    channel.release()
    world.swap(None, "test: released")
    in_capture[0] = False
    channel.send(message)
    channel.receive()
    world.swap(None, "test: received")
    in_capture[0] = True
    refused(errors.ConfigError, channel.release)
    refused(errors.ConfigError, channel.receive)
    world.swap(None, "test: refused again")
    in_capture[0] = False
    channel.release()
    channel.close()
    return said


def test_a_capture_releases_only_messages_that_it_received(
    two_worlds: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_capture = [False]
    monkeypatch.setattr(channel_module, "capturing", lambda _: in_capture[0])
    for said in each(two_worlds, lambda world: call_in_captures(world, in_capture)):
        assert "inside a capture; make it before" in said[0] and "call it after the replay" in said[1]
        assert all("outside a capture" in sentence and "capture its release()" in sentence for sentence in said[2:4])
        assert all("call release() before the capture begins" in sentence for sentence in said[4:])
