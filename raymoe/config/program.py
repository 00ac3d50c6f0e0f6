"""The key `program` of a job: a Python file or module that a cluster runs instead of a config."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from raymoe.config.files import shown_path
from raymoe.config.sections import Section

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

Wrong = tuple[str, str, str | None]
"""A key, what is wrong with it, and what to write."""


class ProgramSection(Section):
    """A program instead of a config: one of `file` and `module`. RAYMOE_OUT has its directory for results."""

    file: Text | None = Field(default=None, examples=["train.py"])
    """Python file in runtime_env.working_dir, relative to this file."""
    module: Text | None = Field(default=None, examples=["my_package.train"])
    """Module, as python -m takes it: uploaded by runtime_env, or installed."""
    arguments: Texts = Field(default=(), examples=[["--steps", "24"]])
    """Words for the program: {out} becomes its directory for results, {run} the run's name."""

    @property
    def called(self) -> str:
        """The file or the module, after which the job is called."""
        return self.module or self.file or ""


def wrong_program(
    program: ProgramSection, folder: Path, directory: Path | None, modules: Sequence[Path]
) -> Iterator[Wrong]:
    """Yield what is wrong with a program of a job in `folder`, which uploads a directory and modules."""
    if (program.file is None) == (program.module is None):
        both = program.file is not None
        yield "program", "has both file and module" if both else "has no file", "give one of file and module"
    elif program.file is not None:
        yield from _wrong_file(program.file, folder, directory)
    elif program.module is not None:
        yield from _wrong_module(program.module, directory, modules)


def _wrong_file(name: str, folder: Path, directory: Path | None) -> Iterator[Wrong]:
    path = normal(folder / name)
    if not path.is_file():
        yield "program.file", "no such file", f"looked for {shown_path(path)}"
    elif directory is None:
        reason = "the cluster has no such file, since runtime_env.working_dir names no directory here"
        yield "program.file", reason, "set runtime_env.working_dir to a directory that holds it"
    elif directory.is_dir() and not path.is_relative_to(directory):
        reason = f"does not hold {shown_path(path)}, which is the program"
        yield "runtime_env.working_dir", reason, "name a directory above it"


def _wrong_module(name: str, directory: Path | None, modules: Sequence[Path]) -> Iterator[Wrong]:
    if name.endswith(".py") or not _MODULE.fullmatch(name):
        hint = "use file for a path" if "/" in name or name.endswith(".py") else "write it as package.module"
        yield "program.module", "not the name of a Python module", hint
        return
    top, _, rest = name.partition(".")
    packages = [path for path in (*modules, *([directory / top] if directory else [])) if path.name == top]
    for package in packages:
        if package.is_dir() and not _holds(package, rest):
            missing = shown_path(package.joinpath(*rest.split(".")) if rest else package / "__main__")
            yield "program.module", "the directory that is uploaded has no such module", f"looked for {missing}.py"
            return


def _holds(package: Path, rest: str) -> bool:
    """Whether Python's option -m can run a module of a package."""
    place = package.joinpath(*rest.split(".")) if rest else package
    return place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()


def entrypoint(program: ProgramSection, folder: Path, directory: Path | None) -> tuple[str, ...]:
    """Return the command that runs the program on the cluster, in the directory that is uploaded."""
    what: tuple[str, ...] = ("-m", program.called)
    if program.file is not None and directory is not None:
        what = (os.path.relpath(normal(folder / program.file), directory),)
    return ("python", "-m", "raymoe.program", *what, *program.arguments)


def normal(path: Path) -> Path:
    """Make a path absolute and free of `..`, without a look at links."""
    return Path(os.path.normpath(path.absolute()))
