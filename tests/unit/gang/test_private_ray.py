"""A Ray that a run starts inherits the token, the directory and the loopback address. These tests need no Ray."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raymoe.errors import ClusterError
from raymoe.gang import private_ray as module
from raymoe.gang.private_ray import DIRECTORY, LOOPBACK_ONLY, MODE, TOKEN, TOKEN_PATH, private_ray
from tests.short_folder import short_base

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which only root can do")


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "home"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(path))
    return path


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def own_token(home: Path) -> Path:
    """A token file as this user should have it."""
    path = home / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700)
    path.write_text("known")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_a_token_is_made_for_this_user_only(home, mask):
    with umask(mask), private_ray({}):
        pass
    token = home / ".ray" / "auth_token"
    assert (mode(token), mode(token.parent)) == (0o600, 0o700)
    assert len(bytes.fromhex(token.read_text())) == 32
    assert [file.name for file in token.parent.iterdir()] == ["auth_token"]


def test_a_token_that_only_this_user_reads_is_kept(home):
    own_token(home)
    environment: dict[str, str] = {}
    with private_ray(environment):
        assert TOKEN not in environment
    assert (home / ".ray" / "auth_token").read_text() == "known"


def readable(token: Path) -> None:
    token.chmod(0o644)


def of_another_user(token: Path) -> None:
    os.chown(token, NOBODY, NOBODY)


def link(token: Path) -> None:
    token.rename(token.with_name("elsewhere"))
    token.symlink_to(token.with_name("elsewhere"))


def dangling_link(token: Path) -> None:
    token.unlink()
    token.symlink_to(token.parents[1] / "victim")


def empty(token: Path) -> None:
    token.write_text("")


def fifo(token: Path) -> None:
    token.unlink()
    os.mkfifo(token, 0o600)


def in_a_folder_for_all(token: Path) -> None:
    token.parent.chmod(0o777)


def in_a_folder_of_another_user(token: Path) -> None:
    os.chown(token.parent, NOBODY, NOBODY)


@pytest.mark.parametrize(
    "plant",
    [
        readable,
        pytest.param(of_another_user, marks=as_root),
        link,
        dangling_link,
        empty,
        fifo,
        in_a_folder_for_all,
        pytest.param(in_a_folder_of_another_user, marks=as_root),
    ],
)
def test_a_token_that_others_may_know_is_not_used(home, plant):
    plant(own_token(home))
    seen = []
    for _ in range(2):
        environment: dict[str, str] = {}
        with private_ray(environment):
            seen.append(environment[TOKEN])
        assert TOKEN not in environment
    assert seen[0] != seen[1] and all(len(bytes.fromhex(token)) == 32 for token in seen), "one for each run"
    assert not (home / "victim").exists(), "a link was not followed"


@pytest.mark.parametrize("given", [{TOKEN: "mine"}, {TOKEN_PATH: "/mine"}, {MODE: "disabled"}, {MODE: "DISABLED"}])
def test_what_the_user_chose_is_kept(home, given):
    environment = dict(given)
    with private_ray(environment):
        assert {name: environment.get(name) for name in (TOKEN, TOKEN_PATH, MODE)} == {
            name: given.get(name) for name in (TOKEN, TOKEN_PATH, MODE)
        }
    assert environment == given
    assert not (home / ".ray").exists()


def test_a_home_that_cannot_be_written(home):
    (home / ".ray").write_text("a file")
    environment: dict[str, str] = {}
    with private_ray(environment):
        assert len(environment[TOKEN]) == 64


def test_runs_that_start_together_agree_on_one_token(home):
    def go(_: int) -> bool:
        environment: dict[str, str] = {}
        with private_ray(environment):
            return TOKEN in environment

    with ThreadPoolExecutor(8) as threads:
        assert not any(threads.map(go, range(32)))
    assert [file.name for file in (home / ".ray").iterdir()] == ["auth_token"]


def test_the_directory_is_for_this_user_only_and_goes_when_it_is_empty(home):
    environment: dict[str, str] = {}
    with umask(0), private_ray(environment) as ray:
        directory = Path(environment[DIRECTORY])
        assert ray == directory / "ray" and mode(directory) == 0o700
        assert environment[LOOPBACK_ONLY] == "0"
        ray.mkdir()
    assert environment == {} and not directory.exists()
    with private_ray(environment) as ray:
        directory = Path(environment[DIRECTORY])
        (ray / "session").mkdir(parents=True)
    assert (ray / "session").exists(), "logs of a run that failed stay"
    (ray / "session").rmdir()
    ray.rmdir()
    directory.rmdir()


@pytest.fixture
def short(tmp_path_factory) -> Iterator[Path]:
    """A folder with a path that is short enough for Ray's sockets."""
    path = Path(short_base(8), f"rm{os.getpid()}")
    path.mkdir(mode=0o700)
    yield path
    for inside in sorted(path.rglob("*"), reverse=True):
        inside.rmdir()
    path.rmdir()


@pytest.mark.parametrize("name", [DIRECTORY, "TMPDIR"])
def test_the_directory_lies_where_the_user_says(home, short, name):
    environment = {name: str(short)}
    with private_ray(environment):
        assert Path(environment[DIRECTORY]).parent == short
    assert environment == {name: str(short)}


def test_ray_s_own_variable_goes_first(home, short):
    environment = {"TMPDIR": str(short.parent), DIRECTORY: str(short)}
    with private_ray(environment):
        assert Path(environment[DIRECTORY]).parent == short


@pytest.fixture(autouse=True)
def last(short, monkeypatch) -> Path:
    """The folder that is taken where the user names none that can be. Not /tmp, which may be full."""
    monkeypatch.setattr(module, "_LAST_BASE", str(short))
    return short


def test_a_path_too_long_for_a_socket_is_not_taken(home, tmp_path, last):
    assert len(str(tmp_path)) > module._LONGEST_BASE
    environment = {DIRECTORY: str(tmp_path)}
    with private_ray(environment) as ray:
        assert Path(environment[DIRECTORY]).parent == last
        session = f"session_2026-11-23_06-36-46_086719_{2**22}"  # the largest pid
        assert len(f"{ray}/{session}/sockets/plasma_store".encode()) <= 107


@pytest.mark.parametrize("plant", ["for all", pytest.param("of another user", marks=as_root), "missing"])
def test_a_folder_where_others_could_exchange_it_is_not_taken(home, short, last, plant):
    folder = short / "base"
    if plant != "missing":
        folder.mkdir()
    if plant == "for all":
        folder.chmod(0o777)
    elif plant == "of another user":
        os.chown(folder, NOBODY, NOBODY)
    environment = {DIRECTORY: str(folder)}
    with private_ray(environment):
        assert Path(environment[DIRECTORY]).parent == last


def test_a_sticky_folder_is_taken(home, short):
    (short / "t").mkdir()
    (short / "t").chmod(0o1777)
    environment = {DIRECTORY: str(short / "t")}
    with private_ray(environment):
        assert Path(environment[DIRECTORY]).parent == short / "t"


def test_a_full_disk_is_told(home, last, monkeypatch):
    def full(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.tempfile, "mkdtemp", full)
    reason = rf"no directory can be made in {last} \(No space left on device\)"
    with pytest.raises(ClusterError, match=reason) as caught, private_ray({}):
        pass
    assert caught.value.exit_code == 3
