"""`raymoe.Channel` between GPU ranks: every transport, put and get, eager and captured by `torch.cuda.graph`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from raymoe import Channel  # noqa: E402
from raymoe.errors import CaptureError, ConfigError, PeerTimeout  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.test_channel_example import verified_by_the_example  # noqa: E402

pytestmark = NEEDS_GPU

NUMBERS, STEPS = 50_003, 6
both_protocols = pytest.mark.parametrize("protocol", ["put", "get"])
every_transport = pytest.mark.parametrize(
    "transport",
    [
        "auto",
        "tma",
        "copy_engine",
        pytest.param(
            "collective",
            marks=pytest.mark.skipif(GPUS < 4, reason=f"NCCL wants a GPU a rank: 4, and there are {GPUS}"),
        ),
    ],
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[GpuRanks]:
    with GpuRanks(4) as started:
        yield started


def stepper(channel: Channel, message: torch.Tensor, seen: torch.Tensor, release: bool = True) -> Callable[[], None]:
    """A step that sends `message` and brings the peer's into `seen`."""

    def step() -> None:
        with channel.together():
            received = channel.receive(message.shape, message.dtype)
            channel.send(message)
        seen.copy_(received)
        if release:
            channel.release()

    return step


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def talk(world: World, peers: list[int | None], protocol: str, transport: str) -> tuple[int, str]:
    """How many steps brought something wrong, eager and replayed by turns that differ from rank to rank."""
    peer = peers[world.rank]
    wrong = 0
    with Channel(world, peer, 4 * NUMBERS, protocol, transport) as channel:
        if peer is not None:
            message = torch.zeros(NUMBERS, dtype=torch.int32, device=world.device)
            seen = torch.zeros_like(message)
            step = stepper(channel, message, seen)
            step()
            graph = captured(step)
            for number in range(STEPS):
                message.copy_(torch.arange(NUMBERS, device=world.device) + 1000 * world.rank + number)
                step() if (number + world.rank) % 3 == 0 else graph.replay()
                expected = torch.arange(NUMBERS, dtype=torch.int32, device=world.device) + 1000 * peer + number
                channel.check()
                wrong += not torch.equal(seen, expected)
            del graph
        channel.check()
        return wrong, channel.transport


@both_protocols
@every_transport
@pytest.mark.parametrize("peers", [[1, 0], [2, 3, 0, 1], [3, None, None, 0]], ids=str)
def test_both_directions_eager_and_replayed(ranks, peers, transport, protocol):
    found = ranks.run(len(peers), talk, peers, protocol, transport)
    assert [wrong for wrong, _ in found] == [0] * len(peers)
    assert {used for _, used in found} == {"tma" if transport == "auto" else transport}


@both_protocols
@pytest.mark.skipif(GPUS < 2, reason=f"NCCL wants a GPU a rank: 2, and there are {GPUS}")
def test_two_ranks_by_nccl(ranks, protocol):
    assert ranks.run(2, talk, [1, 0], protocol, "collective") == [(0, "collective")] * 2


@pytest.mark.skipif(GPUS < 2, reason=f"a rank takes a GPU of its own: 2, and there are {GPUS}")
def test_the_example_runs_on_two_gpus():
    assert verified_by_the_example() == ["put by tma on cuda", "get by tma on cuda"]


def freed(world: World, transport: str) -> bool:
    """A replay sends a message that nobody but the graph refers to any more."""
    with Channel(world, 1 - world.rank, 4 * NUMBERS, transport=transport) as channel:
        seen = torch.zeros(NUMBERS, dtype=torch.int32, device=world.device)
        message = torch.full_like(seen, 5 + world.rank)
        graph = captured(stepper(channel, message, seen))
        del message
        others = [torch.full_like(seen, -1) for _ in range(8)]
        for _ in range(2):
            graph.replay()
        channel.check()
        found = bool((seen == 6 - world.rank).all()) and len(others) == 8
        del graph
        return found


@pytest.mark.parametrize("transport", ["tma", "copy_engine"])
def test_the_message_of_a_graph_is_kept(ranks, transport):
    assert ranks.run(2, freed, transport) == [True, True]


