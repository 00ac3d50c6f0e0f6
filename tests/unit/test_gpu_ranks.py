"""The rank processes of the GPU tests, on CPU ranks: a test that fails must not make the next one fail."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from tests.gpu import ranks, torchrun_ranks
from tests.gpu.ranks import GpuRanks, RankGone
from tests.gpu.torchrun_ranks import torchrun
from tests.unit.exchange_cases import Case
from tests.unit.exchange_judge import judge

CPU = {"device": "cpu", "timeout_s": 5.0}


@pytest.fixture(scope="module")
def pair() -> Iterator[GpuRanks]:
    with GpuRanks(2) as started:
        yield started


def pid(world: World) -> int:
    world.barrier("here")
    return os.getpid()


def fail(world: World, how: str) -> int:
    if world.rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            time.sleep(60)
        if how == "pytest":
            pytest.fail("says pytest")  # no Exception
        raise ConfigError("says rank 1")
    return world.rank


def sound(pair: GpuRanks) -> list[int]:
    return pair.run(2, pid, **CPU)


def test_ranks_that_did_well_are_kept(pair: GpuRanks) -> None:
    assert sound(pair) == sound(pair)


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [("raises", ConfigError, "says rank 1"), ("pytest", BaseException, "says pytest"), ("dies", RankGone, "code -9")],
)
def test_a_rank_that_failed_is_told_of_and_started_anew(
    pair: GpuRanks, how: str, kind: type[BaseException], said: str
) -> None:
    before = sound(pair)
    with pytest.raises(kind, match=said):
        pair.run(2, fail, how, **CPU)
    after = sound(pair)
    assert not set(before) & set(after)


def test_a_rank_that_hangs_is_not_waited_for_without_end(pair: GpuRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    sound(pair)
    monkeypatch.setattr(ranks, "DEADLINE_S", 3.0)
    good, hung = pair.outcomes(2, fail, "hangs", **CPU)
    assert good == 0
    assert isinstance(hung, RankGone) and "did not answer within 3.0 s" in str(hung)
    monkeypatch.undo()
    sound(pair)


def test_a_world_that_cannot_be_opened_is_told_of(pair: GpuRanks) -> None:
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        pair.run(2, pid, device="cpu", timeout_s=0)
    sound(pair)


def leave_a_word(world: World, folder: str, how: str = "") -> int:
    """What is written when Python ends, and so is not written by a process that is killed."""
    atexit.register(Path(folder, f"rank{world.rank}").touch)
    return fail(world, how) if how else os.getpid()


@pytest.mark.parametrize(("grace_s", "left"), [(0.0, []), (30.0, ["rank0", "rank1"])])
def test_processes_end_by_themselves_where_they_are_given_time(tmp_path: Path, grace_s: float, left: list[str]) -> None:
    with GpuRanks(2, grace_s=grace_s) as started:
        started.run(2, leave_a_word, str(tmp_path), **CPU)
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_of_ranks_that_failed_those_that_do_not_end_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GpuRanks(2, grace_s=2.0) as started:
        sound(started)
        monkeypatch.setattr(ranks, "DEADLINE_S", 3.0)
        start = time.monotonic()
        good, hung = started.outcomes(2, leave_a_word, str(tmp_path), "hangs", **CPU)
        assert good == 0 and isinstance(hung, RankGone)
        assert 4.9 < time.monotonic() - start < 40
    assert [path.name for path in tmp_path.iterdir()] == ["rank0"]


def test_processes_as_torchrun_starts_them(tmp_path: Path) -> None:
    """Those of tests/gpu/test_worlds_gpu.py, with the lines that a program under torchrun has."""
    case = Case(2, ExchangeSpec(tokens=5, hidden=8, experts=4, topk=2), "host", ("uniform", "one"), seed=1)
    answers = torchrun(2, tmp_path, "gloo", torchrun_ranks.default_group, [case], [], "cpu")
    assert [device for device, *_ in answers] == ["cpu"] * 2
    judge(case, [eager[0] for _, eager, _ in answers])
    with pytest.raises(AssertionError, match=r"rank 0: (?s:.*)device is 'tpu'"):
        torchrun(2, tmp_path / "again", "gloo", torchrun_ranks.default_group, [case], [], "tpu")
