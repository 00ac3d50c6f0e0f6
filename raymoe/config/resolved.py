"""Makes a job again from the plain values of `Job.resolved`, and refuses any other values.

The values come from a run directory or from another process, so nothing about them is taken for granted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from raymoe.config.explain import key_tree
from raymoe.config.job import MAX_CASES, Job, size
from raymoe.config.rules import broken_rules
from raymoe.config.sweep import sweepable
from raymoe.config.yaml_tree import Scalar
from raymoe.errors import ConfigError, shown

MOST_TOLD = 10  # problems that the error names


def job_from_resolved(resolved: dict[str, Any]) -> Job:
    """Make the job again. Raises ConfigError with the problems of values that `Job.resolved` would not give."""
    try:
        job = Job.model_validate(resolved)
        problems = _matrix_problems(job.matrix)
        problems = problems or [str(wrong) for case in job.cases() for wrong in broken_rules(case.job)]
    except ValidationError as error:
        problems = [f"{shown('.'.join(map(str, wrong['loc'])))}: {wrong['msg']}" for wrong in error.errors()]
    if problems:
        more = f"; and {len(problems) - MOST_TOLD} more" if len(problems) > MOST_TOLD else ""
        raise ConfigError(f"not a resolved job: {'; '.join(problems[:MOST_TOLD])}{more}")
    return job


def _matrix_problems(matrix: Mapping[str, Sequence[Scalar]]) -> list[str]:
    """Find the problems of a matrix that `read_matrix` has not checked, before its cases are made."""
    known = sweepable(key_tree())
    problems = [f"matrix.{shown(key)}: no such key" for key in matrix if key not in known]
    if (cases := size(matrix)) > MAX_CASES:
        problems.append(f"matrix: {cases} cases, at most {MAX_CASES} are run")
    return problems
