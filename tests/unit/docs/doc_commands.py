"""The commands that readers see: in pages, and in the comments of configs and jobs; and whether each can be right."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
import yaml

from raymoe import cli
from raymoe.config import load_job
from raymoe.config.submission import load_submission
from raymoe.errors import ConfigError
from tests.python_path import REPOSITORY

PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "kernels" / "README.md"])
COMMENTED = sorted([*(REPOSITORY / "configs").glob("*.yaml"), *(REPOSITORY / "jobs").rglob("*.yaml")])
PROGRAMS = ("raymoe", "make", "python", "pip", "ray", "torchrun", "pytest", "prometheus", "export")
_STARTS = re.compile(rf"(?:{'|'.join(PROGRAMS)}) ")
_INLINE = re.compile(rf"`((?:{'|'.join(PROGRAMS[:-1])}) [^`\n]+)`")
_LANGUAGES = ("", "sh", "text")


@dataclass(frozen=True)
class Command:
    """One command. A `whole` one stands in a block or on a line of its own, to be copied; others are in a sentence."""

    text: str
    where: str
    whole: bool

    @property
    def words(self) -> list[str]:
        """The words without a redirection of the output."""
        words = shlex.split(self.text)
        return words[: words.index(">")] if ">" in words else words


def whole_commands(page: Path) -> list[Command]:
    """Return the commands in a page's blocks, without comments. A comment begins with ` #` or two spaces."""
    found = []
    for language, block in re.findall(r"^ *```([^\n]*)\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL):
        if language in _LANGUAGES:
            lines = [re.split(r" #| {2,}", line.strip(), maxsplit=1)[0] for line in block.splitlines()]
            found += [line for line in lines if _STARTS.match(line) and "──" not in line]
    return [Command(line, name_of(page), whole=True) for line in found]


def sentence_commands(path: Path, text: str) -> Iterator[Command]:
    """Yield the commands between backticks, outside of blocks."""
    for found in _INLINE.findall(re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        yield Command(found, name_of(path), whole=False)


def commented_commands(path: Path) -> Iterator[Command]:
    """Yield the commands in the comments of a YAML file: on lines of their own, and between backticks."""
    comments = "\n".join(line.removeprefix("#") for line in path.read_text().splitlines() if line.startswith("#"))
    for line in comments.replace("\\\n", " ").splitlines():
        if line.startswith("   ") and _STARTS.match(line.strip()):
            yield Command(line.strip(), name_of(path), whole=True)
    yield from sentence_commands(path, comments.replace("\n", " "))


def every_command() -> list[Command]:
    """Return each different command once. `a && b` are two."""
    found = [command for page in PAGES for command in whole_commands(page)]
    found += [command for page in PAGES for command in sentence_commands(page, page.read_text())]
    found += [command for path in COMMENTED for command in commented_commands(path)]
    manifest = REPOSITORY / "jobs" / "kubernetes" / "rayjob.yaml"
    found.append(Command(" ".join(entrypoint(manifest).split()), name_of(manifest), whole=True))
    split = [Command(text, each.where, each.whole) for each in found for text in each.text.split(" && ")]
    return list({(each.text, each.whole): each for each in split}.values())


def entrypoint(manifest: Path) -> str:
    [job] = [each for each in yaml.safe_load_all(manifest.read_text()) if each and each["kind"] == "RayJob"]
    return str(job["spec"]["entrypoint"])


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


# Whether a command can be right, without running it.


def problem(command: Command) -> str | None:
    """Say why a command cannot be right: an unknown option, config, key, target, file or variable. None if it can."""
    program, *rest = command.words
    if "…" in rest or "..." in rest:
        rest = rest[: min(rest.index(mark) for mark in ("…", "...") if mark in rest)]
    check = {
        "raymoe": _raymoe,
        "make": _make,
        "python": _python,
        "pytest": _paths,
        "torchrun": _paths,
        "pip": _pip,
        "ray": _ray,
        "export": _export,
    }.get(program)
    return check(rest, command.whole) if check else None


def _raymoe(words: Sequence[str], whole: bool) -> str | None:
    group = typer.main.get_command(cli.app)
    commands = getattr(group, "commands")  # noqa: B009  (typer's group has no public type)
    name, *rest = words
    if name not in commands:
        return f"raymoe has no command {name}"
    known = {option for parameter in commands[name].params for option in parameter.opts}
    if unknown := [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]:
        return f"raymoe {name} has no option {unknown[0]}"
    if not whole and (not rest or rest[-1] in known):
        return None  # a sentence names the command or the option, not a call
    try:
        with commands[name].make_context(f"raymoe {name}", rest) as context:
            given = context.params
        if name in ("run", "validate", "show"):
            for config in filter(_is_name, given["configs"] if name == "validate" else [given["config"]]):
                load_job(config, given["sets"] or ())
        if name == "submit" and _is_name(given["job"]):
            load_submission(given["job"], given["sets"] or ())
    except cli.UsageError as error:
        return error.format_message()
    except ConfigError as error:
        return str(error)
    return None


def _is_name(word: str | None) -> bool:
    """Whether a word names a packaged config or job: not a placeholder such as CONFIG, nor a file of the reader."""
    return word is not None and not word.isupper() and not word.endswith(".yaml")


def _make(words: Sequence[str], _: bool) -> str | None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for word in words:
        name, equals, value = word.partition("=")
        if not equals and not re.search(rf"^{re.escape(name)}:", makefile, re.MULTILINE):
            return f"the Makefile has no target {name}"
        if equals and f"$({name})" not in makefile:
            return f"the Makefile has no variable {name}"
        if name == "PYTEST" and (wrong := _paths(shlex.split(value), True)):
            return wrong
        if name == "CONFIG":
            load_job(value)
    return None


def _python(words: Sequence[str], _: bool) -> str | None:
    if words[0] != "-m":
        return _paths(words, True)
    if importlib.util.find_spec(words[1]) is None:
        return f"there is no module {words[1]}"
    if words[1] == "raymoe" and len(words) > 2:
        return _raymoe(words[2:], True)
    if words[1] == "tests.explorer":
        from tests.explorer.__main__ import parser

        parser().parse_args(list(words[2:]))  # ends the process if it refuses
    return None


def _paths(words: Sequence[str], _: bool) -> str | None:
    """Find a path of the repository that does not exist."""
    paths = [word for word in words if "/" in word and not word.startswith(("-", "/"))]
    missing = [path for path in paths if not (REPOSITORY / path).exists()]
    return f"there is no {missing[0]}" if missing else None


def _pip(words: Sequence[str], _: bool) -> str | None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"\[(\w+)\]", words[-1])
    missing = [extra for extra in extras if extra not in project["optional-dependencies"]]
    return f"pyproject.toml has no extra {missing[0]}" if missing else None


def _ray(words: Sequence[str], whole: bool) -> str | None:
    """Follow the words to a command of Ray; parse its options if the command is whole."""
    from ray.scripts.scripts import cli as ray

    command, rest = ray, list(words)
    while rest and hasattr(command, "commands"):
        name = rest.pop(0)
        if name not in command.commands:
            return f"ray has no command {name}"
        command = command.commands[name]
    if whole:
        command.make_context("ray", rest)  # raises a usage error
    return None


def _export(words: Sequence[str], _: bool) -> str | None:
    name = words[0].partition("=")[0]
    sources = (path.read_text() for path in (REPOSITORY / "raymoe").rglob("*.py"))
    return None if any(f'"{name}"' in source for source in sources) else f"raymoe reads no variable {name}"
