"""Try CUDA IPC: processes in a ring, each of which writes into the memory of the next."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from raymoe.cuda.driver import bindings, call
from raymoe.cuda.gpu import Gpu
from raymoe.doctor.finding import Finding, Machine, fail, nothing_to_check, ok, warn
from raymoe.doctor.gpus import START_ERRORS
from raymoe.errors import CudaError

NBYTES = 2 << 20
STEPS = ("opening its GPU", "exporting memory", "mapping the next one's memory", "writing to it", "reading", "freeing")
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED
_PR_SET_PDEATHSIG = 1


def probe(doing: Callable[[str], None]) -> dict[str, object]:
    """Return `gpus` and `processes`; after a failure also `failed` (the step), `error` and its `code`.

    Like a rank, each process is pinned to one GPU and does not see the others. A single GPU gets two processes.
    """
    doing("counting GPUs")
    call("cuInit", 0)
    gpus = [Gpu.open(index) for index in range(int(call("cuDeviceGetCount")))]
    for gpu in gpus:
        gpu.close()
    members = max(2, len(gpus))
    values: dict[str, object] = {"gpus": len(gpus), "processes": members}
    spawn = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    for index in range(members):
        if len(gpus) > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = f"GPU-{gpus[index].uuid}"
        parent_end, member_end = spawn.Pipe()
        spawn.Process(target=member, args=(member_end,), daemon=True).start()
        member_end.close()
        pipes.append(parent_end)
    answers: list[Any] = [None] * members
    for step in STEPS:
        doing(step)
        try:
            for index, pipe in enumerate(pipes):
                pipe.send((answers[(index + 1) % members], index))
            results = [pipe.recv() for pipe in pipes]
        except (EOFError, OSError):
            return {**values, "failed": step, "error": "the process crashed", "code": 0}
        for done, answer in results:
            if not done:
                return {**values, "failed": step, **answer}
        answers = [answer for _, answer in results]
        if step == "reading":
            for index, content in enumerate(answers):
                written = [(index - 1) % members + 1]  # by the previous process
                if content != written:
                    return {
                        **values,
                        "failed": step,
                        "error": f"bytes {written} were written, {content[:8]} found",
                        "code": 0,
                    }
    return values


def member(pipe: Connection) -> None:
    """Run one process of the ring: take a step after each message, and answer with (done, value)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        for answer in _steps(pipe.recv):
            pipe.send((True, answer))
    except CudaError as error:
        pipe.send((False, {"error": str(error), "code": error.code}))


def _steps(wait: Callable[[], tuple[Any, int]]) -> Iterator[object]:
    """Take the steps in the order of STEPS. `wait` returns when all processes have done the step before.

    It returns what the next process answered to that step, and the index of this process.
    """
    wait()
    gpu = Gpu.open(0)
    yield None
    with gpu.current():
        wait()
        own = call("cuMemAlloc", NBYTES)
        call("cuMemsetD8", own, 0, NBYTES)
        call("cuCtxSynchronize")
        exported = call("cuIpcGetMemHandle", own)
        # By address: not every version of the binding has the bytes of a handle as an attribute.
        yield ctypes.string_at(exported.getPtr(), _HANDLE_BYTES)
        content, index = wait()
        handle = bindings().CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), content, _HANDLE_BYTES)
        mapped = call("cuIpcOpenMemHandle", handle, _LAZY_PEER_ACCESS)
        yield None
        wait()
        call("cuMemsetD8", mapped, index + 1, NBYTES)
        call("cuCtxSynchronize")
        yield index + 1
        call("cuIpcCloseMemHandle", mapped)
        wait()
        content = ctypes.create_string_buffer(NBYTES)
        call("cuMemcpyDtoH", ctypes.addressof(content), own, NBYTES)
        yield sorted(set(content.raw))
        wait()
        call("cuMemFree", own)
        yield None
    gpu.close()


def judge_ipc(machine: Machine) -> Finding:
    name = "CUDA IPC"
    if finding := nothing_to_check(machine, name):
        return finding
    host = machine.probes["host"].values
    with_mig = [str(index) for index, gpu in enumerate(machine.probes["nvml"].values.get("gpus", [])) if gpu["mig"]]
    if with_mig:
        listed = ",".join(with_mig)
        state = f"no: MIG is on at GPU {listed}, and MIG slices cannot map one another's memory"
        return fail(name, state, f"turn it off on an idle machine: `sudo nvidia-smi -i {listed} -mig 0`")
    outcome = machine.probes["ipc"]
    tried = outcome.values
    if outcome.trouble or "failed" in tried:
        step = f"failed while {tried['failed']}: " if "failed" in tried else ""
        return fail(name, f"no: {step}{outcome.trouble or tried['error']}", _way_out(tried.get("code", 0), host))
    among = "two processes on one GPU" if tried["gpus"] == 1 else f"{tried['processes']} processes, one a GPU,"
    state = f"{among} wrote into one another's memory"
    slurm_gpus = host.get("slurm_gpus")
    if slurm_gpus is not None and slurm_gpus > tried["gpus"]:
        state += f"; but Slurm gave this node {slurm_gpus} GPUs and lets this task see {tried['gpus']}"
        return warn(name, state, f"{_SLURM}; otherwise ranks cannot reach one another's GPUs")
    if host.get("container"):
        state += (
            f" (in this {host['container']} container; ranks in another one need --ipc=host and --pid=host on both)"
        )
    return ok(name, state)


_SLURM = "start one task a node that sees all its GPUs: --ntasks-per-node=1 --gpus-per-node=N --gpu-bind=none"


def _way_out(code: int, host: Mapping[str, Any]) -> str:
    """Return the advice for the likeliest reason: CUDA's own error first, then the surroundings of the process."""
    if code in START_ERRORS:
        return START_ERRORS[code]
    if host.get("wsl"):
        return "WSL has no CUDA IPC: use native Linux"
    if host.get("slurm_gpus") is not None:
        return f"Slurm's device cgroups may hide the GPUs from one another: {_SLURM}"
    if host.get("container"):
        kind = host["container"]
        return f"this {kind} container may have its own IPC namespace: start it with --ipc=host and --pid=host"
    if code == _NOT_SUPPORTED:
        return "this kind of GPU or virtual GPU has no CUDA IPC: use whole GPUs with passthrough"
    return "`nvidia-smi topo -p2p rw` shows which GPUs reach one another, `dmesg | grep -i nvrm` the driver's errors"
