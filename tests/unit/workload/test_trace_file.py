"""Traces that are not what they say: each is refused with a sentence, at once, without memory for what it claims."""

from __future__ import annotations

import io
import os
import pickle
import resource
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from raymoe.errors import ConfigError
from raymoe.workload import trace_file
from raymoe.workload.inputs import Routing
from raymoe.workload.trace_file import read_ids

SECRET = "hunter2"


def npy(descr: object, shape: object, data: bytes = b"", order: object = False, version: bytes = b"\1\0") -> bytes:
    """A file with this header, whatever it claims."""
    return with_header(repr({"descr": descr, "fortran_order": order, "shape": shape}), data, version)


def with_header(header: str, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    length = len(header).to_bytes(2 if version == b"\1\0" else 4, "little")
    return b"\x93NUMPY" + version + length + header.encode() + data


def draw_from(path: Path) -> None:
    Routing("trace", seed=0, ranks=2, tokens=2, experts=4, topk=2, file=str(path)).draw(0, 0)


def saved(array: object) -> bytes:
    file = io.BytesIO()
    numpy.save(file, numpy.asarray(array), allow_pickle=True)
    return file.getvalue()


def archive(content: bytes = b"") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        written.writestr("a.npy", content)
    return file.getvalue()


class Planted:
    """Unpickled, it makes a folder."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, ("unpickled",)


HUGE = 2**60
LIES = {
    "nothing": (b"", "not a .npy file"),
    "text": (f"root:{SECRET}:0:0\n".encode(), "not a .npy file"),
    "a cut header": (saved([[1, 2]])[:20], "header cannot be read"),
    "cut data": (saved([[1, 2], [3, 4]])[:-1], "claims 4 ids of 8 bytes and holds 31 bytes"),
    "an archive": (archive(saved([[1, 2]])), "not a .npy file"),
    "a bad archive": (b"PK\3\4" + b"x" * 100, "not a .npy file"),
    "a cut archive": (archive(saved([[1, 2]]))[:-20], "not a .npy file"),
    "a pickle": (pickle.dumps(Planted()), "not a .npy file"),
    "pickled objects": (saved([Planted(), Planted()]), "must hold integers"),
    "objects of a version 2": (npy("|O", (1,), pickle.dumps(Planted()), version=b"\2\0"), "not a .npy file"),
    "floats": (saved([[1.0, 2.0]]), "must hold integers"),
    "a structure": (npy([("a", "<i8"), ("b", "<i8")], (1, 1), bytes(16)), "must hold integers"),
    "a type with a name": (npy(SECRET, (1, 1), bytes(16)), "must hold integers"),
    "wide integers": (npy("<i16", (1, 1), bytes(16)), "must hold integers"),
    "raw bytes": (npy("|V1000000000", (1, 1), bytes(16)), "must hold integers"),
    "a huge shape": (npy("<i8", (HUGE, 2), bytes(16)), "claims 2305843009213693952 ids, and at most"),
    "a shape that overflows": (npy("<i8", (HUGE, HUGE), bytes(16)), "and at most 134217728 are read"),
    "a shape beyond the file": (npy("<i8", (2**26, 2), bytes(16)), "claims 134217728 ids of 8 bytes and holds 16"),
    "a negative shape": (npy("<i8", (-1, 2), bytes(16)), "not a .npy file of at most 3 dimensions"),
    "a shape of fractions": (npy("<i8", (1.0, 2.0), bytes(16)), "not a .npy file of at most"),
    "a shape of truth": (npy("<i8", (True, 2), bytes(16)), "not a .npy file of at most"),
    "a shape of text": (npy("<i8", SECRET, bytes(16)), "not a .npy file of at most"),
    "many dimensions": (npy("<i8", (1,) * 60, bytes(16)), "not a .npy file of at most"),
    "no order": (npy("<i8", (1, 2), bytes(16), order=SECRET), "not a .npy file of at most"),
    "no dictionary": (with_header(f"'{SECRET}'"), "lacks descr"),
    "another dictionary": (with_header(f"{{'{SECRET}': 1}}"), "lacks descr"),
    "a call": (with_header("__import__('os').mkdir('unpickled')"), "header cannot be read"),
    "deep brackets": (with_header("[" * 1000), "header cannot be read"),
    "deep signs": (with_header("-" * 1000 + "1"), "header cannot be read|lacks descr"),
    "open text": (with_header(f"'''{SECRET}"), "header cannot be read"),
    "an indented line": (with_header(f"1\n  {SECRET}\n"), "header cannot be read"),
    "an unhashable key": (with_header("{[]: 1}"), "header cannot be read"),
    "a long header": (with_header(" " * 60000), "its header has 60000 bytes"),
    "a control character": (with_header("{'a\x1b[31m': 1}"), "lacks descr"),
}


@pytest.fixture
def little_memory():
    """No more than 1.5 GiB beyond what the process has mapped."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 3 * 2**29, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(("content", "says"), LIES.values(), ids=LIES)
def test_a_file_that_lies(tmp_path, monkeypatch, little_memory, content, says):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ids.npy"
    path.write_bytes(content)
    with warnings.catch_warnings(), pytest.raises(ConfigError, match=says) as caught:
        warnings.simplefilter("error")
        draw_from(path)
    assert caught.value.exit_code == 2
    assert str(path) in str(caught.value) and str(caught.value).isprintable()
    assert SECRET not in str(caught.value)
    assert not Path("unpickled").exists()


def test_a_large_file_is_refused_unread(tmp_path):
    path = tmp_path / "ids.npy"
    path.write_bytes(npy("<i8", (2**30, 2)))
    with path.open("r+b") as file:
        file.truncate(2**35)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="claims 2147483648 ids, and at most 134217728 are read"):
        read_ids(str(path))
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "/dev/stdin", "folder"])
def test_what_is_no_file_does_not_hang(tmp_path, kind):
    path = tmp_path / "ids.npy"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(kind)
    with pytest.raises(ConfigError, match=r"is not a regular file|cannot be read|not a \.npy file"):
        draw_from(path)


@pytest.mark.parametrize("path", ["missing.npy", "a\0b", "x" * 5000])
def test_what_is_nowhere(path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_ids(path)


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">i4", "<u4", "<i8", ">u8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_type_of_integer_in_both_orders(tmp_path, dtype, order):
    ids = numpy.asarray(numpy.arange(24).reshape(3, 4, 2), dtype=dtype, order=order)
    numpy.save(tmp_path / "ids.npy", ids)
    found = read_ids(str(tmp_path / "ids.npy"))
    assert found.dtype == ids.dtype and found.shape == (3, 4, 2)
    assert (found == ids).all()


def test_the_limit_is_of_ids(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "MOST_IDS", 8)
    (tmp_path / "8.npy").write_bytes(saved(numpy.zeros((4, 2), numpy.int8)))
    (tmp_path / "9.npy").write_bytes(saved(numpy.zeros((3, 3), numpy.int8)))
    assert read_ids(str(tmp_path / "8.npy")).shape == (4, 2)
    with pytest.raises(ConfigError, match="claims 9 ids, and at most 8 are read"):
        read_ids(str(tmp_path / "9.npy"))
