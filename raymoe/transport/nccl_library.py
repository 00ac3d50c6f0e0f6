"""NCCL by its own C functions, in the library that torch brings.

Torch's process group does the same calls behind checks, events and a watchdog: an all-to-all of two ranks kept the
host for about 100 us there. Its watchdog also ends the process when a wait takes too long, where ours raises.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from raymoe.job.errors import WiringError

ID_BYTES = 128
_UINT8, _SUM = 1, 0
_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}


class _Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint8 * ID_BYTES),)


@functools.cache
def library() -> Any:
    """`libnccl.so.2`: the one that torch has loaded, or the one that is installed beside it."""
    beside = Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnccl.so.2")
    reasons = []
    for name in ("libnccl.so.2", *map(str, beside)):
        try:
            found = ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
            continue
        return _declared(found)
    raise WiringError(
        f"NCCL was asked for and its library cannot be loaded ({'; '.join(reasons)}); install torch with it"
    )


def _declared(found: Any) -> Any:
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    arguments = {
        "ncclGetUniqueId": [ctypes.POINTER(_Id)],
        "ncclCommInitRank": [ctypes.POINTER(pointer), number, _Id, number],
        "ncclCommAbort": [pointer],
        "ncclCommDestroy": [pointer],
        "ncclGroupStart": [],
        "ncclGroupEnd": [],
        "ncclSend": [pointer, size, number, number, pointer, pointer],
        "ncclRecv": [pointer, size, number, number, pointer, pointer],
        "ncclAllGather": [pointer, pointer, size, number, pointer, pointer],
        "ncclReduceScatter": [pointer, pointer, size, number, number, pointer, pointer],
    }
    for name, types in arguments.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, number
    found.ncclGetErrorString.argtypes, found.ncclGetErrorString.restype = [number], ctypes.c_char_p
    found.ncclGetLastError.argtypes, found.ncclGetLastError.restype = [pointer], ctypes.c_char_p
    return found


def new_id() -> bytes:
    """What the ranks of one communicator meet by; one of them makes it."""
    identity = _Id()
    _check("ncclGetUniqueId", library().ncclGetUniqueId(ctypes.byref(identity)))
    return bytes(identity.bytes)


class Communicator:
    """One rank's end. Addresses are of this GPU; everything is enqueued on the stream that is given."""

    def __init__(self, identity: bytes, rank: int, size: int) -> None:
        """Returns when all ranks have come. The GPU is torch's current device."""
        self._nccl = library()
        made = ctypes.c_void_p()
        given = _Id((ctypes.c_uint8 * ID_BYTES).from_buffer_copy(identity))
        _check("ncclCommInitRank", self._nccl.ncclCommInitRank(ctypes.byref(made), size, given, rank))
        self._made: ctypes.c_void_p | None = made

    def exchange(
        self, sends: Iterable[tuple[int, int, int]], receives: Iterable[tuple[int, int, int]], stream: int
    ) -> None:
        """One group of sends and receives: (rank, address, bytes) each."""
        nccl, made = self._nccl, self._made
        _check("ncclGroupStart", nccl.ncclGroupStart())
        codes = [nccl.ncclSend(address, nbytes, _UINT8, rank, made, stream) for rank, address, nbytes in sends]
        codes += [nccl.ncclRecv(address, nbytes, _UINT8, rank, made, stream) for rank, address, nbytes in receives]
        codes.append(nccl.ncclGroupEnd())
        for code in codes:
            _check("a group of ncclSend and ncclRecv", code, made)

    def all_gather(self, out: int, mine: int, nbytes: int, stream: int) -> None:
        """`mine` of all ranks, in rank order, into `out`, of which it may be this rank's part."""
        code = self._nccl.ncclAllGather(mine, out, nbytes, _UINT8, self._made, stream)
        _check("ncclAllGather", code, self._made)

    def reduce_scatter(self, out: torch.Tensor, blocks: torch.Tensor, stream: int) -> None:
        """The sum over ranks of block r of `blocks` into `out` of rank r."""
        kind, count = _TYPES[out.dtype], out.numel()
        code = self._nccl.ncclReduceScatter(blocks.data_ptr(), out.data_ptr(), count, kind, _SUM, self._made, stream)
        _check("ncclReduceScatter", code, self._made)

    def abort(self) -> None:
        """End the kernels of this rank, also those that wait for ever."""
        made, self._made = self._made, None
        if made is not None:
            _check("ncclCommAbort", self._nccl.ncclCommAbort(made))

    def close(self) -> None:
        """By all ranks, when their streams are done."""
        made, self._made = self._made, None
        if made is not None:
            _check("ncclCommDestroy", self._nccl.ncclCommDestroy(made))


def _check(what: str, code: int, communicator: ctypes.c_void_p | None = None) -> None:
    if code == 0:
        return
    nccl = library()
    said = [nccl.ncclGetErrorString(code), nccl.ncclGetLastError(communicator)]
    reason = "; ".join(text.decode(errors="replace").strip() for text in said if text)
    raise WiringError(f"{what} failed: {reason}; NCCL_DEBUG=INFO tells more")
