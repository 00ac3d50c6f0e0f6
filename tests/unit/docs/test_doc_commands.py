"""Every command in the pages, and in the comments of configs and jobs, can be right: each word of it exists.

`tests/gang/test_docs.py` runs those that need no GPU and take less than a minute.
"""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.explorer.__main__ import main as explore
from tests.python_path import REPOSITORY
from tests.unit.docs.doc_commands import Command, every_command, problem

COMMANDS = every_command()
EXPLORED = [command for command in COMMANDS if command.text.startswith("python -m tests.explorer ")]


def test_there_are_commands_of_every_kind() -> None:
    assert {command.words[0] for command in COMMANDS} == {
        *("raymoe", "make", "python", "pip", "ray", "torchrun", "pytest", "prometheus", "export")
    }
    places = {command.where.partition("/")[0] for command in COMMANDS}
    assert places >= {"README.md", "CONTRIBUTING.md", "docs", "configs", "jobs", "kernels"}
    assert sum(command.whole for command in COMMANDS) > 50 and sum(not command.whole for command in COMMANDS) > 50


def test_every_command_can_be_right() -> None:
    wrong = {f"{command.where}: {command.text}": why for command in COMMANDS if (why := problem(command))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raymoe runs quickstart", "no command runs"),
        ("raymoe run quickstar", "quickstart"),
        ("raymoe run quickstart --sets a=b", "no option --sets"),
        ("raymoe run quickstart --set shape.token=8", "shape.token"),
        ("raymoe submit benchmark", "benchmark"),
        ("raymoe report", "RUN"),
        ("make tests", "no target tests"),
        ("make unit PYTEST=tests/unity", "no tests/unity"),
        ("make run CONFIGS=quickstart", "no variable CONFIGS"),
        ("python examples/none.py", "no examples/none.py"),
        ("python -m tests.nothing", "no module tests.nothing"),
        ("pip install '.[example]'", "no extra example"),
        ("ray jobs submit", "no command jobs"),
        ("export RAYMOE_NOTHING=1", "no variable RAYMOE_NOTHING"),
    ],
)
def test_a_wrong_command_is_found(text: str, why: str) -> None:
    assert why in str(problem(Command(text, "a page", whole=True)))


@pytest.mark.thorough
@pytest.mark.parametrize("command", EXPLORED, ids=lambda command: command.text)
def test_a_command_of_the_explorer_finds_what_the_page_says(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    line = next(line for line in (REPOSITORY / command.where).read_text().splitlines() if command.text in line)
    assert explore(command.words[3:]) == ("--fault" in command.words)
    states = re.findall(r"\d+ states", line)
    assert all(number in capsys.readouterr().out for number in states)


def test_make_help_lists_every_target_that_the_pages_name() -> None:
    listed = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=30)
    named = {command.words[1] for command in COMMANDS if command.words[0] == "make"}
    assert {name for name in named if f"make {name} " not in listed.stdout} == set()
