"""The copy kernel: every byte, nothing but those bytes, and the words that go with them."""

import pytest

torch = pytest.importorskip("torch")

from raymoe.device.copy import CopyParams, copy_launch  # noqa: E402
from raymoe.device.graph import Graph  # noqa: E402
from raymoe.device.ring import Ring  # noqa: E402
from raymoe.job.errors import ConfigError  # noqa: E402
from tests.gpu.copies import Words  # noqa: E402

pytestmark = pytest.mark.gpu

SMALL = Ring(stages=4, stage_bytes=256)
GUARD = 64
SIZES = [0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 61, 62, 63, 64, 255, 256, 257, 511, 513, 4096, 5003]
RINGS = [
    Ring(1, 16),
    Ring(1, 1024),
    Ring(2, 64),
    Ring(3, 4096),
    Ring(12, 16384),
    Ring(13, 16),
    Ring(24, 512),
    Ring(40, 5120),
]


class Arena:
    """A source of random bytes and a destination, each at any offset of a buffer with room before and after."""

    def __init__(self, nbytes: int) -> None:
        self.source = torch.randint(0, 256, (nbytes + 2 * GUARD,), dtype=torch.uint8, device="cuda")
        self.into = torch.empty_like(self.source)

    def check(self, copies, size: int, into_at: int, source_at: int, **how) -> None:
        begin, end = GUARD + into_at, GUARD + into_at + size
        source = self.source[GUARD + source_at :][:size]
        self.into.random_(0, 256)
        self.into[begin:end] = ~source  # the poison differs from the source in every byte, so none can look written
        want = self.into.clone()
        want[begin:end] = source
        copies.run(copies.of(self.into[begin:end], source, **how))
        if not torch.equal(self.into, want):
            wrong = torch.nonzero(self.into != want).flatten() - begin
            pytest.fail(
                f"{size} bytes to {into_at} from {source_at} mod 16, {how}: {len(wrong)} bytes wrong, the first at "
                f"{int(wrong[0])}, the last at {int(wrong[-1])} of the copy"
            )


@pytest.mark.parametrize("size", SIZES)
def test_every_alignment_of_both_ends(copies, size):
    arena = Arena(size + 16)
    for into_at in range(16):
        for source_at in range(16):
            arena.check(copies, size, into_at, source_at, blocks=1 + (into_at + source_at) % 3, ring=SMALL)


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: f"{ring.stages}x{ring.stage_bytes}")
@pytest.mark.parametrize("blocks", [1, 3, 8, 132])
def test_around_a_stage_and_around_a_round_of_all_stages(copies, ring, blocks):
    arena = Arena(40 * 5120 * 8 + 64)
    for whole in (ring.stage_bytes, ring.stages * ring.stage_bytes, ring.stages * ring.stage_bytes * min(blocks, 8)):
        for size in {max(0, whole + off) for off in (-17, -16, -1, 0, 1, 16, 17)}:
            for into_at, source_at in ((0, 0), (5, 5), (3, 14)):
                arena.check(copies, size, into_at, source_at, blocks=blocks, ring=ring)


@pytest.mark.parametrize(("into_at", "source_at"), [(0, 0), (8, 8), (15, 15), (0, 1), (15, 3), (4, 12)])
def test_many_chunks(copies, into_at, source_at):
    arena = Arena((64 << 20) + 16)
    arena.check(copies, 64 << 20, into_at, source_at, blocks=8, ring=Ring(12, 16384))
    arena.check(copies, (64 << 20) - 7, into_at, source_at, blocks=132, ring=Ring(8, 1024))
    arena.check(copies, 3 << 20, into_at, source_at, blocks=5, ring=Ring(2, 32))  # a block's share: 19,661 chunks


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("into_at", "source_at"), [(0, 0), (5, 5), (1, 2)])
def test_more_than_two_and_four_gigabytes(gpu, copies, into_at, source_at):
    free, _ = torch.cuda.mem_get_info()
    for size in ((2 << 30) + 12345, (4 << 30) + 6789):
        if free < 5 * size:
            pytest.skip(f"needs {5 * size} bytes of GPU memory free; {gpu.name} has {free}")
        source = torch.randint(0, 256, (size + 32,), dtype=torch.uint8, device="cuda")
        into = torch.bitwise_not(source)
        copies.run(copies.of(into[into_at:][:size], source[source_at:][:size], blocks=64, ring=Ring(12, 16384)))
        assert torch.equal(into[into_at:][:size], source[source_at:][:size])
        assert torch.equal(into[into_at + size :], ~source[into_at + size :])
        assert torch.equal(into[:into_at], ~source[:into_at])
        del source, into
        torch.cuda.empty_cache()


