"""Test `raymoe.Channel` between GPU ranks: every transport, put and get, eager and captured by `torch.cuda.graph`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from raymoe import Channel  # noqa: E402
from raymoe.errors import CaptureError, ConfigError, PeerTimeout  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.docs.test_channel_example import verified_by_the_example  # noqa: E402

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
            marks=pytest.mark.skipif(GPUS < 4, reason=f"NCCL needs a GPU for each of 4 ranks; {GPUS} here"),
        ),
    ],
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[GpuRanks]:
    with GpuRanks(4) as started:
        yield started


def stepper(channel: Channel, message: torch.Tensor, seen: torch.Tensor, release: bool = True) -> Callable[[], None]:
    """Return a step that sends `message` and copies the peer's into `seen`."""

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


def wrong_steps(world: World, peers: list[int | None], protocol: str, transport: str) -> tuple[int, str]:
    """Return how many steps brought a wrong message, and the transport. Each rank mixes eager steps and replays."""
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
def test_both_directions_work_eager_and_replayed(ranks, peers, transport, protocol):
    found = ranks.run(len(peers), wrong_steps, peers, protocol, transport)
    assert [wrong for wrong, _ in found] == [0] * len(peers)
    assert {used for _, used in found} == {"tma" if transport == "auto" else transport}


@both_protocols
@pytest.mark.skipif(GPUS < 2, reason=f"NCCL needs a GPU for each of 2 ranks; {GPUS} here")
def test_two_ranks_send_both_ways_by_nccl(ranks, protocol):
    assert ranks.run(2, wrong_steps, [1, 0], protocol, "collective") == [(0, "collective")] * 2


@pytest.mark.skipif(GPUS < 2, reason=f"needs a GPU for each of 2 ranks; {GPUS} here")
def test_the_example_runs_on_two_gpus():
    assert verified_by_the_example() == ["put by tma on cuda", "get by tma on cuda"]


def replay_after_freeing_the_message(world: World, transport: str) -> bool:
    """Replay a graph whose message has no other reference left; return whether the peer gets it."""
    with Channel(world, 1 - world.rank, 4 * NUMBERS, transport=transport) as channel:
        seen = torch.zeros(NUMBERS, dtype=torch.int32, device=world.device)
        message = torch.full_like(seen, 5 + world.rank)
        graph = captured(stepper(channel, message, seen))
        del message
        fillers = [torch.full_like(seen, -1) for _ in range(8)]
        for _ in range(2):
            graph.replay()
        channel.check()
        found = bool((seen == 6 - world.rank).all()) and len(fillers) == 8
        del graph
        return found


@pytest.mark.parametrize("transport", ["tma", "copy_engine"])
def test_a_graph_keeps_its_message(ranks, transport):
    assert ranks.run(2, replay_after_freeing_the_message, transport) == [True, True]


def wrong_without_release(world: World, protocol: str, transport: str) -> int:
    """Run steps without release, both directions together: the next receive must release the message before."""
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
def test_a_receive_releases_the_previous_message(ranks, transport, protocol):
    assert ranks.run(2, wrong_without_release, protocol, transport) == [0, 0]


def one_way(world: World, transport: str) -> list[float]:
    """Send messages from rank 0 to rank 1 that are overwritten and freed as soon as they are sent."""
    received = []
    with Channel(world, 1 - world.rank, 1 << 20, transport=transport) as channel:
        for number in range(8):
            if world.rank == 0:
                message = torch.full((1 << 18,), float(number), device=world.device)
                channel.send(message)
                message.fill_(-1.0)
                del message
            else:
                got = channel.receive((1 << 18,), torch.float32)
                received += got.unique().tolist()
                channel.release()
        channel.check()
    return received


@pytest.mark.parametrize("transport", ["tma", "copy_engine"])
def test_a_message_may_be_overwritten_after_its_send(ranks, transport):
    assert ranks.run(2, one_way, transport) == [[], [float(number) for number in range(8)]]


def misuse_errors(world: World) -> list[str]:
    """Return the error of each misuse; the channel still works after each."""
    errors = []

    def expect(kind: type[Exception], call: Callable[[], object]) -> None:
        with pytest.raises(kind) as caught:
            call()
        errors.append(str(caught.value))

    channel = Channel(world, 1 - world.rank, 64)
    message = torch.zeros(16, device=world.device)
    expect(ConfigError, lambda: channel.send(torch.zeros(17, device=world.device)))
    expect(ConfigError, lambda: channel.send(torch.zeros(16)))
    expect(ConfigError, lambda: channel.receive((17,), torch.float32))
    channel.send(message)
    channel.receive()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expect(ConfigError, channel.release)
        expect(ConfigError, channel.receive)
        expect(CaptureError, channel.check)
        expect(CaptureError, lambda: Channel(world, 1 - world.rank, 64))
        message.add_(0)
    channel.release()
    seen = torch.ones_like(message)
    message.fill_(7.0)
    stepper(channel, message, seen)()
    channel.check()
    assert seen.tolist() == [7.0] * 16
    channel.close()
    expect(ConfigError, lambda: channel.send(message))
    return errors


def test_misuse_is_refused_and_the_channel_still_works(ranks):
    for errors in ranks.run(2, misuse_errors):
        assert "the message has 68 bytes" in errors[0] and "exactly 64" in errors[0]
        assert "the message is on cpu" in errors[1]
        assert "68 bytes" in errors[2]
        assert all("call release() before the capture begins" in sentence for sentence in errors[3:5])
        assert "after the replay" in errors[5] and "make it before" in errors[6]
        assert "this channel is closed" in errors[7]


def receive_without_a_send(world: World, transport: str) -> str:
    channel = Channel(world, 1 - world.rank, 64, transport=transport)
    error = ""
    if world.rank == 0:
        channel.receive()
        with pytest.raises(PeerTimeout) as caught:
            channel.check()
        error = str(caught.value)
        with pytest.raises(PeerTimeout):
            channel.send(torch.zeros(16, device=world.device))
    channel.close(together=False)
    return error


@pytest.mark.parametrize("transport", ["tma", "copy_engine"])
def test_a_peer_that_does_not_send_is_named(ranks, transport):
    error, _ = ranks.run(2, receive_without_a_send, transport, timeout_s=2.0)
    assert "for rank 1 in receive" in error
