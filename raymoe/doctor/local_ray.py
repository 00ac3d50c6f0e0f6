"""Ray: connect to the cluster that RAY_ADDRESS names, or start a local Ray, in the same way as a run does."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable

from raymoe.doctor.finding import EVERY_RANK, Finding, Machine, count, fail, gpus_of, ok, warn
from raymoe.errors import RaymoeError

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


def probe(doing: Callable[[str], None]) -> dict[str, object]:
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
        found, _, advice = outcome.trouble.rpartition("; ")  # an error of raymoe ends with its own advice
        return fail(name, f"no: {found or outcome.trouble}", advice if found else way_out, EVERY_RANK)
    values = outcome.values
    place = "a local Ray was up" if values["where"] is None else f"the cluster at {values['where']} answered"
    found = f"{values['version']}; {place} in {values['seconds']:.1f} s and ran a task"
    gpus = len(gpus_of(machine))
    if values["where"] is None and gpus > values["gpus"]:
        found += f"; it counts {count(values['gpus'], 'GPU')}, CUDA {gpus}"
        return warn(name, found, "Ray places GPU ranks by its own count, so CUDA_VISIBLE_DEVICES and NVML must agree")
    return ok(name, found + (f", with {count(values['gpus'], 'GPU')}" if values["gpus"] else ""))
