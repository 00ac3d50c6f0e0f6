"""Test worlds in programs of users: processes that see all GPUs, as under torchrun, and Ray actors that see one."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from tests.gpu import exchange_ranks as on_rank  # noqa: E402
from tests.gpu import torchrun_ranks  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU  # noqa: E402
from tests.gpu.torchrun_ranks import KINDS, torchrun  # noqa: E402
from tests.python_path import python_path  # noqa: E402
from tests.unit.exchange.exchange_cases import ENGINE, MANY, Case, Result, batches  # noqa: E402
from tests.unit.exchange.exchange_judge import judge, judge_combine, judge_dispatch  # noqa: E402

RANKS = 2
HOPPER = torch.cuda.get_device_capability() >= FUSED_CAPABILITY if GPUS else False

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(GPUS < RANKS, reason=f"NCCL needs a GPU for each of {RANKS} ranks: {GPUS} here"),
    pytest.mark.timeout(300),
]

CAPTURABLE = [*(("fused", MANY, "staged", ENGINE) if HOPPER else ()), "allgather"]
SPEC = ExchangeSpec(tokens=33, hidden=256, experts=8, topk=3, alignment=8)
EAGER = [Case(RANKS, SPEC, name, ("uniform", "one", "masked"), seed=3) for name in (*CAPTURABLE, "collective")]
REPLAYED = [
    Case(RANKS, replace(SPEC, layout=layout), name, ("skewed",) * len(KINDS), seed=4, prefix=True)
    for name in CAPTURABLE
    for layout in ("expert", "rank")
]


def judge_eager(cases: list[Case], answers: list[list[list[Result]]]) -> None:
    for index, case in enumerate(cases):
        judge(case, [answer[index] for answer in answers])


def judge_replayed(cases: list[Case], answers: list[list[list[Result]]]) -> None:
    for index, case in enumerate(cases):
        for step, kind in enumerate(KINDS):
            sent = batches(case, step)
            if kind != "eager":
                tokens = on_rank.smaller(case.spec) if kind == "smaller" else case.spec.tokens
                sent = [on_rank.padded(on_rank.cut(batch, tokens), tokens) for batch in sent]
            for rank in range(RANKS):
                judge_dispatch(case, sent, rank, answers[rank][index][step])
                judge_combine(case, sent[rank], answers[rank][index][step].y)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_every_backend_works_in_processes_that_see_all_gpus(backend: str, tmp_path: Path) -> None:
    answers = torchrun(RANKS, tmp_path, backend, torchrun_ranks.default_group, EAGER, REPLAYED)
    assert [device for device, *_ in answers] == ["cuda:0", "cuda:1"]
    judge_eager(EAGER, [eager for _, eager, _ in answers])
    judge_replayed(REPLAYED, [replayed for *_, replayed in answers])


def test_every_backend_works_while_another_device_is_current(tmp_path: Path) -> None:
    answers = torchrun(RANKS, tmp_path, "gloo", torchrun_ranks.another_device, EAGER, REPLAYED)
    assert [facts for *facts, _, _ in answers] == [["cuda:1", 0], ["cuda:0", 0]]
    judge_eager(EAGER, [eager for *_, eager, _ in answers])
    judge_replayed(REPLAYED, [replayed for *_, replayed in answers])


def test_two_worlds_in_one_process_use_two_gpus(tmp_path: Path) -> None:
    answers = torchrun(RANKS, tmp_path, "nccl", torchrun_ranks.two_worlds, EAGER)
    assert [facts for *facts, _ in answers] == [[True, "cuda:0", "cuda:1"], [True, "cuda:1", "cuda:0"]]
    judge_eager([case for case in EAGER for _ in range(2)], [found for *_, found in answers])


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_every_backend_works_between_domains(backend: str, tmp_path: Path) -> None:
    """With a default group over NCCL, the process has used NCCL before it is told of the domains."""
    eager = [case for case in EAGER if case.backend != "collective"]
    answers = torchrun(RANKS, tmp_path, backend, torchrun_ranks.in_domains, eager, REPLAYED)
    assert [facts for *facts, _, _ in answers] == [[2, "cuda:0"], [2, "cuda:1"]]
    judge_eager(eager, [found for *_, found, _ in answers])
    judge_replayed(REPLAYED, [replayed for *_, replayed in answers])


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cuda:0"), ("nccl", "auto")])
def test_two_ranks_on_one_gpu_are_told_to_set_the_device(backend: str, device: str, tmp_path: Path) -> None:
    for message in torchrun(RANKS, tmp_path, backend, torchrun_ranks.one_gpu, device):
        assert "torch.cuda.set_device(LOCAL_RANK)" in message


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray, which is not installed here")
def test_every_backend_works_in_ray_actors_with_one_gpu_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ray

    monkeypatch.setenv("HOME", str(tmp_path))  # Ray leaves files there
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    class Engine:
        def run(self, rank: int) -> Any:
            import raymoe

            with raymoe.join("gpu-tests", rank, RANKS, timeout_s=60) as world:
                found = torchrun_ranks.exchange(world, EAGER, False), torchrun_ranks.exchange(world, REPLAYED, True)
                return str(world.device), os.environ["CUDA_VISIBLE_DEVICES"], *found

    ray.init(
        address="local",
        num_gpus=RANKS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
    )
    try:
        engines = [ray.remote(num_gpus=1)(Engine).remote() for _ in range(RANKS)]
        answers = ray.get([engine.run.remote(rank) for rank, engine in enumerate(engines)], timeout=240)
    finally:
        ray.shutdown()
    assert [device for device, *_ in answers] == ["cuda:0"] * RANKS
    assert {visible for _, visible, *_ in answers} == {"0", "1"}
    judge_eager(EAGER, [eager for *_, eager, _ in answers])
    judge_replayed(REPLAYED, [replayed for *_, replayed in answers])
