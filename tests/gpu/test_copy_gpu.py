"""Test the copy kernel: it copies every byte, writes no other byte, and counts and signals right."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from raymoe.cuda.graph import Graph  # noqa: E402
from raymoe.errors import ConfigError  # noqa: E402
from raymoe.transport.copy_kernel import (  # noqa: E402
    MOST_TRANSFERS,
    Ring,
    Spread,
    Transfer,
    copy_launch,
)
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
    """A source of random bytes and a destination, each at any offset of a buffer with guard bytes at both ends."""

    def __init__(self, nbytes: int) -> None:
        self.source = torch.randint(0, 256, (nbytes + 2 * GUARD,), dtype=torch.uint8, device="cuda")
        self.into = torch.empty_like(self.source)

    def check(self, copies, size: int, into_at: int, source_at: int, **options) -> None:
        begin, end = GUARD + into_at, GUARD + into_at + size
        source = self.source[GUARD + source_at :][:size]
        self.into.random_(0, 256)
        self.into[begin:end] = ~source  # poison that differs from the source in every byte, so none can look written
        want = self.into.clone()
        want[begin:end] = source
        copies.run(copies.of(self.into[begin:end], source, **options))
        if not torch.equal(self.into, want):
            wrong = torch.nonzero(self.into != want).flatten() - begin
            pytest.fail(
                f"{size} bytes to {into_at} from {source_at} mod 16, {options}: {len(wrong)} bytes wrong, the first at "
                f"{int(wrong[0])}, the last at {int(wrong[-1])} of the copy"
            )


@pytest.mark.parametrize("size", SIZES)
def test_copies_of_any_alignment_are_right(copies, size):
    arena = Arena(size + 16)
    for into_at in range(16):
        for source_at in range(16):
            arena.check(copies, size, into_at, source_at, blocks=1 + (into_at + source_at) % 3, ring=SMALL)


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: f"{ring.stages}x{ring.stage_bytes}")
@pytest.mark.parametrize("blocks", [1, 3, 8, 132])
def test_copies_about_as_large_as_the_stages_are_right(copies, ring, blocks):
    arena = Arena(40 * 5120 * 8 + 64)
    for whole in (ring.stage_bytes, ring.stages * ring.stage_bytes, ring.stages * ring.stage_bytes * min(blocks, 8)):
        for size in {max(0, whole + off) for off in (-17, -16, -1, 0, 1, 16, 17)}:
            for into_at, source_at in ((0, 0), (5, 5), (3, 14)):
                arena.check(copies, size, into_at, source_at, blocks=blocks, ring=ring)


@pytest.mark.parametrize(("into_at", "source_at"), [(0, 0), (8, 8), (15, 15), (0, 1), (15, 3), (4, 12)])
def test_copies_of_many_chunks_are_right(copies, into_at, source_at):
    arena = Arena((64 << 20) + 16)
    arena.check(copies, 64 << 20, into_at, source_at, blocks=8, ring=Ring(12, 16384))
    arena.check(copies, (64 << 20) - 7, into_at, source_at, blocks=132, ring=Ring(8, 1024))
    arena.check(copies, 3 << 20, into_at, source_at, blocks=5, ring=Ring(2, 32))  # a block's share: 19,661 chunks


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("into_at", "source_at"), [(0, 0), (5, 5), (1, 2)])
def test_copies_above_two_and_four_gigabytes_are_right(gpu, copies, into_at, source_at):
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


def test_host_memory_is_copied_too(copies):
    """Copy from and to memory that is not on this GPU, as a peer's memory is not."""
    source = torch.randint(0, 256, (100_003,), dtype=torch.uint8).pin_memory()
    there = torch.zeros(100_003, dtype=torch.uint8).pin_memory()
    here = torch.zeros(100_003, dtype=torch.uint8, device="cuda")
    copies.run(copies.of(here[3:], source[3:]))
    copies.run(copies.of(there[3:], here[3:]))
    assert torch.equal(there[3:], source[3:])
    assert not there[:3].any()


