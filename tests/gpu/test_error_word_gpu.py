"""Test waits that fail: one record names both ranks, later work is poisoned, and nothing is stored to peers."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from raymoe.cuda.error_word import ErrorWord  # noqa: E402
from raymoe.cuda.structs import FAILURE_ABORTED, FAILURE_TIMEOUT  # noqa: E402
from raymoe.errors import Aborted, ConfigError, PeerTimeout  # noqa: E402
from tests.gpu.copies import Words  # noqa: E402

pytestmark = pytest.mark.gpu

OPERATION, CREDIT, SIGNAL = range(3)
PEER = 3


@pytest.fixture
def source():
    return torch.randint(1, 256, (20_000,), dtype=torch.uint8, device="cuda")


@pytest.fixture
def into(source):
    return torch.zeros_like(source)


@pytest.fixture
def words(source):
    return Words(3)


@pytest.fixture
def put(copies, words, source, into):
    """Return a function that makes a put with a bounded wait. It has 4 blocks, and all of them wait."""

    def make(error_word, timeout_s):
        copied = copies.signalling(words, OPERATION, SIGNAL, copies.of(into, source, blocks=4))
        waits = copies.waiting(words, OPERATION, CREDIT, error_word.watch(timeout_s), copied)
        return copies.altered(waits, op=error_word.number("put"), peer=PEER)

    return make


def seconds(stream, launch) -> float:
    torch.cuda.synchronize()
    begin = time.monotonic()
    launch(stream.cuda_stream)
    stream.synchronize()
    return time.monotonic() - begin


def test_a_wait_that_succeeds_records_no_failure(copies, error_word, put, words, source, into):
    words[CREDIT] = 1
    seconds(copies.stream, put(error_word, 5.0))
    assert error_word.record() is None
    assert error_word.error() is None
    error_word.check()
    assert torch.equal(into, source)
    assert (words[SIGNAL], words[OPERATION]) == (1, 1)


def test_a_timeout_is_recorded_and_poisons_later_work(copies, error_word, put, words, into):
    assert error_word.number("get") == 0
    number = error_word.number("put")
    assert number == error_word.number("put") == 1
    elapsed = seconds(copies.stream, put(error_word, 0.2))
    assert 0.15 < elapsed < 2
    found = error_word.record()
    assert (found.code, found.op, found.epoch, found.peer) == (FAILURE_TIMEOUT, number, 1, PEER)
    assert (found.expected, found.seen) == (1, 0)
    assert 0.2e9 <= found.waited_ns < 0.3e9
    with pytest.raises(PeerTimeout, match=r"rank 0 waited 0\.2 s for rank 3 in put \(epoch 1\): expected 1, seen 0"):
        error_word.check()
    assert not into.any()
    assert (words[SIGNAL], words[OPERATION], words.ticket(OPERATION)) == (0, 0, 0)

    words[CREDIT] = 99  # the credit comes too late: nothing may be stored any more
    assert seconds(copies.stream, put(error_word, 5.0)) < 0.1
    assert not into.any()
    assert (words[SIGNAL], words[OPERATION], words.ticket(OPERATION)) == (0, 0, 0)
    assert error_word.record() == found


def test_a_later_run_records_its_own_epoch(copies, error_word, put, words):
    words[CREDIT] = 3
    for _ in range(4):
        seconds(copies.stream, put(error_word, 0.1))
    found = error_word.record()
    assert (found.epoch, found.expected, found.seen) == (4, 4, 3)
    assert (words[SIGNAL], words[OPERATION]) == (3, 3)


def test_an_abort_ends_a_wait_at_once(copies, error_word, put, words, into):
    launch = put(error_word, 60.0)
    torch.cuda.synchronize()
    launch(copies.stream.cuda_stream)
    time.sleep(0.05)
    assert not copies.stream.query()
    assert error_word.record() is None
    begin = time.monotonic()
    threading.Thread(target=error_word.abort, args=("rank 2 died",)).start()
    copies.stream.synchronize()
    assert time.monotonic() - begin < 0.05
    found = error_word.record()
    assert found.code == FAILURE_ABORTED
    assert 0.04e9 < found.waited_ns < 1e9
    with pytest.raises(Aborted, match="told to stop in put: rank 2 died") as caught:
        error_word.check()
    assert caught.value.peer == PEER
    assert not into.any()
    assert words[SIGNAL] == 0


def test_an_abort_before_the_wait_ends_it_too(copies, error_word, put):
    error_word.abort("too late")
    error_word.abort("a second reason")
    assert seconds(copies.stream, put(error_word, 60.0)) < 0.1
    with pytest.raises(Aborted, match="too late"):
        error_word.check()


def test_a_timeout_ends_the_other_waits_of_its_workspace(copies, error_word, put):
    """When one wait times out, another of the same watch with a minute left ends too, and is not recorded."""
    short, patient = put(error_word, 0.1), put(error_word, 60.0)
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    begin = time.monotonic()
    patient(other.cuda_stream)
    short(copies.stream.cuda_stream)
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 1
    assert error_word.record().code == FAILURE_TIMEOUT


def test_another_workspace_is_not_poisoned(gpu, copies, error_word, put, words, source, into):
    seconds(copies.stream, put(error_word, 0.05))
    assert error_word.record() is not None
    other = ErrorWord(gpu, rank=0)
    words[CREDIT] = 1
    seconds(copies.stream, put(other, 5.0))
    assert other.record() is None
    assert torch.equal(into, source)
    other.close()
    other.close()


@pytest.mark.parametrize("timeout_s", [0, -1, 1e12])
def test_a_wait_needs_a_bound(error_word, timeout_s):
    with pytest.raises(ConfigError, match="timeout_s"):
        error_word.watch(timeout_s)
