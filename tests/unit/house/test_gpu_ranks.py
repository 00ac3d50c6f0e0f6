"""The rank processes of the GPU tests, on CPU ranks: a failed test must not make the next one fail."""

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
from tests.unit.exchange.exchange_cases import Case
from tests.unit.exchange.exchange_judge import judge

CPU = {"device": "cpu", "timeout_s": 5.0}


# These test a helper of tests on GPUs, so `make test-all` runs them.
pytestmark = pytest.mark.thorough


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
            pytest.fail("says pytest")  # not a subclass of Exception
        raise ConfigError("says rank 1")
    return world.rank


def working_pids(pair: GpuRanks) -> list[int]:
    return pair.run(2, pid, **CPU)


def test_rank_processes_that_succeed_are_kept(pair: GpuRanks) -> None:
    assert working_pids(pair) == working_pids(pair)


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [("raises", ConfigError, "says rank 1"), ("pytest", BaseException, "says pytest"), ("dies", RankGone, "code -9")],
)
def test_after_a_failure_the_error_is_raised_and_the_ranks_are_restarted(
    pair: GpuRanks, how: str, kind: type[BaseException], said: str
) -> None:
    before = working_pids(pair)
    with pytest.raises(kind, match=said):
        pair.run(2, fail, how, **CPU)
    after = working_pids(pair)
    assert not set(before) & set(after)


def test_a_hung_rank_is_given_up_at_the_deadline(pair: GpuRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    working_pids(pair)
    monkeypatch.setattr(ranks, "DEADLINE_S", 3.0)
    good, hung = pair.outcomes(2, fail, "hangs", **CPU)
    assert good == 0
    assert isinstance(hung, RankGone) and "did not answer within 3.0 s" in str(hung)
    monkeypatch.undo()
    working_pids(pair)


def test_a_world_that_cannot_be_opened_raises_its_error(pair: GpuRanks) -> None:
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        pair.run(2, pid, device="cpu", timeout_s=0)
    working_pids(pair)


def leave_a_file_at_exit(world: World, folder: str, how: str = "") -> int:
    """Write a file when Python exits; a killed process does not write it."""
    atexit.register(Path(folder, f"rank{world.rank}").touch)
    return fail(world, how) if how else os.getpid()


@pytest.mark.parametrize(("grace_s", "left"), [(0.0, []), (30.0, ["rank0", "rank1"])])
def test_rank_processes_exit_by_themselves_within_the_grace_period(
    tmp_path: Path, grace_s: float, left: list[str]
) -> None:
    with GpuRanks(2, grace_s=grace_s) as started:
        started.run(2, leave_a_file_at_exit, str(tmp_path), **CPU)
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_a_hung_rank_is_killed_after_the_grace_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GpuRanks(2, grace_s=2.0) as started:
        working_pids(started)
        monkeypatch.setattr(ranks, "DEADLINE_S", 3.0)
        start = time.monotonic()
        good, hung = started.outcomes(2, leave_a_file_at_exit, str(tmp_path), "hangs", **CPU)
        assert good == 0 and isinstance(hung, RankGone)
        assert 4.9 < time.monotonic() - start < 40
    assert [path.name for path in tmp_path.iterdir()] == ["rank0"]


def test_processes_started_as_by_torchrun_run_a_case_and_report_errors(tmp_path: Path) -> None:
    """As tests/gpu/test_worlds_gpu.py does, with the code that a program under torchrun has."""
    case = Case(2, ExchangeSpec(tokens=5, hidden=8, experts=4, topk=2), "host", ("uniform", "one"), seed=1)
    answers = torchrun(2, tmp_path, "gloo", torchrun_ranks.default_group, [case], [], "cpu")
    assert [device for device, *_ in answers] == ["cpu"] * 2
    judge(case, [eager[0] for _, eager, _ in answers])
    with pytest.raises(AssertionError, match=r"rank 0: (?s:.*)device is 'tpu'"):
        torchrun(2, tmp_path / "again", "gloo", torchrun_ranks.default_group, [case], [], "tpu")
