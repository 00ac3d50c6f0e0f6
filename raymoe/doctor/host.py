"""The host: shared memory, /proc, the kernel cache, memory, and the container or Slurm job of this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from raymoe.cuda import cache
from raymoe.doctor.finding import EVERY_RANK, Finding, Machine, fail, ok, warn
from raymoe.errors import RaymoeError

SHM_NEEDED = 128 * 2**20
"""The object store of a local Ray (100 MiB), and space for NCCL and torch."""

_TEST_BYTES = 1 << 16
_PEER_S = 30.0
_PEER_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from raymoe.memory.host_shm import map_peer
segment = map_peer(json.loads(sys.argv[2]))
segment.view(0, 4)[:] = b"seen"
"""


def probe(doing: Callable[[str], None]) -> dict[str, object]:
    from raymoe.workload.memory_needed import available_memory

    doing("looking at /dev/shm")
    values: dict[str, object] = {"shm": _shm(Path("/dev/shm")), "available_bytes": available_memory()}
    values |= _surroundings()
    doing("mapping the memory of another process")
    return {**values, "memfd": _map_a_peer(), "cache": _why_no_cache(cache.cache_folder())}


def _why_no_cache(folder: Path) -> str:
    """Return why compiled kernels cannot be kept in a folder, or an empty string. It is made with the first kernel."""
    if not folder.exists() and not folder.is_symlink():
        return ""
    try:
        with cache.private_folder(folder):
            return ""
    except OSError as error:
        return f"{folder}: {error.strerror or error}"


def _shm(path: Path) -> dict[str, object]:
    if not path.is_dir():
        return {"there": False}
    stat = os.statvfs(path)
    writable = os.access(path, os.W_OK | os.X_OK)
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    return {"there": True, "writable": writable, "total_bytes": total, "free_bytes": free}


def _map_a_peer() -> str:
    """Let another process map and write memory of this one, as CPU ranks do; return an error or an empty string."""
    import json

    from raymoe.memory.host_shm import own

    try:
        segment = own("raymoe-doctor", _TEST_BYTES)
    except (OSError, RaymoeError) as error:
        return str(error)
    command = [sys.executable, "-P", "-c", _PEER_PROGRAM, json.dumps(sys.path), json.dumps(segment.descriptor())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PEER_S, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        return last[0].rpartition("Error: ")[2] if last else f"the other process ended with code {done.returncode}"
    written = bytes(segment.view(0, 4))
    return "" if written == b"seen" else f"the other process wrote b'seen', {written!r} found"


def _surroundings() -> dict[str, object]:
    environment = os.environ
    slurm_gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    in_slurm = "SLURM_STEP_ID" in environment or "SLURM_JOB_ID" in environment
    return {
        "container": _container(environment),
        "wsl": "microsoft" in os.uname().release.lower(),
        "slurm_gpus": int(slurm_gpus) if slurm_gpus.isdigit() else 0 if in_slurm else None,
        "nvidia_on_pci": _nvidia_on_pci(Path("/sys/bus/pci/devices")),
        "visible": environment.get("CUDA_VISIBLE_DEVICES"),
    }


def _container(environment: Mapping[str, str]) -> str | None:
    variables = {"Kubernetes": "KUBERNETES_SERVICE_HOST", "Singularity": "SINGULARITY_CONTAINER"}
    for kind, variable in {**variables, "Apptainer": "APPTAINER_CONTAINER"}.items():
        if variable in environment:
            return kind
    files = {"Docker": "/.dockerenv", "Podman": "/run/.containerenv"}
    return next((kind for kind, file in files.items() if Path(file).exists()), None)


def _nvidia_on_pci(devices: Path) -> int:
    """Count NVIDIA's devices of a display class on the PCI bus, with or without a loaded driver."""
    displays = 0
    for device in devices.glob("*"):
        vendor, kind = device / "vendor", device / "class"
        if vendor.exists() and kind.exists() and vendor.read_text().strip() == "0x10de":
            displays += kind.read_text().startswith("0x03")
    return displays


def judge_shm(machine: Machine) -> Finding:
    name = "/dev/shm"
    outcome = machine.probes["host"]
    if "shm" not in outcome.values:
        return fail(name, f"unknown: {outcome.trouble}", "`df -h /dev/shm` may show why", EVERY_RANK)
    shm = outcome.values["shm"]
    if not shm["there"]:
        return fail(name, "missing, and Ray needs it", "`mount -t tmpfs tmpfs /dev/shm`", EVERY_RANK)
    state = f"{_size(shm['free_bytes'])} of {_size(shm['total_bytes'])} free"
    if not shm["writable"]:
        return fail(name, f"{state}, not writable by this user", "`sudo chmod 1777 /dev/shm`", EVERY_RANK)
    if shm["free_bytes"] < SHM_NEEDED:
        return warn(
            name,
            f"{state}; below {_size(SHM_NEEDED)} Ray moves its object store to /tmp, and NCCL may fail",
            "delete files that other programs left there, or start the container with --shm-size=1g",
        )
    return ok(name, state)


def judge_memfd(machine: Machine) -> Finding:
    name = "memfd and /proc"
    outcome = machine.probes["host"]
    reason = outcome.values.get("memfd", outcome.trouble)
    if not reason:
        return ok(name, "one process mapped and wrote the memory of another, as CPU ranks do")
    way_out = "all ranks must run as one user, with memfd_create allowed and /proc mounted without hidepid"
    return fail(name, f"no: {reason}", way_out, ("cpu",))


def judge_cache(machine: Machine) -> Finding:
    name = "kernel cache"
    outcome = machine.probes["host"]
    reason = outcome.values.get("cache", outcome.trouble)
    if not reason:
        return ok(name, "only this user can write it")
    way_out = f"delete it, or set {cache.CACHE_VARIABLE} to a folder that you own and only you can write"
    return warn(name, f"not used, so every process compiles its kernels: {reason}", way_out)


def judge_memory(machine: Machine) -> Finding:
    name, needs = "memory", machine.needs
    outcome = machine.probes["host"]
    available = outcome.values.get("available_bytes")
    needed = f"{needs.config} takes {_size(needs.ranks * needs.bytes_per_rank)} on {needs.ranks} ranks"
    if available is None:
        return warn(name, f"unknown: {outcome.trouble}", needed)
    state = f"{_size(available)} available; {needed}"
    if available < needs.ranks * needs.bytes_per_rank:
        return fail(name, state, "end other programs, or lower world.ranks or shape.tokens", EVERY_RANK)
    return ok(name, state)


def _size(nbytes: int) -> str:
    """
    >>> _size(64 * 2**20), _size(3 * 2**29)
    ('64 MiB', '1.5 GiB')
    """
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
