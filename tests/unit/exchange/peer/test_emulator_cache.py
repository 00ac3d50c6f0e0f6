"""The cache of libraries that the emulator builds."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.emulator import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler on this machine")


def test_who_needs_a_library_at_once_waits_for_the_one_that_builds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    builds = []

    def compile_into(folder: Path, library: Path) -> None:
        builds.append(folder)
        time.sleep(0.3)
        library.write_text("a library")

    with ThreadPoolExecutor(4) as threads:
        paths = {each.result() for each in [threads.submit(build._cached, "x", [1], compile_into) for _ in range(4)]}
    assert len(builds) == 1 and [path.read_text() for path in paths] == ["a library"]
    assert [path.suffix for path in next(iter(paths)).parent.iterdir()] == [".so"], "no lock is left"


def test_after_a_build_that_failed_the_next_one_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))

    def fail(folder: Path, library: Path) -> None:
        raise build.BuildError("a wrong text")

    with pytest.raises(build.BuildError):
        build._cached("x", [1], fail)
    assert build._cached("x", [1], lambda _, library: library.touch()).exists()
