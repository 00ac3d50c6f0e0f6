"""The source distribution has every file of the repository, and its tests of pages and packages pass in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.python_path import REPOSITORY
from tests.unit.house.packages import built_wheel, unpacked_sdist

PAGES = ("tests/unit/docs", "tests/unit/config", "tests/unit/house/test_house.py")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked_sdist(tmp_path_factory.mktemp("sdist"))


def files_of_the_repository() -> set[str]:
    done = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("this tree is no checkout, so nothing lists its files")
    return {name for name in done.stdout.splitlines() if (REPOSITORY / name).is_file()}


def test_it_has_every_file_of_the_repository(unpacked: Path) -> None:
    files = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert files_of_the_repository() - files == set()


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_its_tests_of_pages_pass_in_it(unpacked: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PAGES],
        cwd=unpacked,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr


@pytest.mark.thorough
def test_a_wheel_is_built_from_it(unpacked: Path, tmp_path: Path) -> None:
    assert built_wheel(tmp_path, unpacked).stat().st_size > 100_000
