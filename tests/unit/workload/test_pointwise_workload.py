"""Workload pointwise on CPU ranks: its lines, its oracle, refused jobs, and what other systems do wrong."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch

from raymoe.config import load_job
from raymoe.config.job import Job
from raymoe.errors import ConfigError, WrongResult
from raymoe.memory.world import World
from raymoe.report.results import KEYS, complete, decode, encode
from raymoe.workload import Progress, run_case
from raymoe.workload.clock import TimedOp
from raymoe.workload.memory_needed import bytes_per_rank, device_bytes
from raymoe.workload.pointwise import gpu_clock
from raymoe.workload.pointwise import run_pointwise as pointwise_run
from raymoe.workload.pointwise.gpu_clock import GpuClock
from raymoe.workload.pointwise.operations import OPERATIONS, RowSizes, drawn, error_of
from raymoe.workload.pointwise.row_systems import OURS, SYSTEMS, Task, _formula
from raymoe.workload.pointwise.run_pointwise import RowStep
from tests.unit.ranks import RankPool

SIZES = RowSizes(tokens=21, width=136, dtype="bfloat16")
CPU = torch.device("cpu")


def job(op: str = "rms_norm", ranks: int = 1, **shape: object) -> dict[str, Any]:
    return {
        "name": "test",
        "workload": "pointwise",
        "world": {"ranks": ranks, "device": "cpu"},
        "shape": {"tokens": 9, "hidden": 136, "ffn": 64, **shape},
        "pointwise": {"op": op},
        "steps": {"warmup": 1, "count": 3},
    }


def run(world: World, given: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Progress]]:
    progress: list[Progress] = []
    return [line for case in Job(**given).cases() for line in run_case(case, world, progress.append)], progress


def run_alone(given: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Progress]]:
    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        return run(world, given)


@pytest.mark.parametrize("op", OPERATIONS)
def test_each_operation_has_a_line_for_each_system(op):
    lines, progress = run_alone(job(op))
    assert [line["backend"] for line in lines] == list(SYSTEMS)
    assert progress[-1].done <= progress[-1].total == 4 * len(SYSTEMS)
    by_system = {line["backend"]: line for line in lines}
    for system in ("compile", "liger", "quack"):
        assert "GPUs only" in by_system[system]["skipped"] and by_system[system]["samples"] == 0
    for system in ("in_turn", "own_copy"):
        assert "compute capability 9.0" in by_system[system]["skipped"]
    for system in (OURS, "eager", "copy"):
        line = by_system[system]
        assert line["verified"] is True and line["samples"] == 3
        assert line["bytes_memory"] > 9 * 64 * 2 and math.isclose(
            line["gbps_memory"], line["bytes_memory"] / line["us_p50"] / 1e3
        )
        assert line["hidden"] == (64 if op.startswith("swiglu") else 136)
    for line in lines:
        full = complete(line, run="r", generation=0, commit=None)
        assert set(full) == set(KEYS) and decode(encode(full)) == full


def test_ranks_measure_together_and_get_the_same_lines(pool: RankPool):
    answers = pool.run(2, run, job(ranks=2, dtype="float32"))
    assert answers[0][0] == answers[1][0]
    assert {line["ranks"] for line in answers[0][0]} == {2}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_formulas_agree_with_the_oracle(op, dtype):
    sizes = RowSizes(21, 136, dtype)
    task = Task(op, drawn(op, sizes, 0, CPU), sizes)
    for compute in (SYSTEMS[OURS](task), SYSTEMS["eager"](task), lambda: _formula(op, task.given)):
        assert error_of(op, compute(), task.tensors, sizes) <= OPERATIONS[op].bound(getattr(torch, dtype))


@pytest.mark.parametrize("op", OPERATIONS)
def test_formulas_compile_without_a_break(op):
    task = Task(op, drawn(op, SIZES, 0, CPU), SIZES)
    torch.compiler.reset()
    compiled = torch.compile(lambda *given: _formula(op, list(given)), fullgraph=True, backend="aot_eager")
    assert error_of(op, compiled(*task.given), task.tensors, SIZES) <= OPERATIONS[op].bound(torch.bfloat16)


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_oracle_finds_one_wrong_element_of_any_result(op):
    task = Task(op, drawn(op, SIZES, 0, CPU), SIZES)
    for index in range(len(SYSTEMS[OURS](task)())):
        found = tuple(each.clone() for each in SYSTEMS[OURS](task)())
        flat = found[index].view(torch.uint8) if found[index].dtype == torch.float8_e4m3fn else found[index]
        flat.reshape(-1)[7] = 0x7F if flat.dtype == torch.uint8 else torch.nan
        assert error_of(op, found, task.tensors, SIZES) == torch.inf
        if flat.dtype != torch.uint8:
            flat.reshape(-1)[7] = 99.0
            assert error_of(op, found, task.tensors, SIZES) > OPERATIONS[op].bound(torch.bfloat16)


def wrong(task: Task) -> Any:
    compute = SYSTEMS[OURS](task)
    return lambda: tuple(each * 1.5 for each in compute())


def broken(task: Task) -> Any:
    raise RuntimeError("no kernel\nimage")


@pytest.mark.parametrize(("fault", "said"), [(wrong, "has an error of"), (broken, "RuntimeError: no kernel image")])
def test_another_systems_failure_is_told_in_its_line(monkeypatch, fault, said):
    monkeypatch.setitem(pointwise_run.SYSTEMS, "liger", fault)
    lines, _ = run_alone(job())
    by_system = {line["backend"]: line for line in lines}
    assert said in by_system["liger"]["skipped"] and by_system["liger"]["samples"] == 0
    assert by_system["copy"]["verified"] is True


@pytest.mark.parametrize(("fault", "error"), [(wrong, WrongResult), (broken, RuntimeError)])
def test_our_own_failure_ends_the_run(monkeypatch, fault, error):
    def ours(task: Task) -> Any:
        if fault is broken:
            raise RuntimeError("no kernel image")
        return lambda: tuple(each * 1.5 for each in _formula(task.op, task.given))

    monkeypatch.setitem(pointwise_run.SYSTEMS, OURS, ours)
    with pytest.raises(error):
        run_alone(job())


REFUSED = [
    (["pointwise.op=norm"], "pointwise.op"),
    (["pointwise.stages=0"], "must be auto, or a number from 1 to 64"),
    (["world.device=cpu", "pointwise.sms=48"], "CPU ranks have no SMs and no stages"),
    (["world.device=cpu", "pointwise.stages=4"], "CPU ranks have no SMs and no stages"),
    (["world.device=cpu", "steps.graph=true"], "CUDA graphs need GPU ranks"),
    (
        ["shape.hidden=7170"],
        "rows of 7170 elements, not a multiple of 8 (case op=rms_norm,tokens=128), hidden 7176 would do",
    ),
    (["shape.ffn=2050"], "rows of 2050 elements, not a multiple of 8 (case op=swiglu,tokens=128), ffn 2056 would do"),
]


@pytest.mark.parametrize(("sets", "said"), REFUSED, ids=[sets[-1] for sets, _ in REFUSED])
def test_impossible_jobs_are_refused(sets, said):
    with pytest.raises(ConfigError) as refused:
        load_job("norm", sets)
    assert said in "".join(map(str, (refused.value, *refused.value.problems)))


def test_a_resolved_job_keeps_what_means_something():
    resolved = load_job("norm").resolved()
    assert set(resolved["shape"]) == {"tokens", "hidden", "ffn", "dtype"}
    assert not {"routing", "exchange", "overlap", "p2p"} & set(resolved)
    assert "pointwise" not in load_job("quickstart").resolved()


def test_memory_grows_with_the_rows():
    cases = load_job("norm", ["matrix.pointwise.op=[rms_norm]"]).cases()
    sizes = [device_bytes(case) for case in cases]
    assert sizes == sorted(sizes) and sizes[-1] > 65536 * 7168 * 2 * 4
    assert bytes_per_rank(load_job("norm", ["world.device=cpu"])) > 0
    assert len(load_job("norm").cases()) == 70 and len(load_job("norm_sms").cases()) == 72


# The clock of GPUs, on fake streams and graphs.


class Stream:
    cuda_stream = 7

    def __init__(self, _: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...


class GraphClock:
    """Keeps the memory of the last run, as a graph does: a replay writes the same results there."""

    def __init__(self, *_: Any, captured: bool, calls: int) -> None:
        self.captured, self.calls, self.spoilt = captured, calls, False

    def timed(self, work: Any) -> TimedOp:
        work()
        (clock,) = (cell.cell_contents for cell in work.__closure__ if isinstance(cell.cell_contents, GpuClock))
        found = clock._results
        wanted = [each.clone() for each in found]

        def replay() -> None:
            for mine, his in zip(found, wanted, strict=True):
                if not self.spoilt:
                    mine.copy_(his)

        return TimedOp(replay, replay)

    def us_cold(self, op: TimedOp) -> float:
        op.cold()
        return 4.0

    def close(self) -> None: ...


@pytest.mark.parametrize("spoilt", [False, True])
def test_the_clock_of_gpus_verifies_what_a_replay_writes(monkeypatch, spoilt):
    entered: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered.append(stream) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(gpu_clock, "TorchGraphClock", GraphClock)
    world = type("AnyWorld", (), {"device": CPU})()
    task = Task("layer_norm_backward", drawn("layer_norm_backward", SIZES, 0, CPU), SIZES)
    clock = GpuClock(world, tokens=21, graph="auto")
    step = RowStep(world, "eager", task, clock)
    assert len(entered) == 1, "the function was made outside the stream"
    clock._clock.spoilt = spoilt
    assert clock.captured and clock._clock.captured and clock._clock.calls == 20
    plain, verified = step(0, verify=False), step(1, verify=True)
    assert plain.us == (4.0,) and plain.error is None
    assert verified.error is not None and (verified.error <= 1e-2) != spoilt
    clock.close()
