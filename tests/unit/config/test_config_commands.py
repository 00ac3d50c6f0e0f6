"""Packaged configs have their commands in comments, and `make exchange-full` runs those of the models."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from raymoe import cli
from raymoe.config import Job, load_job
from raymoe.packaged import packaged_config, packaged_names
from tests.python_path import REPOSITORY
from tests.unit.config.packaged_commands import commands, settings

# It replaces `raymoe` in a virtual environment and records each command's words.
RECORDING_SCRIPT = '#!/bin/sh\nprintf "%s\\n" "$@" "" >> "$(dirname "$0")/words"\n'


def parent(name: str) -> str | None:
    path = packaged_config(name)
    assert path is not None
    defaults: str | None = yaml.safe_load(path.read_text()).get("defaults")
    return defaults


MODELS = [name for name in packaged_names() if parent(name) == "exchange_gpu.yaml"]


def sweep(job: Job) -> tuple[set[object], set[object]]:
    """Return the tokens and the routings of a job's cases."""
    cases = [case.job for case in job.cases()]
    return {case.shape.tokens for case in cases}, {(case.routing.kind, case.routing.alpha) for case in cases}


def wires(job: Job) -> set[object]:
    """Return the dispatch wires, outputs and backends of a job's cases."""
    cases = [case.job.exchange for case in job.cases()]
    return {(case.wire.dispatch, case.output, case.backend) for case in cases}


SHORT = {1, 128, 4096}, {("uniform", 1.0)}
FULL = {1, 128, 4096, 8192}, {("uniform", 1.0), ("zipf", 1.2)}
FP8 = {("float8_e4m3", "raw", backend) for backend in ("fused", "staged", "row_push")}


def commands_of_target(target: str, folder: Path) -> list[list[str]]:
    """Run a target of the Makefile; return the words of every raymoe command it runs."""
    (folder / "bin").mkdir()
    stand_in = folder / "bin" / "raymoe"
    stand_in.write_text(RECORDING_SCRIPT)
    stand_in.chmod(0o755)
    (folder / ".installed").touch()
    # This make must not inherit the flags of a make that runs the tests.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    make = ["make", "--directory", str(REPOSITORY), target, f"VENV={folder}"]
    subprocess.run(make, check=True, env=environment, capture_output=True, timeout=60)
    words = (folder / "bin" / "words").read_text()
    return [command.split("\n") for command in words.removesuffix("\n\n").split("\n\n")]


@pytest.mark.parametrize("name", packaged_names())
def test_the_comments_of_a_config_have_its_command(name: str) -> None:
    """test_doc_commands.py checks every word of these commands."""
    assert name == "tune" or name in [command[0] for command in commands(name)]


def test_there_are_five_model_configs() -> None:
    assert len(MODELS) == 5


@pytest.mark.parametrize("name", MODELS)
def test_a_model_config_has_a_short_a_full_and_an_fp8_command(name: str) -> None:
    packaged = commands(name)
    assert [command[0] for command in packaged] == [name] * 3
    plain, full, fp8 = (load_job(name, settings(command)) for command in packaged)
    assert plain == load_job(name)
    assert sweep(plain) == sweep(fp8) == SHORT and sweep(full) == FULL
    assert wires(plain) == wires(full) and len(wires(plain)) == 5
    assert wires(fp8) == FP8


def test_make_exchange_full_runs_every_model_in_full_and_as_fp8(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran = commands_of_target("exchange-full", tmp_path)
    want = []
    for name in MODELS:
        _, full, fp8 = map(settings, commands(name))
        want += [(name, [f"name={name}_full", *full]), (name, [f"name={name}_fp8", *full, *fp8])]
    assert sorted((command[1], list(settings(command[1:]))) for command in ran) == sorted(want)
    for verb, *command in ran:
        assert verb == "run" and cli.main(["validate", *command]) == 0, capsys.readouterr().err
        job = load_job(command[0], settings(command))
        assert sweep(job) == FULL
        assert len(job.cases()) == (24 if wires(job) == FP8 else 40)
