"""What the CUDA driver says when it is really started: peer access, and whether a stream can write and wait."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from raymoe.device.driver import bindings, call
from raymoe.device.gpu import Gpu
from raymoe.doctor.finding import Finding, Machine, absent, count, fail, gpus_of, ok
from raymoe.errors import CudaError, CudaMissing

_MARK = 0x5EED
_WAIT_S = 5.0
_NO_DEVICE = 100


def probe(doing: Callable[[str], None]) -> dict[str, object]:
    """`missing` where there is no driver; else its version, and `error` or what the GPUs of this process can do."""
    doing("loading the driver")
    try:
        version = int(call("cuDriverGetVersion"))
    except CudaMissing as error:
        return {"missing": str(error)}
    told: dict[str, object] = {"version": [version // 1000, version % 1000 // 10]}
    try:
        doing("starting CUDA")
        call("cuInit", 0)
        gpus = range(int(call("cuDeviceGetCount")))
        handles = [call("cuDeviceGet", index) for index in gpus]
        peers = [
            [mine == other or bool(call("cuDeviceCanAccessPeer", handles[mine], handles[other])) for other in gpus]
            for mine in gpus
        ]
        return {**told, "gpus": [_gpu(index, doing) for index in gpus], "peers": peers}
    except CudaError as error:
        if error.code == _NO_DEVICE:
            return {**told, "gpus": [], "peers": []}
        return {**told, "error": str(error), "code": error.code}


def _gpu(index: int, doing: Callable[[str], None]) -> dict[str, object]:
    doing(f"opening GPU {index}")
    gpu = Gpu.open(index)
    try:
        doing(f"writing and waiting in a stream of GPU {index}")
        return {
            "name": gpu.name,
            "uuid": gpu.uuid,
            "capability": list(gpu.capability),
            "arch": gpu.arch,
            "stream": _stream_memory_operations(gpu),
        }
    finally:
        gpu.close()


def _stream_memory_operations(gpu: Gpu) -> str:
    """Empty, or why a stream of this GPU cannot write a word and wait for it."""
    driver = bindings()
    with gpu.current():
        word = call("cuMemAlloc", 256)
        stream = call("cuStreamCreate", int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        try:
            call("cuMemsetD32", word, 0, 64)
            call("cuCtxSynchronize")
            call("cuStreamWriteValue32", stream, word, _MARK, 0)
            equal = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
            call("cuStreamWaitValue32", stream, word, _MARK, equal)
            deadline = time.monotonic() + _WAIT_S
            while driver.cuStreamQuery(stream)[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
                if time.monotonic() > deadline:
                    return f"the stream waits for a value that it wrote {_WAIT_S:g} s ago"
                time.sleep(0.001)
            found = ctypes.c_uint32()
            call("cuMemcpyDtoH", ctypes.addressof(found), word, 4)
        except CudaError as error:
            return str(error)
        call("cuStreamDestroy", stream)
        call("cuMemFree", word)
    return "" if found.value == _MARK else f"{_MARK:#x} was written and {found.value:#x} is there"


def judge_peer_access(machine: Machine) -> Finding:
    name = "peer access"
    if finding := absent(machine, name):
        return finding
    peers = machine.probes["cuda"].values["peers"]
    pairs = [(mine, other) for mine in range(len(peers)) for other in range(len(peers)) if mine != other]
    if not pairs:
        return ok(name, "one GPU, so there is no peer")
    cut = [f"{mine} to {other}" for mine, other in pairs if not peers[mine][other]]
    if not cut:
        return ok(name, f"all {count(len(pairs), 'ordered pair')}")
    return fail(
        name,
        f"{len(cut)} of {count(len(pairs), 'ordered pair')} cannot: GPU {', '.join(cut[:4])}{', …' * (len(cut) > 4)}",
        "GPUs must share NVLink or a PCIe root complex, with MIG off and, in virtual machines, peer access passed on; "
        "name those that do by CUDA_VISIBLE_DEVICES",
    )


def judge_stream_memory_operations(machine: Machine) -> Finding:
    name = "stream memory ops"
    if finding := absent(machine, name):
        return finding
    gpus = gpus_of(machine)
    wrong = [f"GPU {index}: {gpu['stream']}" for index, gpu in enumerate(gpus) if gpu["stream"]]
    if wrong:
        return fail(
            name, wrong[0], "without them the copy engine cannot signal; a driver of branch 580 or newer has them"
        )
    return ok(name, f"a stream wrote a word and waited for it, on {count(len(gpus), 'GPU')}")
