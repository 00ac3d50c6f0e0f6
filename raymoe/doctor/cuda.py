"""Start the CUDA driver; check peer access, and that a stream can write a word and wait for it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from raymoe.cuda.driver import bindings, call
from raymoe.cuda.gpu import Gpu
from raymoe.doctor.finding import Finding, Machine, count, fail, gpus_of, nothing_to_check, ok
from raymoe.errors import CudaError, CudaMissing

_TEST_VALUE = 0x5EED
_WAIT_S = 5.0
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def probe(doing: Callable[[str], None]) -> dict[str, object]:
    """Return `missing` if there is no driver; else its `version`, and either `error` or `gpus` and `peers`."""
    doing("loading the driver")
    try:
        version = int(call("cuDriverGetVersion"))
    except CudaMissing as error:
        return {"missing": str(error)}
    values: dict[str, object] = {"version": [version // 1000, version % 1000 // 10]}
    try:
        doing("starting CUDA")
        call("cuInit", 0)
        gpus = range(int(call("cuDeviceGetCount")))
        handles = [call("cuDeviceGet", index) for index in gpus]
        peers = [
            [gpu == other or bool(call("cuDeviceCanAccessPeer", handles[gpu], handles[other])) for other in gpus]
            for gpu in gpus
        ]
        return {**values, "gpus": [_gpu(index, doing) for index in gpus], "peers": peers}
    except CudaError as error:
        if error.code == _NO_DEVICE:
            return {**values, "gpus": [], "peers": []}
        return {**values, "error": str(error), "code": error.code}


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
    """Let a stream of this GPU write a word and wait for it; return why that failed, or an empty string."""
    driver = bindings()
    with gpu.current():
        word = call("cuMemAlloc", 256)
        stream = call("cuStreamCreate", int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        try:
            call("cuMemsetD32", word, 0, 64)
            call("cuCtxSynchronize")
            call("cuStreamWriteValue32", stream, word, _TEST_VALUE, 0)
            equal = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
            call("cuStreamWaitValue32", stream, word, _TEST_VALUE, equal)
            deadline = time.monotonic() + _WAIT_S
            while driver.cuStreamQuery(stream)[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
                if time.monotonic() > deadline:
                    return f"the stream still waits for a value that it wrote {_WAIT_S:g} s ago"
                time.sleep(0.001)
            read = ctypes.c_uint32()
            call("cuMemcpyDtoH", ctypes.addressof(read), word, 4)
        except CudaError as error:
            return str(error)
        call("cuStreamDestroy", stream)
        call("cuMemFree", word)
    return "" if read.value == _TEST_VALUE else f"{_TEST_VALUE:#x} was written, {read.value:#x} found"


def judge_peer_access(machine: Machine) -> Finding:
    name = "peer access"
    if finding := nothing_to_check(machine, name):
        return finding
    peers = machine.probes["cuda"].values["peers"]
    pairs = [(gpu, other) for gpu in range(len(peers)) for other in range(len(peers)) if gpu != other]
    if not pairs:
        return ok(name, "one GPU, so there is no peer")
    cut = [f"{gpu} to {other}" for gpu, other in pairs if not peers[gpu][other]]
    if not cut:
        return ok(name, f"all {count(len(pairs), 'ordered pair')}")
    return fail(
        name,
        f"{len(cut)} of {count(len(pairs), 'ordered pair')} cannot: GPU {', '.join(cut[:4])}{', …' * (len(cut) > 4)}",
        "GPUs need NVLink or a common PCIe root complex, MIG off and, in a virtual machine, peer access passed "
        "through; select such GPUs with CUDA_VISIBLE_DEVICES",
    )


def judge_stream_memory_operations(machine: Machine) -> Finding:
    name = "stream memory ops"
    if finding := nothing_to_check(machine, name):
        return finding
    gpus = gpus_of(machine)
    wrong = [f"GPU {index}: {gpu['stream']}" for index, gpu in enumerate(gpus) if gpu["stream"]]
    if wrong:
        return fail(name, wrong[0], "the copy engine needs them to signal; driver 580 or newer has them")
    return ok(name, f"a stream wrote a word and waited for it, on {count(len(gpus), 'GPU')}")
