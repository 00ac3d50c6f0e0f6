"""What the user asked for: typed YAML, sweeps, units. Imports nothing else of raymoe."""

from raymoe.job.load import load_job
from raymoe.job.model import Case, Job
from raymoe.job.schema import job_schema
from raymoe.job.write import to_yaml

__all__ = ["Case", "Job", "job_schema", "load_job", "to_yaml"]
