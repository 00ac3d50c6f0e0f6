"""The software that ranks need: NVRTC, torch and Ray."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from raymoe.doctor.finding import EVERY_RANK, Finding, Machine, count, fail, gpus_of, no_driver, ok, warn
from raymoe.errors import RaymoeError

# NVRTC compiles a kernel, and nothing is kept.

ARCH = "sm_90a"


def probe_nvrtc(doing: Callable[[str], None]) -> dict[str, object]:
    """Return NVRTC's version, the architectures that it knows, and the time to compile the copy kernel."""
    doing("loading NVRTC")
    from raymoe.cuda.jit import Compiler, Cubins, nvrtc_version
    from raymoe.transport.copy_kernel import COPY

    version = nvrtc_version()
    from cuda.bindings import nvrtc

    code, known = nvrtc.nvrtcGetSupportedArchs()
    doing(f"compiling kernels/{COPY.path}.cu for {ARCH}")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        compiled = Compiler(cubins=Cubins(Path(folder))).compiled(COPY, ARCH)
        seconds = time.perf_counter() - began
    known = list(known) if int(code) == 0 else None
    return {
        "version": list(version),
        "seconds": seconds,
        "bytes": len(compiled.cubin),
        "kernel": COPY.stem,
        "known": known,
    }


def judge_nvrtc(machine: Machine) -> Finding:
    name = "NVRTC"
    outcome = machine.probes["nvrtc"]
    if outcome.trouble:
        if no_driver(machine):
            return warn(name, f"no: {outcome.trouble}", "CPU ranks do not need it")
        way_out = "pip install 'cuda-python>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'; no other NVRTC in LD_LIBRARY_PATH"
        return fail(name, f"no: {outcome.trouble}", way_out)
    values = outcome.values
    version = ".".join(map(str, values["version"]))
    known = values["known"]
    for gpu in gpus_of(machine):
        number = int("".join(map(str, gpu["capability"])))
        if known is not None and number not in known:
            state = f"{version} does not know sm_{number} of {gpu['name']}; it knows sm_{min(known)} to sm_{max(known)}"
            return fail(name, state, "pip install -U nvidia-cuda-nvrtc")
    return ok(name, f"{version}; compiled the {values['kernel']} kernel for {ARCH} in {values['seconds']:.1f} s")


# torch loads, and its build fits the GPUs of this machine.


def probe_torch(doing: Callable[[str], None]) -> dict[str, object]:
    doing("importing torch")
    import torch

    doing("asking torch for GPUs")
    gpus = torch.cuda.device_count() if torch.version.cuda else 0
    return {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}


def judge_torch(machine: Machine) -> Finding:
    name = "torch"
    outcome = machine.probes["torch"]
    if outcome.trouble:
        return fail(name, f"no: {outcome.trouble}", "pip install 'torch>=2.9'", EVERY_RANK)
    values = outcome.values
    built = f"built for CUDA {values['cuda']}" if values["cuda"] else "built without CUDA"
    state = f"{values['version']}, {built}"
    gpus = len(gpus_of(machine))
    if gpus and not values["cuda"]:
        return fail(name, state, "GPU ranks need torch with CUDA: pip install 'torch>=2.9' from the default index")
    if gpus > values["gpus"]:
        return warn(name, f"{state}; it sees {values['gpus']} of {gpus} GPUs", "install a torch built for this driver")
    return ok(name, state)


# Ray: the cluster that RAY_ADDRESS names answers, or a local Ray starts, in the same way as for a run.

# A program, not a function: only `gang` imports ray, and this folder may not import `gang`.
_PROGRAM = """
import contextlib, json, os, shutil, sys, time
sys.path[:] = json.loads(sys.argv[1])
from raymoe.gang.address import choose
from raymoe.gang.private_ray import private_ray
from raymoe.errors import RaymoeError
where = choose(None)
try:
    with private_ray(os.environ) if where is None else contextlib.nullcontext() as directory:
        from raymoe.gang.cluster import Cluster
        import ray
        began = time.perf_counter()
        Cluster(where, cpus=1).connect()
        seconds = time.perf_counter() - began
        ray.get(ray.remote(lambda: 0).options(num_cpus=0).remote(), timeout=60)
        gpus = int(ray.cluster_resources().get("GPU", 0))
        found = {"version": ray.__version__, "where": where, "seconds": seconds, "gpus": gpus}
        print("result", json.dumps(found), flush=True)
        ray.shutdown()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
except RaymoeError as error:
    sys.exit(str(error))
"""


def probe_ray(doing: Callable[[str], None]) -> dict[str, object]:
    """Return Ray's version, its address, the seconds until it was up, and the number of GPUs that it counts."""
    environment = dict(os.environ)
    address = environment.get("RAY_ADDRESS") or "local"
    if address == "local":
        environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))  # else Ray leaves one in the user's home
    doing("starting a local Ray" if address == "local" else f"connecting to {address}")
    command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path)]
    # No timeout here: the bound of the probe's own process applies.
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("result "):
            return dict(json.loads(line.removeprefix("result ")))
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    raise RaymoeError(last[0].strip() if last else f"it ended with code {done.returncode}")


def judge_ray(machine: Machine) -> Finding:
    name = "Ray"
    outcome = machine.probes["ray"]
    if outcome.trouble:
        way_out = "raymoe needs 'ray[default]>=2.56,<3', a writable /tmp, and RAY_ADDRESS unset or reachable"
        reason, _, advice = outcome.trouble.rpartition("; ")  # an error of raymoe ends with its own advice
        return fail(name, f"no: {reason or outcome.trouble}", advice if reason else way_out, EVERY_RANK)
    values = outcome.values
    place = "a local Ray was up" if values["where"] is None else f"the cluster at {values['where']} answered"
    state = f"{values['version']}; {place} in {values['seconds']:.1f} s and ran a task"
    gpus = len(gpus_of(machine))
    if values["where"] is None and gpus > values["gpus"]:
        state += f"; it counts {count(values['gpus'], 'GPU')}, CUDA {gpus}"
        return warn(name, state, "Ray places GPU ranks by its own count, so CUDA_VISIBLE_DEVICES and NVML must agree")
    return ok(name, state + (f", with {count(values['gpus'], 'GPU')}" if values["gpus"] else ""))
