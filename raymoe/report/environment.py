"""Records the environment of a run: versions, host, processor, memory and the commit of the code."""

import importlib.metadata
import os
import platform
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import raymoe
from raymoe.report.ray_job import ray_job

PACKAGES = ("ray", "torch", "cuda-python", "numpy", "pydantic", "pyyaml")
COMMIT = "raymoe_commit"  # in the metadata of a job
SOURCES = Path(raymoe.__file__).resolve().parent.parent


def environment() -> dict[str, object]:
    """Collect the facts for environment.json. It reads files and package metadata, and imports no package."""
    job = ray_job()
    return {
        "raymoe": raymoe.__version__,
        "commit": commit(SOURCES) or submitted_commit(SOURCES),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "host": socket.gethostname(),
        "ray_job": job.id if job else None,
        "system": platform.platform(),
        "cpu": {
            "model": processor(_read("/proc/cpuinfo").splitlines()),
            "cores": os.cpu_count(),
            "usable": len(os.sched_getaffinity(0)),
        },
        "load_average": round(os.getloadavg()[0], 1),  # of the last minute, before the run starts a process
        "memory": {"total_bytes": total_memory(_read("/proc/meminfo").splitlines()), "limit_bytes": _memory_limit()},
    }


def busy(facts: Mapping[str, object]) -> str | None:
    """Say how busy a machine was when a run began, if all its CPUs had other work; else None, and for older runs too.

    >>> busy({"load_average": 14.4, "cpu": {"usable": 2}}), busy({"load_average": 0.3, "cpu": {"usable": 2}}), busy({})
    ('load average 14.4 on 2 CPUs', None, None)
    """
    load, cpu = facts.get("load_average"), facts.get("cpu")
    usable = cpu.get("usable") if isinstance(cpu, dict) else None
    if not isinstance(load, int | float) or not isinstance(usable, int) or load < max(usable, 1):
        return None
    return f"load average {load:.1f} on {usable} CPU{'s' * (usable != 1)}"


def commit(sources: Path = SOURCES) -> str | None:
    """Give the commit of the sources, with `-dirty` if they were changed; None for an installed copy or without git."""
    if not (sources / ".git").exists():
        return None
    command = ["git", "-C", str(sources), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def submitted_commit(sources: Path) -> str | None:
    """Give the commit that `raymoe submit` recorded, if this process runs the sources that it uploaded."""
    job = ray_job()
    uploaded = job is not None and Path.cwd().resolve() == sources  # Ray runs an entrypoint in the working_dir
    return job.metadata.get(COMMIT) if job is not None and uploaded else None


def uploaded_commit(working_dir: str) -> dict[str, str]:
    """Give the metadata of a job that uploads sources of raymoe: their commit, which an upload without .git lacks."""
    sources = Path(working_dir)
    known = commit(sources) if (sources / "raymoe" / "__init__.py").is_file() else None
    return {} if known is None else {COMMIT: known}


def processor(lines: Iterable[str]) -> str:
    """Find the processor's name in /proc/cpuinfo, else give the architecture.

    >>> processor(["processor : 0", "model name : Some CPU @ 2 GHz", "processor : 1"])
    'Some CPU @ 2 GHz'
    """
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":  # x86-64 only; aarch64 has no such line
            return value.strip()
    return platform.machine()


def total_memory(lines: Iterable[str]) -> int | None:
    """Find the machine's memory in /proc/meminfo, in bytes.

    >>> total_memory(["MemTotal:       24689152 kB", "MemFree: 1 kB"])
    25281691648
    """
    for line in lines:
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _memory_limit() -> int | None:
    """Read the container's memory limit in bytes (cgroup v2); None without one (`max`)."""
    text = _read("/sys/fs/cgroup/memory.max").strip()
    return int(text) if text.isdigit() else None


def _read(path: str) -> str:
    file = Path(path)
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
