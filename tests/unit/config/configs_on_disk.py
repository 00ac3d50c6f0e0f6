"""Write a config for one test, and collect the problems that the loader finds in it."""

from pathlib import Path
from textwrap import dedent

import pytest

from raymoe.config import load_job
from raymoe.errors import ConfigError


def write(folder: Path, text: str, name: str = "x.yaml") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return str(path)


def refused(config: str, *sets: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_job(config, sets)
    assert "\n" not in str(caught.value)
    return caught.value


def problems(folder: Path, text: str, *sets: str) -> list[str]:
    """Return the problems of a config, without the folder's name."""
    return [str(problem).replace(f"{folder}/", "") for problem in refused(write(folder, text), *sets).problems]
