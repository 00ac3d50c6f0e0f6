"""The cache is used only if nobody else could have written it. Each test plants a file or folder of another user."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymoe.cuda import cache
from raymoe.cuda.jit import Compiler, Cubins, KernelSource
from raymoe.errors import CannotWrite
from raymoe.transport.choice import FILE, Table, TransportRule

NOBODY = 65534
KEY, PLANTED = "0" * 64, b"machine code of somebody else"
TABLE = Table("NVIDIA H100", (TransportRule("pairs", "put", 0, "copy_engine"),))
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which only root can do")


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def entry_of(folder: Path) -> Path:
    (path,) = [each for each in folder.rglob("*") if each.is_file()]
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def open_folder(folder: Path) -> None:
    folder.chmod(0o777)


def open_folder_to_a_group(folder: Path) -> None:
    folder.chmod(0o770)


def another_users_folder(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)


def link_to_a_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


def another_users_file(folder: Path) -> None:
    os.chown(entry_of(folder), NOBODY, NOBODY)


def open_file(folder: Path) -> None:
    entry_of(folder).chmod(0o666)


def link_to_a_file(folder: Path) -> None:
    entry = entry_of(folder)
    entry.rename(folder.with_name("elsewhere"))
    entry.symlink_to(folder.with_name("elsewhere"))


PLANTS = {
    "a world-writable folder": (open_folder, "its mode 0777 lets other users write it"),
    "a folder that a group can write": (open_folder_to_a_group, "its mode 0770 lets other users write it"),
    "a folder of another user": (another_users_folder, "it belongs to user 65534, not to user 0"),
    "a link to a folder": (link_to_a_folder, "it is a symbolic link"),
    "a file of another user": (another_users_file, "it belongs to user 65534, not to user 0"),
    "a world-writable file": (open_file, "its mode 0666 lets other users write it"),
    "a link to a file": (link_to_a_file, "it is a symbolic link"),
}
plants = pytest.mark.parametrize(
    ("plant", "says"),
    [
        pytest.param(plant, says, id=name, marks=[as_root] if "another user" in name else [])
        for name, (plant, says) in PLANTS.items()
    ],
)


@plants
def test_a_planted_cubin_is_not_loaded(tmp_path, plant, says):
    folder = tmp_path / "cache"
    Cubins(folder).put(KEY, PLANTED)
    assert Cubins(folder).get(KEY) == PLANTED, "with nothing planted it is loaded"
    plant(folder)
    with pytest.warns(RuntimeWarning, match=says) as told:
        cubins = Cubins(folder)
        assert cubins.get(KEY) is None
        assert cubins.get(KEY) is None
    assert len(told) == 1, "a sentence says so once"


@pytest.mark.parametrize("plant", [open_folder, open_file])
def test_the_kernel_is_compiled_instead(tmp_path, plant):
    sources = tmp_path / "kernels"
    sources.mkdir()
    (sources / "tiny.cu").write_text('extern "C" __global__ void tiny(int* out) { *out = 7; }\n')
    tiny, folder = KernelSource("tiny"), tmp_path / "cache"
    honest = Compiler(sources, Cubins(folder)).compiled(tiny, "sm_90a")
    Cubins(folder).put(honest.key, PLANTED)
    plant(folder)
    with pytest.warns(RuntimeWarning, match="lets other users write it"):
        assert Compiler(sources, Cubins(folder)).compiled(tiny, "sm_90a").cubin == honest.cubin


@pytest.mark.parametrize("plant", [open_file, link_to_a_file])
def test_an_entry_that_is_not_trusted_is_replaced_and_what_it_led_to_is_kept(tmp_path, plant):
    folder = tmp_path / "cache"
    Cubins(folder).put(KEY, PLANTED)
    plant(folder)
    with pytest.warns(RuntimeWarning):
        cubins = Cubins(folder)
        assert cubins.get(KEY) is None
    cubins.put(KEY, b"compiled here")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Cubins(folder).get(KEY) == b"compiled here"
    elsewhere = tmp_path / "elsewhere"
    assert not elsewhere.exists() or PLANTED in elsewhere.read_bytes()


@plants
def test_a_planted_table_is_not_used(tmp_path, plant, says):
    folder = tmp_path / "cache"
    TABLE.save(folder)
    assert Table.load(folder) == TABLE, "with nothing planted it is used"
    plant(folder)
    with pytest.warns(RuntimeWarning, match=says):
        assert Table.load(folder) is None


def test_a_table_is_not_saved_where_others_can_replace_it(tmp_path):
    with umask(0):
        (tmp_path / "cache").mkdir()
    with pytest.raises(CannotWrite, match=r"its mode 0777 lets other users write it.*RAYMOE_CACHE_DIR"):
        TABLE.save(tmp_path / "cache")


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_nothing_that_lies_in_the_way_of_a_table_is_followed(tmp_path, kind):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (FILE, f"{FILE}.{os.getpid()}", f".{FILE}.tmp"):
        if kind == "link":
            (tmp_path / name).symlink_to(victim)
        else:
            os.mkfifo(tmp_path / name)
    TABLE.save(tmp_path)  # a FIFO that it waited for would be a hang, which pytest's timeout ends
    assert victim.read_text() == "precious"
    assert Table.load(tmp_path) == TABLE


def test_a_fifo_in_place_of_a_file_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / FILE, 0o600)
    with pytest.warns(RuntimeWarning, match="it is not a regular file"):
        assert Table.load(tmp_path) is None


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_folders_are_0700_and_files_0600_whatever_the_umask(tmp_path, mask):
    folder = tmp_path / "above" / "cache"
    with umask(mask):
        Cubins(folder).put(KEY, b"code")
        TABLE.save(folder)
    assert {stat.S_IMODE(each.stat().st_mode) for each in (folder, folder.parent)} == {0o700}
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.rglob("*")} == {0o600}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Cubins(folder).get(KEY) == b"code" and Table.load(folder) == TABLE


def test_a_folder_that_is_exchanged_after_the_check_is_not_used(tmp_path):
    honest, other = tmp_path / "cache", tmp_path / "other"
    for folder, content in ((honest, b"honest"), (other, PLANTED)):
        folder.mkdir(mode=0o700)
        (folder / "file").write_bytes(content)
    with cache.private_folder(honest) as opened:
        honest.rename(tmp_path / "aside")
        other.rename(honest)
        assert cache.read(opened, "file", 100) == b"honest"
        cache.write(opened, "file", b"new")
    assert (honest / "file").read_bytes() == PLANTED


def test_a_folder_that_was_deleted_is_made_again(tmp_path):
    cubins = Cubins(tmp_path / "cache")
    cubins.put(KEY, b"code")
    shutil.rmtree(tmp_path / "cache")
    assert cubins.get(KEY) is None
    cubins.put(KEY, b"code")
    assert cubins.get(KEY) == b"code"


def test_the_least_recently_read_entries_make_room(tmp_path):
    names = [f"{index}.cubin" for index in range(4)]
    with cache.private_folder(tmp_path / "cache", create=True) as folder:
        for age, name in enumerate(names):
            cache.write(folder, name, bytes(100))
            os.utime(name, (1000 - age, 1000), dir_fd=folder)
        cache.write(folder, "transports.json", bytes(500))
        assert cache.read(folder, names[3], 100) == bytes(100), "the oldest is read now"
        cache.bound(folder, ".cubin", 250)
    assert names_in(tmp_path / "cache") == [names[0], names[3], "transports.json"]


def test_what_a_killed_writer_left_goes_after_an_hour(tmp_path):
    with cache.private_folder(tmp_path / "cache", create=True) as folder:
        for name, age_s in ((".unfinished-old", 4000), (".unfinished-new", 0)):
            cache.write(folder, name, b"half")
            os.utime(name, (time.time() - age_s,) * 2, dir_fd=folder)
        cache.bound(folder, ".cubin", 100)
    assert names_in(tmp_path / "cache") == [".unfinished-new"]


def test_a_file_larger_than_the_limit_is_not_read(tmp_path):
    with cache.private_folder(tmp_path / "cache", create=True) as folder:
        cache.write(folder, "file", bytes(101))
        with pytest.raises(OSError, match="101 bytes, at most 100 are read"):
            cache.read(folder, "file", 100)
