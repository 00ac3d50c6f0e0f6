"""`pip install raymoe-*.whl && raymoe run quickstart` in an empty folder, without this repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.short_folder import short_base
from tests.unit.house.packages import built_wheel

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]
EVERY_MODULE = """
import importlib, pkgutil, raymoe
others = tuple(f"raymoe.integrations.{name}" for name in ("torchtitan", "megatron", "vllm"))
for module in pkgutil.walk_packages(raymoe.__path__, "raymoe."):
    if module.name not in others and module.name != "raymoe.__main__":
        importlib.import_module(module.name)
print(raymoe.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("wheel"))


def installed(wheel: Path, folder: Path) -> Path:
    """Install the wheel into an environment that takes all other packages from the present one; return its `bin`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    site = next(folder.glob("lib/python*/site-packages"))
    # A path in a .pth file is searched after `site`, and the .pth files there, as an editable raymoe's, are not read.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    done = subprocess.run(
        [*command, "--no-deps", "--no-index", "--ignore-installed", str(wheel)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def environment(programs: Path) -> dict[str, str]:
    names = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    return {
        **names,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "RAY_TMPDIR": short_base(23),
        "CUDA_VISIBLE_DEVICES": "",
    }


def run(line: str, programs: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment(programs),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_an_installed_wheel_runs_quickstart_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    programs = installed(wheel, tmp_path / "environment")
    imported = run(f"python -c '{EVERY_MODULE}'", programs, tmp_path / "modules")
    assert imported.returncode == 0, imported.stderr
    assert Path(imported.stdout.strip()).is_relative_to(tmp_path / "environment"), "another raymoe was imported"
    done = run("raymoe run quickstart && raymoe report runs/*", programs, tmp_path / "empty")
    assert done.returncode == 0, done.stdout + done.stderr
    [page] = (tmp_path / "empty").glob("runs/*/report.html")
    assert page.stat().st_size > 10_000 and "p50 us" in done.stdout


@pytest.mark.parametrize("missing", ["configs/quickstart.yaml", "report/page.css", "gang/supervisor.py"])
def test_quickstart_fails_without_a_file_of_the_wheel(wheel: Path, tmp_path: Path, missing: str) -> None:
    programs = installed(wheel, tmp_path / "environment")
    site = next((tmp_path / "environment").glob("lib/python*/site-packages"))
    (site / "raymoe" / missing).unlink()
    done = run("raymoe run quickstart", programs, tmp_path / "empty")
    assert done.returncode != 0 or not list((tmp_path / "empty").glob("runs/*/report.html"))


def test_every_file_of_the_package_is_installed(wheel: Path, tmp_path: Path) -> None:
    installed(wheel, tmp_path / "environment")
    site = next((tmp_path / "environment").glob("lib/python*/site-packages"))
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("raymoe/")}
    assert {name for name in names if not (site / name).is_file()} == set()
