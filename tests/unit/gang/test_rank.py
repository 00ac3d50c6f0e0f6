"""A rank refuses descriptors of another run, of an earlier generation, or that were changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from raymoe.config import Job
from raymoe.errors import DataRefused, PeerTimeout, RaymoeError
from raymoe.gang.processes import SilenceWatch
from raymoe.gang.rank import Rank, RankSettings
from raymoe.gang.supervisor import Failure

Descriptor = dict[str, object]


@pytest.fixture
def opened() -> Iterator[object]:
    """`opened(run, generation)` opens both ranks of a gang; gives the first one and the descriptors of both."""
    ranks: list[Rank] = []

    def go(run: str, generation: int = 0) -> tuple[Rank, list[Descriptor]]:
        gang = [Rank(run, index) for index in range(2)]
        ranks.extend(gang)
        settings = [RankSettings(index, 2, generation, 1.0, 1, "cpu", False, 1000) for index in range(2)]
        descriptors = [rank.open(item) for rank, item in zip(gang, settings, strict=True)]
        assert all(isinstance(item, dict) for item in descriptors)
        return gang[0], descriptors  # type: ignore[return-value]

    yield go
    for rank in ranks:
        if rank.world is not None:
            rank.world.close(together=False)


def refusal(rank: Rank, descriptors: list[Descriptor]) -> str:
    failure = rank.wire(descriptors)
    assert isinstance(failure, Failure) and failure.kind == "WiringError"
    return failure.message


def test_a_descriptor_of_another_run(opened) -> None:
    rank, own = opened("quickstart-20261123T070000Z-abcd")
    _, theirs = opened("quickstart-20261123T070000Z-wxyz")
    assert "name is quickstart-20261123T070000Z-wxyz on rank 1" in refusal(rank, [own[0], theirs[1]])


def test_a_descriptor_of_an_earlier_generation(opened) -> None:
    rank, own = opened("run", generation=1)
    _, earlier = opened("run", generation=0)
    assert "generation is 0 on rank 1 and 1 on rank 0" in refusal(rank, [own[0], earlier[1]])


def test_all_descriptors_of_another_gang(opened) -> None:
    rank, _ = opened("run")
    _, theirs = opened("run")  # the same name: the memory tells them apart
    assert "the descriptor at place 0 is not the one that this rank gave" in refusal(rank, theirs)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"inode": 1}, "not 1 as exported"),
        ({"fd": 0}, "which is no heap of raymoe|gone or has withdrawn"),
        ({"pid": 1}, "is not the one that exported the heap"),
        ({"nbytes": 1 << 40}, "its descriptor says 1099511627776"),
    ],
)
def test_a_descriptor_that_was_changed_on_the_way(opened, change, says) -> None:
    rank, own = opened("run")
    message = refusal(rank, [own[0], own[1] | change])
    assert any(reason in message for reason in says.split("|")), message


def test_a_rank_that_is_stopped_in_a_case_returns_the_lines_so_far() -> None:
    plain = {"name": "x", "workload": "exchange", "steps": {"count": 10**6}}
    plain |= {"world": {"ranks": 1, "device": "cpu"}, "shape": {"tokens": 8, "hidden": 64, "experts": 4, "topk": 2}}
    job = Job.model_validate(plain)
    rank = Rank("run", 0)
    descriptor = rank.open(RankSettings(0, 1, 0, 5.0, 1, "cpu", False, 1000))
    assert isinstance(descriptor, dict) and rank.wire([descriptor]) is None
    world = rank.world
    assert world is not None
    stop = threading.Timer(1.5, world.abort, ["the gang is being stopped"])
    stop.start()
    failure = rank.run(job.resolved(), ())
    stop.join()
    world.close(together=False)
    assert isinstance(failure, Failure) and failure.kind == "Aborted"
    assert [line["op"] for line in failure.lines] == ["dispatch", "combine", "exchange"]
    assert all(line["stopped"] is True and 0 < line["samples"] < 10**6 for line in failure.lines)  # type: ignore[operator]
    assert rank.poll(0, 0).finished == ()


def test_silence_counts_from_the_last_poll() -> None:
    ended = threading.Event()
    watch = SilenceWatch(0.7, ended.set)
    assert not ended.wait(1.0), "a rank that was never polled waits"
    for _ in range(10):
        watch.heard()
        time.sleep(0.1)
    assert not ended.is_set()
    last = time.monotonic()
    assert ended.wait(10) and time.monotonic() - last > 0.4


def test_errors_of_a_rank_advise_the_user_of_a_job() -> None:
    """The same errors advise a program that uses the library to change its arguments, or ask what it calls."""
    refused = DataRefused("48 rows, gaps included, came to rank 0; its capacity is 40")
    refused.rows_needed, refused.advice = 48, "take ExchangeSpec(capacity=48)"
    late = PeerTimeout("dispatch", epoch=7, peer=1, expected=7, seen=6, waited_s=2.0, rank=0)
    late.advice = "did all ranks call this layer?"
    other = DataRefused("rank 0 asked for expert 9")

    def raising(error: RaymoeError) -> None:
        raise error

    said = []
    for error in (refused, late, other):
        failure = Rank("advice", 0)._safely(lambda error=error: raising(error))
        assert isinstance(failure, Failure)
        said.append(failure.message)
    assert said[0] == "48 rows, gaps included, came to rank 0; its capacity is 40: raise exchange.capacity"
    assert said[1:] == ["rank 0 waited 2.0 s for rank 1 in dispatch (epoch 7): expected 7, seen 6", str(other)]
