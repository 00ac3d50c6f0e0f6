"""The job that the user asked for: typed YAML, sweeps, units.

Read first: `sections.py` (every key), `job.py` (the job and its cases), `check.py` (from a file to a job).
"""

from raymoe.config.check import load_job
from raymoe.config.job import Case, Job
from raymoe.config.write import job_schema, to_yaml

__all__ = ["Case", "Job", "job_schema", "load_job", "to_yaml"]
