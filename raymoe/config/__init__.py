"""Reads a job from YAML: typed sections, sizes with units, sweeps, and every mistake explained.

Read first: `sections.py` (every key), `job.py` (the job and its cases), `check.py` (a file becomes a job).
`submission.py` reads the files of `jobs/`.
"""

from raymoe.config.check import job_from_resolved, load_job
from raymoe.config.job import Case, Job
from raymoe.config.write import job_schema, to_yaml

__all__ = ["Case", "Job", "job_from_resolved", "job_schema", "load_job", "to_yaml"]