def test_memory_of_the_host_is_as_good(copies):
    """Ends that are not on this GPU: what a peer's memory is."""
    source = torch.randint(0, 256, (100_003,), dtype=torch.uint8).pin_memory()
    there = torch.zeros(100_003, dtype=torch.uint8).pin_memory()
    here = torch.zeros(100_003, dtype=torch.uint8, device="cuda")
    copies.run(copies.of(here[3:], source[3:]))
    copies.run(copies.of(there[3:], here[3:]))
    assert torch.equal(there[3:], source[3:])
    assert not there[:3].any()


def test_the_signal_counts_the_runs_whatever_the_grid(copies):
    words, source = Words(2), torch.randint(0, 256, (70_000,), dtype=torch.uint8, device="cuda")
    into = torch.zeros_like(source)
    for run, blocks in enumerate((1, 8, 3, 132, 1, 2, 8), start=1):
        copies.run(copies.signalling(words, 0, 1, copies.of(into, source, blocks=blocks)))
        assert (words[0], words[1], words.ticket(0)) == (run, run, 0)


def test_a_signal_never_comes_before_the_bytes(copies, error_word):
    """A sender and a receiver on two streams, one buffer, 300 messages: put, with its credit."""
    messages, size = 300, 50_000
    words = Words(5)
    sent, ready, credit, arrived, took = range(5)
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    buffer = torch.zeros(size, dtype=torch.uint8, device="cuda")
    log = torch.zeros(messages, size, dtype=torch.uint8, device="cuda")
    data = torch.randint(0, 256, (messages, size), dtype=torch.uint8, device="cuda")
    watch = error_word.watch(20.0)
    copied = copies.of(buffer[5:], source[5:], blocks=4)
    put = copies.waiting(words, sent, credit, watch, copies.signalling(words, sent, arrived, copied))
    assert put.params.signal == words.at(arrived)
    say_ready = copies.signalling(words, ready, credit)
    receive = copies.waiting(words, took, arrived, watch)
    sender, receiver = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for message in range(messages):
        with torch.cuda.stream(sender):
            source.copy_(data[message])
            put(sender.cuda_stream)
        with torch.cuda.stream(receiver):
            say_ready(receiver.cuda_stream)
            receive(receiver.cuda_stream)
            log[message].copy_(buffer)
    torch.cuda.synchronize()
    error_word.check()
    assert torch.equal(log[:, 5:], data[:, 5:])
    assert [words[index] for index in range(5)] == [messages] * 5


def test_get_in_graphs_and_eager_by_turns(gpu, copies, error_word):
    """The receiver waits until the sender is ready, pulls, and says that it has taken."""
    words, size = Words(4), 30_001
    pulled, offered, ready, taken = range(4)
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    into = torch.zeros(size, dtype=torch.uint8, device="cuda")
    watch = error_word.watch(20.0)
    copied = copies.signalling(words, pulled, taken, copies.of(into, source, blocks=3))
    get = copies.waiting(words, pulled, ready, watch, copied)
    offer = copies.signalling(words, offered, ready)
    sender, receiver = torch.cuda.Stream(), torch.cuda.Stream()
    with (
        Graph.capture(gpu, receiver.cuda_stream, lambda: get(receiver.cuda_stream)) as gets,
        Graph.capture(gpu, sender.cuda_stream, lambda: offer(sender.cuda_stream)) as offers,
    ):
        for turn in range(40):
            data = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
            source.copy_(data)
            torch.cuda.synchronize()
            gets.replay(receiver.cuda_stream) if turn % 2 else get(receiver.cuda_stream)
            offers.replay(sender.cuda_stream) if turn % 3 else offer(sender.cuda_stream)
            torch.cuda.synchronize()
            error_word.check()
            assert torch.equal(into, data)
            assert words[taken] == turn + 1


def test_the_credit_may_be_behind_by_the_lag(copies, error_word):
    words, source = Words(2), torch.ones(100, dtype=torch.uint8, device="cuda")
    into = torch.zeros_like(source)
    launch = copies.altered(copies.waiting(words, 0, 1, error_word.watch(0.2), copies.of(into, source)), lag=2)
    for _ in range(2):  # epochs 1 and 2 are no more than 2 ahead of a credit of 0
        copies.run(launch)
    error_word.check()
    assert words[0] == 2
    copies.run(launch)
    assert error_word.record().expected == 1
    assert words[0] == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"signal": 64}, "needs an operation"),
        ({"operation": 64, "credit": 64}, "needs a watch"),
        ({"operation": 60}, "8-byte aligned"),
        ({"bytes": 2**64}, "it holds 0 to"),
        ({"bytes": -1}, "it holds 0 to"),
    ],
)
def test_what_cannot_be_right_is_refused(copies, fields, message):
    with pytest.raises(ConfigError, match=message):
        copy_launch(copies.kernels, CopyParams(**{"dst": 0, "src": 0, "bytes": 0} | fields), 1, SMALL)
