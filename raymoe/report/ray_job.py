"""Tells whether this process is the entrypoint of a Ray job, and what the job's submission says."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import raymoe
from raymoe.errors import shown
from raymoe.report.directory import RAY_JOB, as_file_name, new_run_id, place_for


@dataclass(frozen=True)
class RayJob:
    """The job that Ray runs here. `raymoe submit` puts keys that begin with `raymoe_` into its metadata."""

    id: str
    metadata: Mapping[str, str] = field(default_factory=dict)


def ray_job() -> RayJob | None:
    """Read what Ray's job supervisor says in the environment; None outside a Ray job, or if it cannot be read."""
    try:
        metadata = json.loads(os.environ.get(RAY_JOB, ""))["metadata"]
        texts = {key: value for key, value in metadata.items() if isinstance(key, str) and isinstance(value, str)}
        return RayJob(texts["job_submission_id"], texts)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def run_name(name: str) -> str:
    """Name a new run of job `name`. A run that `raymoe submit` started has the name of its Ray job."""
    job = ray_job()
    if job is None or "raymoe_version" not in job.metadata:
        return new_run_id(name)
    run = run_of(job.id)
    return new_run_id(name) if place_for(None, run).path.exists() else run  # a second run of the same job


def run_of(job: str) -> str:
    """Give the name of the run of a job that `raymoe submit` started."""
    return as_file_name(job, most=128)


def version_notice() -> str | None:
    """Say that the job was submitted by another version of raymoe; None if it was not."""
    job = ray_job()
    version = job.metadata.get("raymoe_version", raymoe.__version__) if job else raymoe.__version__
    if version == raymoe.__version__:
        return None
    return (
        f"submitted by raymoe {shown(version)}, run by raymoe {raymoe.__version__}: "
        "packaged configs and defaults may differ; install the same version on both sides"
    )
