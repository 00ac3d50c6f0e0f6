"""A user without a home directory: a container that runs with a number of its own, and without HOME."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from raymoe import cli
from raymoe.cuda.cache import CACHE_VARIABLE, cache_folder
from raymoe.errors import ConfigError
from raymoe.gang.address import token_source
from raymoe.home import home
from raymoe.report.directory import RAY_JOB, place_for


@pytest.fixture(autouse=True)
def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", CACHE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_there_is_no_home_and_no_token_in_it() -> None:
    assert home() is None and token_source() is None


def test_a_job_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["submit", "quickstart", "--dry-run", "--address", "http://127.0.0.1:1"]) == 0
    assert capsys.readouterr().out.startswith("ray job submit --address http://127.0.0.1:1 ")


@pytest.mark.parametrize("command", [["jobs"], ["attach", "x"], ["submit", "quickstart"]], ids=lambda words: words[0])
def test_a_cluster_is_asked(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert cli.main([*command, "--address", "http://127.0.0.1:1"]) == 3
    assert capsys.readouterr().err.splitlines()[-1].startswith("asked for the Jobs API of the cluster at ")


def test_kernels_are_kept_in_the_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/scratch")
    assert cache_folder() == Path(f"/scratch/raymoe-cache-{os.geteuid()}")
    monkeypatch.delenv("TMPDIR")
    assert cache_folder() == Path(f"/tmp/raymoe-cache-{os.geteuid()}")


def test_results_of_a_ray_job_need_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RAY_JOB, "{}")
    with pytest.raises(ConfigError, match="this user has no home directory for the results; name a place with --out"):
        place_for(None, "quick-1")
    with pytest.raises(ConfigError, match="such as --out /results/raymoe_runs/x"):
        place_for(Path("x"), "quick-1")