def test_the_signal_counts_runs_of_any_grid(copies):
    words, source = Words(2), torch.randint(0, 256, (70_000,), dtype=torch.uint8, device="cuda")
    into = torch.zeros_like(source)
    for run, blocks in enumerate((1, 8, 3, 132, 1, 2, 8), start=1):
        copies.run(copies.signalling(words, 0, 1, copies.of(into, source, blocks=blocks)))
        assert (words[0], words[1], words.ticket(0)) == (run, run, 0)


def test_a_signal_never_comes_before_the_bytes(copies, error_word):
    """Put 300 messages with credits through one buffer, from a sender to a receiver on two streams."""
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
    assert put.params.transfers[0].signal == words.at(arrived)
    signal_ready = copies.signalling(words, ready, credit)
    receive = copies.waiting(words, took, arrived, watch)
    sender, receiver = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for message in range(messages):
        with torch.cuda.stream(sender):
            source.copy_(data[message])
            put(sender.cuda_stream)
        with torch.cuda.stream(receiver):
            signal_ready(receiver.cuda_stream)
            receive(receiver.cuda_stream)
            log[message].copy_(buffer)
    torch.cuda.synchronize()
    error_word.check()
    assert torch.equal(log[:, 5:], data[:, 5:])
    assert [words[index] for index in range(5)] == [messages] * 5


def test_get_works_in_graphs_and_eager_in_turns(gpu, copies, error_word):
    """The receiver waits until the sender is ready, pulls the message, and signals that it has taken it."""
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
        for round_ in range(40):
            data = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
            source.copy_(data)
            torch.cuda.synchronize()
            gets.replay(receiver.cuda_stream) if round_ % 2 else get(receiver.cuda_stream)
            offers.replay(sender.cuda_stream) if round_ % 3 else offer(sender.cuda_stream)
            torch.cuda.synchronize()
            error_word.check()
            assert torch.equal(into, data)
            assert words[taken] == round_ + 1


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
def test_invalid_transfers_are_refused(copies, fields, message):
    with pytest.raises(ConfigError, match=message):
        copy_launch(copies.kernels, [Transfer(**{"dst": 0, "src": 0, "bytes": 0} | fields)])


@pytest.mark.parametrize("count", [0, MOST_TRANSFERS + 1])
def test_a_launch_without_transfers_or_with_too_many_is_refused(copies, count):
    with pytest.raises(ConfigError, match=f"{count} transfers in one copy; there are 1 to {MOST_TRANSFERS}"):
        copy_launch(copies.kernels, [Transfer(0, 0, 0)] * count)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("ring", [Ring(4, 256), Ring(12, 1024), Ring(1, 64)], ids=["4x256", "12x1024", "1x64"])
