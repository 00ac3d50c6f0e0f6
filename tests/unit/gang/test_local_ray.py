"""The Ray of a run's own: its settings, the limits that it needs, and the removal of its session directory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from raymoe.errors import ClusterError
from raymoe.gang import local_ray


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of Ray's sessions."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray"


def session(folder: Path, name: str) -> Path:
    (folder / name / "logs").mkdir(parents=True)
    (folder / name / "logs" / "raylet.out").write_text("x")
    return folder / name


def test_a_setting_of_the_user_stays() -> None:
    environment = {"RAY_health_check_period_ms": "7"}
    local_ray.configure(environment)
    assert environment == {**local_ray.SETTINGS, "RAY_health_check_period_ms": "7"}


@pytest.mark.parametrize("name", ["RAY_TMPDIR", "TMPDIR"])
def test_the_directory_is_where_ray_looks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from ray._common.utils import get_default_ray_temp_dir

    for variable in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(variable, raising=False)
    assert str(local_ray.temporary_directory()) == get_default_ray_temp_dir()
    monkeypatch.setenv(name, "/elsewhere")
    assert str(local_ray.temporary_directory()) == get_default_ray_temp_dir() == "/elsewhere/ray"


def test_a_full_directory_is_refused_with_the_room_asked_and_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_ray.check_machine()
    monkeypatch.setattr(local_ray, "NEEDED_BYTES", 2**60)
    with pytest.raises(ClusterError, match=rf"{folder} has \d+ MiB free of the {2**40} it needs; make room"):
        local_ray.check_machine()


def test_the_session_of_a_process_is_found_by_its_pid_and_its_age(folder: Path) -> None:
    earlier = session(folder, "session_2026-01-01_00-00-00_000001_42")
    began = time.time() + 0.01
    os.utime(earlier)
    assert local_ray.session_of(42, since=began) is None, "an earlier process had this pid"
    time.sleep(0.05)
    own = session(folder, "session_2026-01-01_00-00-01_000001_42")
    session(folder, "session_2026-01-01_00-00-01_000001_142")
    (folder / "session_2026-01-01_00-00-02_000001_42").symlink_to(earlier)
    assert local_ray.session_of(42, since=began) == own


def test_a_removed_session_takes_its_own_link_along_only(folder: Path) -> None:
    removed, other = session(folder, "session_a_1"), session(folder, "session_b_2")
    latest = folder / "session_latest"
    latest.symlink_to(removed)
    local_ray.remove_session(removed)
    assert sorted(path.name for path in folder.iterdir()) == ["session_b_2"]
    latest.symlink_to(other)
    local_ray.remove_session(session(folder, "session_c_3"))
    assert latest.resolve() == other
