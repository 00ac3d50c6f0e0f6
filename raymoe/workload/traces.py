"""Checks the traces of a job before it runs. Without a trace it loads no numpy, whose import takes 0.1 s."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raymoe.config import Job

BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def check_traces(job: Job) -> None:
    """Read the traces of a job, if it has any. Raises ConfigError with all problems.

    numpy would start threads when it is imported, and the main process of a run forks later.
    """
    if not any(case.job.routing.kind == "trace" for case in job.cases()):
        return
    threads = os.environ.get(BLAS_THREADS)
    os.environ[BLAS_THREADS] = "1"
    try:
        from raymoe.workload.trace_file import check_all
    finally:
        del os.environ[BLAS_THREADS]
        os.environ.update({} if threads is None else {BLAS_THREADS: threads})
    check_all(job)
