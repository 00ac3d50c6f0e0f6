"""The Ray that a run starts for itself: its settings, what it needs, its files and its processes. Imports no Ray."""

from __future__ import annotations

import os
import resource
import shutil
import stat
from collections.abc import MutableMapping
from pathlib import Path

from raymoe.errors import ClusterError

SETTINGS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # Ray's 60 s are for a GCS that somebody starts again
    "RAY_health_check_period_ms": "500",  # Ray's own four values give a raylet up after 14 s
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Environment variables of the Ray that a run starts, unless the user set them. Ray reads them when it is imported."""

NEEDED_BYTES = 64 * 2**20  # free in the temporary directory; the logs of a run take 0.25 MB, or more after an error
NEEDED_FILES = 256  # open files of one process; the raylet opens 76 for 4 ranks
WANTED_FILES = 65536
SERVERS = ("gcs_server", "raylet")  # as /proc names them; a Ray that misses one is lost


def configure(environment: MutableMapping[str, str]) -> None:
    """Add SETTINGS to the environment that the local Ray will inherit. Call it before `import ray`."""
    for name, value in SETTINGS.items():
        environment.setdefault(name, value)


def temporary_directory() -> Path:
    """Return the directory in which Ray 2.60 keeps its sessions and the address of a head."""
    parent = next((os.environ[name] for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "/tmp")
    return Path(parent, "ray")


def check_machine() -> None:
    """Raise ClusterError if a local Ray could not start here, and raise the limit of open files.

    Without room or file descriptors Ray's processes die one by one. `ray.init` then fails after half a minute.
    """
    directory = temporary_directory()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    advice = "make room there, or set RAY_TMPDIR to another directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ClusterError(f"asked for a local Ray, and its directory {existing} cannot be written; {advice}")
    free = shutil.disk_usage(existing).free
    if free < NEEDED_BYTES:
        shortage = (
            f"its directory {existing} has {free / 2**20:.0f} MiB free of the {NEEDED_BYTES / 2**20:.0f} it needs"
        )
        raise ClusterError(f"asked for a local Ray, and {shortage}; {advice}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < NEEDED_FILES:
        shortage = f"a process may open {hard} files here of the {NEEDED_FILES} that Ray needs"
        raise ClusterError(f"asked for a local Ray, and {shortage}; raise the limit with `ulimit -n 65536`")
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# The session directory: logs, sockets and working files of one Ray.


def session_of(driver: int, since: float) -> Path | None:
    """Return the session directory of the Ray that process `driver` started after the time `since`, or None.

    Ray ends its name with the pid, which an earlier session may share.
    """
    for path in temporary_directory().glob(f"session_*_{driver}"):
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and status.st_ctime >= since:
            return path
    return None


def remove_session(session: Path) -> None:
    """Remove the session directory, and the link `session_latest` if it points there."""
    latest = session.parent / "session_latest"
    try:
        if latest.is_symlink() and latest.readlink().name == session.name:
            latest.unlink()
    except FileNotFoundError:
        return  # another Ray replaces the link at the same time
    finally:
        shutil.rmtree(session, ignore_errors=True)  # files that cannot be removed cost space, and no result
