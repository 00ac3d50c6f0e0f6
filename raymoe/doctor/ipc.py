"""CUDA IPC tried for real: processes in a ring, each of which writes into the memory of the next."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from raymoe.device.driver import bindings, call
from raymoe.device.gpu import Gpu
from raymoe.doctor.finding import Finding, Machine, absent, fail, ok, warn
from raymoe.doctor.gpus import START
from raymoe.errors import CudaError

NBYTES = 2 << 20
STEPS = ("opening its GPU", "exporting memory", "mapping the next one's memory", "writing there", "reading", "freeing")
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_NOT_SUPPORTED = 801
_PR_SET_PDEATHSIG = 1


def probe(doing: Callable[[str], None]) -> dict[str, object]:
    """`processes` and `gpus` where all went well; and where not `failed`, the step, with `error` and its `code`.

    Each process is pinned to one GPU as ranks are, so that it does not see the others. A GPU on its own gets two.
    """
    doing("counting GPUs")
    call("cuInit", 0)
    gpus = [Gpu.open(index) for index in range(int(call("cuDeviceGetCount")))]
    for gpu in gpus:
        gpu.close()
    members = max(2, len(gpus))
    told: dict[str, object] = {"gpus": len(gpus), "processes": members}
    spawn = multiprocessing.get_context("spawn")
    lines: list[Connection] = []
    for place in range(members):
        if len(gpus) > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = f"GPU-{gpus[place].uuid}"
        ours, its = spawn.Pipe()
        spawn.Process(target=member, args=(its,), daemon=True).start()
        its.close()
        lines.append(ours)
    said: list[Any] = [None] * len(lines)
    for step in STEPS:
        doing(step)
        try:
            for place, line in enumerate(lines):
                line.send((said[(place + 1) % len(lines)], place))
            answers = [line.recv() for line in lines]
        except (EOFError, OSError):
            return {**told, "failed": step, "error": "the process crashed", "code": 0}
        for done, answer in answers:
            if not done:
                return {**told, "failed": step, **answer}
        said = [answer for _, answer in answers]
        if step == "reading":
            for place, found in enumerate(said):
                written = [(place - 1) % len(said) + 1]  # by the one before
                if found != written:
                    return {
                        **told,
                        "failed": step,
                        "error": f"bytes {written} were written, {found[:8]} found",
                        "code": 0,
                    }
    return told


def member(line: Connection) -> None:
    """One process of the ring: takes each step when it is told to, and answers with (done, value)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        for answer in _steps(line.recv):
            line.send((True, answer))
    except CudaError as error:
        line.send((False, {"error": str(error), "code": error.code}))


def _steps(told: Callable[[], tuple[Any, int]]) -> Iterator[object]:
    """The steps in the order of STEPS. Each begins when all members are done with the one before."""
    told()
    gpu = Gpu.open(0)
    yield None
    with gpu.current():
        told()
        own = call("cuMemAlloc", NBYTES)
        call("cuMemsetD8", own, 0, NBYTES)
        call("cuCtxSynchronize")
        exported = call("cuIpcGetMemHandle", own)
        # By address, since not every version of the binding shows the bytes of a handle as an attribute.
        yield ctypes.string_at(exported.getPtr(), _HANDLE_BYTES)
        content, place = told()
        handle = bindings().CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), content, _HANDLE_BYTES)
        mapped = call("cuIpcOpenMemHandle", handle, _LAZY_PEER_ACCESS)
        yield None
        told()
        call("cuMemsetD8", mapped, place + 1, NBYTES)
        call("cuCtxSynchronize")
        yield place + 1
        call("cuIpcCloseMemHandle", mapped)
        told()
        found = ctypes.create_string_buffer(NBYTES)
        call("cuMemcpyDtoH", ctypes.addressof(found), own, NBYTES)
        yield sorted(set(found.raw))
        told()
        call("cuMemFree", own)
        yield None
    gpu.close()


def judge_ipc(machine: Machine) -> Finding:
    name = "CUDA IPC"
    if finding := absent(machine, name):
        return finding
    host = machine.probes["host"].values
    sliced = [str(index) for index, gpu in enumerate(machine.probes["nvml"].values.get("gpus", [])) if gpu["mig"]]
    if sliced:
        listed = ",".join(sliced)
        found = f"no: MIG is on at GPU {listed}, and slices cannot map one another's memory"
        return fail(name, found, f"turn it off on an idle machine: `sudo nvidia-smi -i {listed} -mig 0`")
    outcome = machine.probes["ipc"]
    tried = outcome.values
    if outcome.trouble or "failed" in tried:
        at = f" when {tried['failed']}" if "failed" in tried else ""
        return fail(name, f"no:{at} {outcome.trouble or tried['error']}", _way_out(tried.get("code", 0), host))
    among = "two processes on one GPU" if tried["gpus"] == 1 else f"{tried['processes']} processes, one a GPU,"
    found = f"{among} wrote into one another's memory"
    given = host.get("slurm_gpus")
    if given is not None and given > tried["gpus"]:
        found += f"; but Slurm gave this node {given} GPUs and lets this task see {tried['gpus']}"
        return warn(name, found, f"{_SLURM}, so that ranks can reach one another's")
    if host.get("container"):
        found += f" (in this {host['container']} container; ranks in another need --ipc=host and --pid=host on both)"
    return ok(name, found)


_SLURM = "start one task a node that sees all its GPUs: --ntasks-per-node=1 --gpus-per-node=N --gpu-bind=none"


def _way_out(code: int, host: Mapping[str, Any]) -> str:
    """The likeliest reason first: what CUDA says about itself, then what surrounds the process."""
    if code in START:
        return START[code]
    if host.get("wsl"):
        return "WSL has no CUDA IPC: use Linux itself"
    if host.get("slurm_gpus") is not None:
        return f"Slurm's device cgroups may hide the GPUs from one another: {_SLURM}"
    if host.get("container"):
        kind = host["container"]
        return f"this {kind} container may have an IPC namespace of its own: start it with --ipc=host and --pid=host"
    if code == _NOT_SUPPORTED:
        return "this kind of GPU or virtual GPU has no CUDA IPC: use whole GPUs, passed through"
    return "`nvidia-smi topo -p2p rw` shows which GPUs reach one another, `dmesg | grep -i nvrm` what the driver met"
