"""Opens the directory of a run that `--out` names: a directory, or a URL that gets a copy.

Ray starts a retried job with the same command. So the run of a Ray job continues an unfinished run of the same config.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from raymoe.config import Job, job_from_resolved
from raymoe.errors import CannotWrite, ClusterError, ConfigError, shown
from raymoe.report.directory import RunDirectory, place_for, under_ray_job
from raymoe.report.ray_job import run_name
from raymoe.report.results import Record
from raymoe.report.storage import Mirror, fetch, is_url


def open_directory(out: str | None, job: Job) -> tuple[RunDirectory, Mirror | None]:
    """Make the run directory of a job, or continue in it. Refuses a place that holds other results."""
    run = run_name(job.name)
    if out == "":
        raise ConfigError("--out is empty; name a directory or a URL, or leave --out away")
    if out is not None and re.match("file://(?!/)", out):
        raise ConfigError(f"--out {shown(out)} names a host; a file URL of this machine begins with file:///")
    if out is not None and is_url(out):
        return _open_url(out.replace("{run}", run), job, run)
    path = None if out is None else _path(out.replace("{run}", run))
    if path is not None and under_ray_job() and _is_unfinished(path, job):
        return _continued(path), None
    directory = RunDirectory.create(path, job.name, run)
    directory.write_config(job.resolved())
    return directory, None


def _open_url(url: str, job: Job, run: str) -> tuple[RunDirectory, Mirror]:
    path = place_for(None, run).path
    try:
        holds_results = fetch(url, path)
    except ClusterError as error:  # what cannot be read takes no results either
        raise CannotWrite(str(error)) from error
    if holds_results:
        if not under_ray_job() or not _is_unfinished(path, job):
            shutil.rmtree(path)
            raise ConfigError(f"--out {shown(url)} already holds results; name another place, such as one with {{run}}")
        directory = _continued(path)
    else:
        directory = RunDirectory.create(None, job.name, run)
        directory.write_config(job.resolved())
    directory.notices.append(f"results are copied to {shown(url)}")
    return directory, Mirror(directory.path, url)


def _path(out: str) -> Path:
    try:
        return Path(out).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"--out {shown(out)} names a home directory that this machine lacks") from error


def _continued(path: Path) -> RunDirectory:
    directory = RunDirectory.resume(path)
    done = len(directory.finished())
    directory.notices.append(f"continues the unfinished run in {path}; {done} case{'s' * (done != 1)} done before")
    return directory


def _is_unfinished(path: Path, job: Job) -> bool:
    """Whether a directory has a run of this very job that has not ended well."""
    try:
        record = Record.read(path)
        same = job_from_resolved(record.config) == job
    except ConfigError:
        return False  # no run, or a damaged one, which `create` refuses with its reason
    return same and (record.summary is None or record.summary.get("status") != "done")
