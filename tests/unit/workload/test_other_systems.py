"""Other systems in the benchmark: their inputs, the check of their results, and that no failure of one ends a run."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.config import Job  # noqa: E402
from raymoe.config.sections import WorldSection  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.report.results import complete  # noqa: E402
from raymoe.workload import run_case  # noqa: E402
from raymoe.workload.compare import nvshmem, other_systems  # noqa: E402
from raymoe.workload.compare.nvshmem import VdevAllToAll  # noqa: E402
from raymoe.workload.compare.other_systems import refusal  # noqa: E402
from raymoe.workload.inputs import (  # noqa: E402
    Inputs,
    Routing,
)
from raymoe.workload.memory_needed import groups_of, heap_bytes, most_rows_received  # noqa: E402
from tests.unit.workload import scripted_system  # noqa: E402
from tests.unit.worlds import close, each, wired  # noqa: E402


class FakeAllToAll:
    """The operation and its way back as torch documents them, for ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.given: dict[int, tuple[Any, ...]] = {}

    def all_to_all_vdev_2d(self, sent, came, splits, there, _, major_align) -> None:
        """The source orders chunks by (rank, group), the destination by (group, source); groups are aligned."""
        me = self._meet(sent, splits)
        groups = len(splits) // self.size
        place = 0
        for group_ in range(groups):
            begin = place
            for source in range(self.size):
                theirs, sizes = self.given[source]
                chunk = me * groups + group_
                start, count = int(sizes[:chunk].sum()), int(sizes[chunk])
                came[place : place + count] = theirs[start : start + count]
                there[:, group_ * self.size + source] = torch.tensor([count, place])
                place += count
            place = begin + max(major_align, -(-(place - begin) // major_align) * major_align)
        self.barrier.wait()

    def all_to_all_vdev_2d_offset(self, came, back, there, home, _) -> None:
        me = self._meet(came, there)
        groups = there.shape[1] // self.size
        place = 0
        for rank in range(self.size):
            theirs, (counts, offsets) = self.given[rank][0], self.given[rank][1].tolist()
            for group_ in range(groups):
                count, at = (both[group_ * self.size + me] for both in (counts, offsets))
                back[place : place + count] = theirs[at : at + count]
                home[:, rank * groups + group_] = torch.tensor([count, place])
                place += count
        self.barrier.wait()

    def _meet(self, *given: Any) -> int:
        me = int(threading.current_thread().name)
        self.given[me] = given
        self.barrier.wait()
        return me


class PlainMemory:
    """Replaces symmetric memory by plain memory, for ranks that are threads."""

    is_nvshmem_available = staticmethod(lambda: True)
    set_backend = enable_symm_mem_for_group = staticmethod(lambda _: None)
    rendezvous = staticmethod(lambda *_: None)
    empty = staticmethod(torch.empty)


@pytest.fixture
def fake_all_to_all(monkeypatch):
    monkeypatch.setattr(nvshmem, "_symm", PlainMemory)
    monkeypatch.setattr(nvshmem, "join_default_group", lambda _: "0")

    def of(size: int) -> FakeAllToAll:
        fake = FakeAllToAll(size)
        monkeypatch.setattr(nvshmem, "_ops", fake)
        return fake

    return of


ROUTINGS = {
    "uniform": {},
    "masked": {"masked": 0.4},
    "ragged": {"ragged": True},
    "skewed": {"kind": "zipf", "alpha": 2.0},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize(("size", "experts"), [(2, 8), (3, 60)])
def test_documented_results_are_accepted_and_spoilt_rows_are_reported(fake_all_to_all, routing, size, experts):
    fake_all_to_all(size)
    spec = ExchangeSpec(tokens=20, hidden=16, experts=experts, topk=3, alignment=4)
    asked = Routing(
        **{"kind": "uniform", "seed": 1, "ranks": size, "tokens": 20, "experts": experts, "topk": 3, **routing}
    )

    def steps(world) -> list[str | None]:
        system = VdevAllToAll(world, spec, Inputs(asked, world.rank, 16, torch.bfloat16))
        said = []
        for index in (0, 9):
            world.barrier("step")
            system.take(index, fresh=True)
            for op, wrong in ((system.dispatch, system.wrong_dispatch), (system.combine, system.wrong_combine)):
                world.barrier("op")
                op()
                said.append(wrong())
        rows = system._rows
        counts, offsets = system._received_splits.tolist()
        place = next((at for at, count in zip(offsets, counts, strict=True) if count), None)
        if place is not None:
            system._received[place] += 1
            said.append(system.wrong_dispatch())
        if rows:
            system._returned[rows - 1] = torch.nan
            said.append(system.wrong_combine())
        return said

    worlds = wired(size)
    for rank, said in enumerate(each(worlds, steps)):
        assert isinstance(said, list), said
        assert said[:4] == [None] * 4
        assert all("not those that were sent" in str(each) for each in said[4:]), said
        assert len(said) == 6 or routing, f"rank {rank} got no rows to spoil"
    close(worlds)


def test_groups_of_experts_fit_the_operation_and_the_heap_holds_the_worst_routing():
    assert [groups_of(local) for local in (1, 15, 16, 30, 32, 64, 96)] == [1, 15, 8, 15, 8, 8, 12]
    spec = ExchangeSpec(tokens=100, hidden=16, experts=64, topk=4)
    assert most_rows_received(spec, 4) >= 4 * 100 * 4 + groups_of(16) * 15  # all rows here, each group aligned up
    assert heap_bytes(spec, 4) > (most_rows_received(spec, 4) + 2 * 400) * 32


BASE = {"workload": "exchange", "world": {"ranks": 2, "device": "cuda"}, "shape": {"tokens": 8, "hidden": 16}}
STEPS = {"warmup": 2, "count": 5}


def job(name: str = "x", **exchange: Any) -> Job:
    return Job.model_validate({**BASE, "name": name, "steps": STEPS, "exchange": {"backend": "nvshmem", **exchange}})


def lines_of(asked: Job) -> list[dict[str, Any]]:
    worlds = wired(asked.world.ranks, timeout_s=60.0)
    [case] = asked.cases()
    answers = each(worlds, lambda world: run_case(case, world, lambda _: None))
    close(worlds)
    assert all(isinstance(lines, list) and lines == answers[0] for lines in answers), answers
    return [complete(line, run="r", generation=0, commit=None) for line in answers[0]]


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(other_systems, "PROGRAM", scripted_system.PROGRAM)
    monkeypatch.setattr(other_systems, "START_S", 60.0)


def test_a_working_system_has_lines_like_a_backend(scripted, monkeypatch):
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "0")
    lines = lines_of(job("x.works.0"))
    assert [(line["op"], line["l2"], line["us_p50"]) for line in lines] == [
        ("dispatch", "cold", 11.0),  # the slower rank's time
        ("dispatch", "warm", 8.0),
    ]
    for line in lines:
        assert (line["verified"], line["max_error"], line["samples"]) == (True, 0.0, 5)
        assert (line["backend"], line["leaves_out"], line["skipped"], line["sms"]) == ("nvshmem", "routing", None, 8)
        assert line["device"] == "1"  # its process makes no multicast objects, whatever the environment says


FAILURES = {
    "ends": "rank 1: its process ended with code 3: cannot find a network",
    "hangs": "rank 1: no answer within 10 s",
    "codes": "rank 1: Error 5: too few experts",
    "refuses": "rank 1: only 3 experts",
    "crashes": "rank 1: its process was ended by signal 6",
    "lies": "rank 1: its dispatch of step 2 was wrong: nothing came",
}


@pytest.mark.parametrize(
    ("script", "said"),
    [pytest.param(*each, marks=() if each[0] == "lies" else pytest.mark.thorough) for each in FAILURES.items()],
    ids=FAILURES,
)
def test_a_failing_system_gives_a_skipped_line_and_the_run_goes_on(scripted, monkeypatch, script, said):
    if script == "hangs":
        monkeypatch.setattr(other_systems, "START_S", 10.0)
    [line] = lines_of(job(f"x.{script}.1"))
    assert line["skipped"] == said
    assert (line["backend"], line["samples"], line["us_p50"], line["verified"]) == ("nvshmem", 0, None, None)


def test_without_a_gpu_the_line_of_the_real_system_says_so():
    if torch.version.cuda is not None:
        pytest.skip("the torch of this test knows CUDA; tests/gpu has the case")
    [line] = lines_of(job())
    assert "GPU ranks were asked for with torch" in str(line["skipped"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (job(wire={"dispatch": "float8_e4m3"}), "quantises nothing"),
        (job(wire={"combine": "float32"}), "sums as float32; nvshmem is run with sums of the dtype"),
        (job().model_copy(update={"world": WorldSection(ranks=1, device="cuda")}), "no peer"),
        (job().model_copy(update={"world": WorldSection(ranks=2, device="cuda", share_gpu=True)}), "share a GPU"),
    ],
)
def test_impossible_jobs_are_refused_before_anything_starts(asked, said):
    assert said in str(refusal(asked))
