"""raymoe inside vLLM 0.32 for CPUs, the real package: two ranks with data-parallel attention and experts on both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import BROKEN_BY_VLLM, ROOT, python_of
from tests.hosts.vllm_prompts import LENGTHS, SPREADS

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]
GROUP = "vllm.general_plugins"
WATCHED = "raymoe_watched = tests.hosts.vllm_watched:register"

RunVllm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_vllm(tmp_path: Path) -> RunVllm:
    """`run_vllm(module, *arguments)` runs a module where vLLM finds the entry points of this project."""
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    installed = tmp_path / "raymoe-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: raymoe\nVersion: 0\n")
    lines = [f"[{GROUP}]", *(f"{name} = {where}" for name, where in plugins.items()), WATCHED]
    (installed / "entry_points.txt").write_text("\n".join(lines))

    def run(module: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        python = python_of("vllm", without=BROKEN_BY_VLLM)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1", **variables}
        command = [str(python), "-m", module, *arguments]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, start_new_session=True, **streams) as process:
            try:
                out, err = process.communicate(timeout=280)
            finally:
                with suppress(ProcessLookupError):  # none is left
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, out[-3000:] + err[-6000:]
        return subprocess.CompletedProcess(command, 0, out, err)

    return run


def result_of(done: subprocess.CompletedProcess[str]) -> Any:
    """Return the last line, which is JSON."""
    return json.loads(done.stdout.splitlines()[-1])["result"]


@pytest.mark.parametrize(
    ("dtype", "options", "bound"),
    [
        ("float32", {}, 1e-4),
        ("bfloat16", {}, 0.2),
        ("float32", {"layout": "token"}, 1e-4),
        ("float32", {"experts": "raymoe"}, 1e-4),
    ],
    ids=str,
)
def test_two_ranks_generate_the_tokens_of_one_process(
    run_vllm: RunVllm, dtype: str, options: dict[str, str], bound: float
) -> None:
    """Three calls: with uneven prompts, and with none on either rank. A rank that has none left still takes part.

    A step has two dispatches, one for each layer. There is a step for each token that the longest prompt gets.
    """
    result = result_of(run_vllm("tests.hosts.vllm_model", dtype, json.dumps(options)))
    (alone,) = result["alone"]
    assert alone["loaded"] and alone["registered"]
    assert len({token for each in alone["found"] for token in each["tokens"]}) > 10, "tokens depend on the prompts"
    if dtype == "float32":  # in bfloat16 two experts may be equal
        assert len({expert for layer in alone["routes"] for row in layer for expert in row}) > 4
        assert result["spread"][1]["routes"] == alone["routes"], "vLLM's routers record what they do in one process"
    for rank, ran in enumerate(result["spread"]):
        for spread, call in zip(SPREADS, ran["calls"], strict=True):
            assert call["dispatches"] == 2 * max(LENGTHS[index] for index in [*spread[0], *spread[1]])
            for index, have in zip(spread[rank], call["found"], strict=True):
                want = alone["found"][index]
                assert have["tokens"] == want["tokens"] and len(have["tokens"]) == LENGTHS[index]
                assert have["logprobs"] == pytest.approx(want["logprobs"], abs=bound)


def test_without_its_key_vllm_keeps_its_own_dispatch(run_vllm: RunVllm) -> None:
    """vLLM's own expert parallelism is not there for CPUs, which shows that it is used."""
    done = run_vllm("tests.hosts.vllm_model", "own")
    for ran in result_of(done):
        assert ran["raised"].startswith("RuntimeError: Worker failed with error") and ran["dispatches"] == 0
    assert "\nNotImplementedError" in done.stdout + done.stderr or "] NotImplementedError" in done.stdout + done.stderr
    assert "raymoe (" not in done.stdout + done.stderr


def test_a_plugin_that_is_off_loads_nothing(run_vllm: RunVllm) -> None:
    (ran,) = result_of(run_vllm("tests.hosts.vllm_model", "alone", VLLM_PLUGINS="none"))
    assert not ran["loaded"] and not ran["registered"] and len(ran["found"]) == len(LENGTHS)


def test_a_killed_worker_ends_the_engine_of_the_other_rank_and_is_named(run_vllm: RunVllm) -> None:
    """Rank 1 is killed after both ranks agreed on a step, in a decode step of it. The limit of waits is 5 s."""
    ended, lost = result_of(run_vllm("tests.hosts.vllm_model", "killed"))
    assert "rank 0 waited 5.0 s for rank 1 in dispatch" in ended["raised"]
    assert ended["seconds"] < 30 and lost["raised"]


def test_what_it_cannot_take_is_refused_by_a_sentence(run_vllm: RunVllm) -> None:
    said = result_of(run_vllm("tests.hosts.vllm_refusals"))
    assert said == {
        "nothing": None,
        "compiled": "torch.compile cannot trace it on CPUs: give enforce_eager",
        "other backend": (
            "all2all_backend is deepep_v2: leave it out, and raymoe takes the place of allgather_reducescatter"
        ),
        "elastic": "elastic EP is on, and ranks of a world do not change: leave it out",
        "lora": "LoRA is on, whose experts need to know the adapter of each row: leave it out",
        "round robin": "experts are placed round_robin, and raymoe places them linear",
        "monolithic": "SimpleNamespace has no modular kernel here: take another moe_backend",
        "no kernel": "SimpleNamespace has no modular kernel here: take another moe_backend",
        "per token": (
            "experts take rows as torch.float8_e4m3fn with blocks of None, and raymoe brings rows as torch.bfloat16 "
            "or as float8_e4m3fn with blocks of 128"
        ),
        "blocks": None,
        "quantised by the experts": None,
        "own": None,
        "own, fp8": None,
        "own, other blocks": (
            "its weights are those of Fp8MoEMethod, neither wide nor fp8 in blocks of 128: "
            'leave out "experts": "raymoe"'
        ),
        "own, another activation": 'its experts are not SwiGLU without biases: leave out "experts": "raymoe"',
        "own, biases": 'its experts are not SwiGLU without biases: leave out "experts": "raymoe"',
        "own, padded": 'UnquantizedFusedMoEMethod pads its experts here: leave out "experts": "raymoe"',
        "own, round robin": "experts are placed round_robin, and raymoe places them linear",
    }
