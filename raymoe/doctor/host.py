"""The machine without its GPUs: shared memory, /proc, memory, and what surrounds this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from raymoe.doctor.finding import EVERY_RANK, Finding, Machine, fail, ok, warn
from raymoe.errors import RaymoeError

SHM_NEEDED = 128 * 2**20
"""The object store of a Ray of our own (100 MiB), and room for what NCCL and torch put beside it."""

_BYTES = 1 << 16
_TRIED_S = 30.0
_PEER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from raymoe.memory.host_shm import map_peer
segment = map_peer(json.loads(sys.argv[2]))
segment.view(0, 4)[:] = b"seen"
"""


def probe(doing: Callable[[str], None]) -> dict[str, object]:
    from raymoe.workload.memory_needed import available_memory

    doing("looking at /dev/shm")
    told: dict[str, object] = {"shm": _shm(Path("/dev/shm")), "available_bytes": available_memory(), **_surroundings()}
    doing("mapping the memory of another process")
    return {**told, "memfd": _map_a_peer()}


def _shm(path: Path) -> dict[str, object]:
    if not path.is_dir():
        return {"there": False}
    stat = os.statvfs(path)
    writable = os.access(path, os.W_OK | os.X_OK)
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    return {"there": True, "writable": writable, "total_bytes": total, "free_bytes": free}


def _map_a_peer() -> str:
    """What CPU ranks do with one another: empty, or why it does not work."""
    import json

    from raymoe.memory.host_shm import own

    try:
        segment = own("doctor", _BYTES)
    except (OSError, RaymoeError) as error:
        return str(error)
    command = [sys.executable, "-P", "-c", _PEER, json.dumps(sys.path), json.dumps(segment.descriptor())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TRIED_S, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        return last[0].rpartition("Error: ")[2] if last else f"the other process ended with code {done.returncode}"
    found = bytes(segment.view(0, 4))
    return "" if found == b"seen" else f"the other process wrote b'seen', and {found!r} is there"


def _surroundings() -> dict[str, object]:
    environment = os.environ
    given = environment.get("SLURM_GPUS_ON_NODE", "")
    in_step = "SLURM_STEP_ID" in environment or "SLURM_JOB_ID" in environment
    return {
        "container": _container(environment),
        "wsl": "microsoft" in os.uname().release.lower(),
        "slurm_gpus": int(given) if given.isdigit() else 0 if in_step else None,
        "nvidia_on_pci": _nvidia_on_pci(Path("/sys/bus/pci/devices")),
        "visible": environment.get("CUDA_VISIBLE_DEVICES"),
    }


def _container(environment: Mapping[str, str]) -> str | None:
    marks = {"Kubernetes": "KUBERNETES_SERVICE_HOST", "Singularity": "SINGULARITY_CONTAINER"}
    for kind, variable in {**marks, "Apptainer": "APPTAINER_CONTAINER"}.items():
        if variable in environment:
            return kind
    files = {"Docker": "/.dockerenv", "Podman": "/run/.containerenv"}
    return next((kind for kind, file in files.items() if Path(file).exists()), None)


def _nvidia_on_pci(devices: Path) -> int:
    """GPUs on the PCI bus, whether or not a driver is loaded: of NVIDIA, and of a display class."""
    found = 0
    for device in devices.glob("*"):
        vendor, kind = device / "vendor", device / "class"
        if vendor.exists() and kind.exists() and vendor.read_text().strip() == "0x10de":
            found += kind.read_text().startswith("0x03")
    return found


def judge_shm(machine: Machine) -> Finding:
    name = "/dev/shm"
    outcome = machine.probes["host"]
    if "shm" not in outcome.values:
        return fail(name, f"not known: {outcome.trouble}", "`df -h /dev/shm` may tell more", EVERY_RANK)
    shm = outcome.values["shm"]
    if not shm["there"]:
        return fail(name, "not there, and Ray needs it", "`mount -t tmpfs tmpfs /dev/shm`", EVERY_RANK)
    found = f"{_size(shm['free_bytes'])} of {_size(shm['total_bytes'])} free"
    if not shm["writable"]:
        return fail(name, f"{found}, not writable for this user", "`sudo chmod 1777 /dev/shm`", EVERY_RANK)
    if shm["free_bytes"] < SHM_NEEDED:
        return warn(
            name,
            f"{found}; Ray moves its object store to /tmp, and NCCL may fail, below {_size(SHM_NEEDED)}",
            "remove what others left there, or start the container with --shm-size=1g",
        )
    return ok(name, found)


def judge_memfd(machine: Machine) -> Finding:
    name = "memfd and /proc"
    outcome = machine.probes["host"]
    wrong = outcome.values.get("memfd", outcome.trouble)
    if not wrong:
        return ok(name, "a process mapped and wrote the memory of another, as CPU ranks do")
    way_out = "all ranks must run as one user, with memfd_create allowed and /proc mounted without hidepid"
    return fail(name, f"no: {wrong}", way_out, ("cpu",))


def judge_memory(machine: Machine) -> Finding:
    name, needs = "memory", machine.needs
    outcome = machine.probes["host"]
    available = outcome.values.get("available_bytes")
    wanted = f"{needs.config} takes {_size(needs.ranks * needs.bytes_per_rank)} on {needs.ranks} ranks"
    if available is None:
        return warn(name, f"not known: {outcome.trouble}", wanted)
    found = f"{_size(available)} available; {wanted}"
    if available < needs.ranks * needs.bytes_per_rank:
        return fail(name, found, "end what else runs here, or lower world.ranks or shape.tokens", EVERY_RANK)
    return ok(name, found)


def _size(nbytes: int) -> str:
    """
    >>> _size(64 * 2**20), _size(3 * 2**29)
    ('64 MiB', '1.5 GiB')
    """
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
