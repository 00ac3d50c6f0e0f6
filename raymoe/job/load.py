"""A job from a config and settings."""

import re
from collections.abc import Sequence
from pathlib import Path

from raymoe.job.check import checked
from raymoe.job.errors import ConfigError
from raymoe.job.layers import layered
from raymoe.job.model import Job
from raymoe.job.reading import find_config
from raymoe.job.report import report


def load_job(config: str, sets: Sequence[str] = ()) -> Job:
    """The job in a file, or in a packaged config of that name, with `a.b=c` settings over it.

    ConfigError tells every problem at once. A job is called after its file unless it has a name.
    """
    path = find_config(config)
    try:
        layers = layered(path, sets)
    except ConfigError as error:
        raise report(error.problems[0].where, error.problems) from error
    return checked(layers, _name(path))


def _name(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem).strip("-._")[:64] or "job"