def test_many_transfers_run_at_once(copies, ring, blocks, in_turn):
    """Mix all kinds of transfers: aligned, with unaligned ends, shifted, of a few bytes, and signals alone."""
    sizes = [0, 1, 15, 16, 4096, 5003, 100_000, 40_000, 16 * 1024, 17, 0, 70_001] * 2
    words = Words(2 * len(sizes))
    source = torch.randint(0, 256, (sum(sizes) + 64 * len(sizes),), dtype=torch.uint8, device="cuda")
    for run in range(1, 4):
        into = torch.zeros_like(source)
        want = into.clone()
        transfers, start = [], 0
        for index, size in enumerate(sizes):
            into_at, source_at = start + (0, 3, 8)[index % 3], start + (0, 3, 5)[index % 3]
            transfer = copies.transfer(into[into_at:][:size], source[source_at:][:size])
            want[into_at:][:size] = source[source_at:][:size]
            transfers.append(replace(transfer, operation=words.at(2 * index), signal=words.at(2 * index + 1)))
            start += -(-size // 16) * 16 + 32
        copies.run(copy_launch(copies.kernels, transfers, Spread(blocks, ring, in_turn)))
        assert torch.equal(into, want)
        assert [words[index] for index in range(2 * len(sizes))] == [run] * (2 * len(sizes))
        assert [words.ticket(2 * index) for index in range(len(sizes))] == [0] * len(sizes)


def test_a_pace_is_kept_and_the_bytes_are_right(copies):
    """A GPU alone copies ten times as fast, so both a pace that is not kept and a slower one show."""
    size, gbps = 64 << 20, 100
    source = torch.randint(0, 256, (2, size), dtype=torch.uint8, device="cuda")
    into = torch.zeros_like(source)
    transfers = [copies.transfer(into[part], source[part]) for part in range(2)]
    launch = copy_launch(copies.kernels, transfers, Spread(16, Ring(12, 16384), in_turn=True, gbps=gbps))
    copies.run(launch)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(copies.stream)
    launch(copies.stream.cuda_stream)
    end.record(copies.stream)
    copies.stream.synchronize()
    assert torch.equal(into, source)
    assert 0.95 < 2 * size / gbps / (begin.elapsed_time(end) * 1e6) < 1.02


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_transfer_signals_while_a_later_transfer_waits(copies, error_word, in_turn):
    """Run two ends on one GPU: each launch's second transfer waits for the signal of the other launch's first one."""
    size = 200_000
    words = Words(8)
    data = torch.randint(0, 256, (2, 2, size), dtype=torch.uint8, device="cuda")
    into = torch.zeros_like(data)
    launches = []
    for end in range(2):
        transfers = [copies.transfer(into[end, part], data[end, part]) for part in range(2)]
        transfers[0] = replace(transfers[0], operation=words.at(4 * end), signal=words.at(4 * end + 1))
        transfers[1] = replace(transfers[1], operation=words.at(4 * end + 2), credit=words.at(4 * (1 - end) + 1))
        waiting = Transfer(0, 0, 0, words.at(4 * end + 3), credit=words.at(4 * (1 - end) + 1))
        spread = Spread(4, Ring(6, 4096), in_turn)
        launches.append(copy_launch(copies.kernels, [*transfers, waiting], spread, error_word.watch(20.0)))
    other = torch.cuda.Stream()
    for run in range(1, 21):
        into.zero_()
        torch.cuda.synchronize()
        # Neither launch ends before the other has begun, so no wait may come between the two.
        launches[run % 2](other.cuda_stream)
        launches[1 - run % 2](copies.stream.cuda_stream)
        torch.cuda.synchronize()
        error_word.check()
        assert torch.equal(into, data)
        assert [words[index] for index in range(8)] == [run] * 8


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_transfer_that_times_out_and_transfers_after_it_do_not_signal(copies, error_word, in_turn):
    words, size = Words(8), 50_000
    source, into = (
        torch.ones(3, size, dtype=torch.uint8, device="cuda"),
        torch.zeros(3, size, dtype=torch.uint8, device="cuda"),
    )
    transfers = [copies.transfer(into[index], source[index]) for index in range(3)]
    transfers = [
        replace(transfer, operation=words.at(2 * index), signal=words.at(2 * index + 1))
        for index, transfer in enumerate(transfers)
    ]
    transfers[1] = replace(transfers[1], credit=words.at(7), peer=5)
    launch = copy_launch(copies.kernels, transfers, Spread(3, Ring(4, 4096), in_turn), error_word.watch(0.2))
    copies.run(launch)
    assert (error_word.record().peer, error_word.record().expected) == (5, 1)
    assert (words[0], words[1]) == (1, 1) and into[0].all()
    assert words[3] == 0 and not into[1].any()
    if in_turn:
        assert words[5] == 0 and not into[2].any()
    assert [words.ticket(2 * index) for index in range(3)] == [0] * 3
    copies.run(launch)  # the whole launch is poisoned now
    assert (words[1], words[3]) == (1, 0)
    assert [words.ticket(2 * index) for index in range(3)] == [0] * 3
