"""Reads a trace: expert ids in a `.npy` file, which is not trusted. Loads no torch: commands read traces before a run.

`numpy.load` also takes archives and pickled objects, waits for a FIFO, and allocates as many values as a header claims.
This reader takes only files that `numpy.save` writes for an array of integers. It compares the header with the size of
the file before it allocates.
"""

from __future__ import annotations

import ast
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy

from raymoe.config import Job
from raymoe.config.sections import MOE
from raymoe.errors import ConfigError, DataRefused, Problem

MOST_IDS = 2**27
"""The ids of a file. They take 1 GiB on each rank."""
MOST_HEADER_BYTES = 1024  # an array of integers needs about 100
MOST_DIMENSIONS = 3

_MAGIC = b"\x93NUMPY\x01\x00"
_INTEGER = re.compile(r"[<>|=]?[iu][1248]")
_ADVICE = "save the ids with numpy.save, integers of shape [tokens, topk] or [steps, tokens, topk]"

Ids = numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.signedinteger]]


@dataclass(frozen=True)
class TraceShape:
    """The numbers of a job that a trace must match."""

    ranks: int
    tokens: int
    topk: int
    experts: int


def check_all(job: Job) -> None:
    """Read the traces of all cases, and compare shapes and ids with the job. Raises ConfigError with all problems.

    Ranks check again: a file may change, and a machine of a cluster may have another one.
    """
    problems = list(dict.fromkeys(_trace_problems(job)))
    if len(problems) == 1:
        raise ConfigError(str(problems[0]))
    if problems:
        raise ConfigError(f"{len(problems)} problems with traces; the first is {problems[0]}", problems)


def _trace_problems(job: Job) -> Iterator[Problem]:
    tables: dict[str, Ids] = {}
    for case in job.cases():
        routing, shape = case.job.routing, case.job.shape
        if case.job.workload not in MOE or routing.kind != "trace" or routing.file is None:
            continue
        try:
            if routing.file not in tables:
                tables = {routing.file: read_ids(routing.file)}  # one at a time: a trace may take 1 GiB
            wanted = TraceShape(case.job.world.ranks, shape.tokens, shape.topk, shape.experts)
            fitting(tables[routing.file], routing.file, wanted)
        except (ConfigError, DataRefused) as error:
            yield Problem("", None, "routing.file", None, str(error), None)


def fitting(ids: Ids, path: str, shape: TraceShape) -> Ids:
    """Return the ids as [steps, tokens, topk] if a job of this shape can use them, else raise the reason."""
    tokens, topk = ids.shape[-2:] if ids.ndim in (2, 3) else (0, 0)
    if topk != shape.topk or tokens not in (shape.tokens, shape.ranks * shape.tokens):
        raise ConfigError(
            f"{path}: the job needs ids of shape [{shape.tokens} or {shape.ranks * shape.tokens}, {shape.topk}], "
            f"or a dimension of steps before these two; the file holds {list(ids.shape)}: change shape.tokens "
            "and shape.topk, or cut the file"
        )
    table = ids.reshape(-1, tokens, topk)
    if table.size == 0:
        raise ConfigError(f"{path}: the trace holds no steps: give at least one")
    low, high = int(table.min()), int(table.max())
    if low < -1 or high >= shape.experts:
        raise DataRefused(
            f"{path}: ids go from {low} to {high}, and with {shape.experts} experts they must be in "
            f"[-1, {shape.experts - 1}]: change shape.experts or the file"
        )
    return table


def read_ids(path: str) -> Ids:
    """Read the ids of a trace, in the type that the file has. Raises ConfigError."""
    try:
        # Non-blocking, because opening a FIFO without a writer would hang before it can be refused.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _refused(path, "is not a regular file")
            return _read(path, file, status.st_size)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise _refused(path, f"the trace cannot be read ({reason})") from error


def _read(path: str, file: BinaryIO, nbytes: int) -> Ids:
    if file.read(len(_MAGIC)) != _MAGIC:
        raise _refused(path, "not a .npy file of version 1.0")
    header_bytes = int.from_bytes(file.read(2), "little")
    if header_bytes > MOST_HEADER_BYTES:
        raise _refused(path, f"not a .npy file of integers: its header has {header_bytes} bytes")
    header = _header(path, file.read(header_bytes))
    count, room = math.prod(header.shape), nbytes - file.tell()
    if count > MOST_IDS:
        raise _refused(path, f"the trace claims {count} ids, and at most {MOST_IDS} are read")
    if count * header.dtype.itemsize > room:
        raise _refused(
            path, f"the trace claims {count} ids of {header.dtype.itemsize} bytes and holds {room} bytes of them"
        )
    ids = numpy.frombuffer(file.read(count * header.dtype.itemsize), header.dtype)
    if ids.size != count:
        raise _refused(path, "the trace became shorter while it was read")
    return ids.reshape(header.shape, order="F" if header.fortran_order else "C")


@dataclass(frozen=True)
class _Header:
    dtype: numpy.dtype[numpy.signedinteger]
    shape: tuple[int, ...]
    fortran_order: bool


def _header(path: str, text: bytes) -> _Header:
    """Read the header: a dictionary of constants, whose text no error repeats."""
    try:
        header = ast.literal_eval(text.decode("latin-1").strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise _refused(path, "not a .npy file: its header cannot be read") from error
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise _refused(path, "not a .npy file: its header lacks descr, fortran_order or shape")
    descr, shape, fortran_order = header["descr"], header["shape"], header["fortran_order"]
    if not isinstance(descr, str) or not _INTEGER.fullmatch(descr):
        raise _refused(path, "the trace must hold integers of 1 to 8 bytes")
    sizes = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    if not sizes or len(shape) > MOST_DIMENSIONS or type(fortran_order) is not bool:
        raise _refused(path, f"not a .npy file of at most {MOST_DIMENSIONS} dimensions")
    return _Header(numpy.dtype(descr), shape, fortran_order)


def _refused(path: str, reason: str) -> ConfigError:
    return ConfigError(f"{path}: {reason}: {_ADVICE}")
