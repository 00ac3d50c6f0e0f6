"""Where a host's packages cannot be installed, its tests are skipped with a sentence. In CI they fail."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import conftest

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_packages_that_cannot_be_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ci: str, outcome: type[Exception]
) -> None:
    ran: list[list[str]] = []

    def refuse(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        code = int("pip" in command)
        return subprocess.CompletedProcess(command, code, "", "collecting\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setenv("RAYMOE_HOSTS", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="torchtitan cannot be installed here: ERROR: No matching distribution"):
        conftest.python_of("torchtitan")
    assert [command[2] for command in ran] == ["venv", "pip"]
    assert not (tmp_path / "torchtitan" / "installed.txt").exists()


def test_an_environment_is_made_once_for_a_list_of_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[list[str]] = []

    def install(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        (tmp_path / "torchtitan").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", install)
    monkeypatch.setenv("RAYMOE_HOSTS", str(tmp_path))
    for _ in range(2):
        assert conftest.python_of("torchtitan") == tmp_path / "torchtitan" / "bin" / "python"
    assert len(ran) == 2
    (tmp_path / "torchtitan" / "installed.txt").write_text("torchtitan==0.2.0\n")
    conftest.python_of("torchtitan")
    assert len(ran) == 4, "another list is installed anew"


def test_packages_that_do_not_work_are_removed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[list[str]] = []

    def install(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        (tmp_path / "vllm").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", install)
    monkeypatch.setenv("RAYMOE_HOSTS", str(tmp_path))
    conftest.python_of("vllm", without=conftest.BROKEN_BY_VLLM)
    assert [command[3] for command in ran[1:]] == ["install", "uninstall"] and ran[2][-1] == "torchvision"