def without_release(world: World, protocol: str, transport: str) -> int:
    """The next receive releases the message before, where both directions are asked for together."""
    wrong = 0
    with Channel(world, 1 - world.rank, 4 * NUMBERS, protocol, transport) as channel:
        message = torch.zeros(NUMBERS, dtype=torch.int32, device=world.device)
        seen = torch.zeros_like(message)
        step = stepper(channel, message, seen, release=False)
        for number in range(STEPS):
            message.fill_(10 * number + world.rank)
            step()
            channel.check()
            wrong += not bool((seen == 10 * number + 1 - world.rank).all())
    return wrong


@both_protocols
@pytest.mark.parametrize("transport", ["tma", "copy_engine"])
def test_a_receive_releases_the_message_before(ranks, transport, protocol):
    assert ranks.run(2, without_release, protocol, transport) == [0, 0]


def one_way(world: World, transport: str) -> list[float]:
    """Messages that are freed and overwritten as soon as they are sent; from rank 0 to rank 1."""
    heard = []
    with Channel(world, 1 - world.rank, 1 << 20, transport=transport) as channel:
        for number in range(8):
            if world.rank == 0:
                message = torch.full((1 << 18,), float(number), device=world.device)
                channel.send(message)
                message.fill_(-1.0)
                del message
            else:
                got = channel.receive((1 << 18,), torch.float32)
                heard += got.unique().tolist()
                channel.release()
        channel.check()
    return heard


@pytest.mark.parametrize("transport", ["tma", "copy_engine"])
def test_a_message_may_be_overwritten_after_its_send(ranks, transport):
    assert ranks.run(2, one_way, transport) == [[], [float(number) for number in range(8)]]


def refused(world: World) -> list[str]:
    """What is said to misuse; the channel goes on after each."""
    said = []

    def note(kind: type[Exception], call: Callable[[], object]) -> None:
        with pytest.raises(kind) as caught:
            call()
        said.append(str(caught.value))

    channel = Channel(world, 1 - world.rank, 64)
    message = torch.zeros(16, device=world.device)
    note(ConfigError, lambda: channel.send(torch.zeros(17, device=world.device)))
    note(ConfigError, lambda: channel.send(torch.zeros(16)))
    note(ConfigError, lambda: channel.receive((17,), torch.float32))
    channel.send(message)
    channel.receive()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        note(ConfigError, channel.release)
        note(ConfigError, channel.receive)
        note(CaptureError, channel.check)
        note(CaptureError, lambda: Channel(world, 1 - world.rank, 64))
        message.add_(0)
    channel.release()
    seen = torch.ones_like(message)
    message.fill_(7.0)
    stepper(channel, message, seen)()
    channel.check()
    assert seen.tolist() == [7.0] * 16
    channel.close()
    note(ConfigError, lambda: channel.send(message))
    return said


def test_misuse_is_told_and_the_channel_goes_on(ranks):
    for said in ranks.run(2, refused):
        assert "the message has 68 bytes" in said[0] and "exactly 64" in said[0]
        assert "the message is on cpu" in said[1]
        assert "68 bytes" in said[2]
        assert all("call release() before the capture begins" in sentence for sentence in said[3:5])
        assert "after the replay" in said[5] and "make it before" in said[6]
        assert "this channel is closed" in said[7]


def unanswered(world: World, transport: str) -> str:
    channel = Channel(world, 1 - world.rank, 64, transport=transport)
    said = ""
    if world.rank == 0:
        channel.receive()
        with pytest.raises(PeerTimeout) as caught:
            channel.check()
        said = str(caught.value)
        with pytest.raises(PeerTimeout):
            channel.send(torch.zeros(16, device=world.device))
    channel.close(together=False)
    return said


@pytest.mark.parametrize("transport", ["tma", "copy_engine"])
def test_a_peer_that_does_not_send_is_named(ranks, transport):
    said, _ = ranks.run(2, unanswered, transport, timeout_s=2.0)
    assert "for rank 1 in receive" in said
