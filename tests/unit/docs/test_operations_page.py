"""docs/evidence/faults.md shows the lines of benchmarks/faults_*.jsonl; docs/operations.md explains every exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from raymoe import errors
from raymoe.shell import STOP_SIGNALS
from tests.gang.fault_table import COMMANDS, FAULTS, FILES, PAGE, ROOT, SECTIONS, Section, lines_of, with_tables


def test_the_tables_show_the_raw_lines() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "write the tables with `python -m tests.gang.fault_table`"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_every_fault_is_measured_and_leaves_nothing(section: Section) -> None:
    if section.kind == "gpu" and not FILES["gpu"].exists():
        assert "Measured: <!-- measured gpu -->not yet<!-- end of measured gpu -->" in PAGE.read_text()
        return
    for name, lines in lines_of(section).items():
        assert lines, f"{name} is not measured: `{COMMANDS[section.kind]}`"
        for line in lines:
            assert (line["processes_left"], line["shared_memory_left"]) == (0, 0), line


def test_every_line_is_of_a_known_fault_and_of_a_clean_commit() -> None:
    for path in filter(Path.exists, FILES.values()):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            assert line["fault"] in FAULTS and not line["commit"].endswith("-dirty"), line


def test_every_fault_has_a_test() -> None:
    folders = (ROOT / "tests" / "gang", ROOT / "tests" / "gpu")
    sources = "".join(path.read_text() for folder in folders for path in folder.glob("test_*.py"))
    families = {"sigterm-placing", "sigterm-starting"}  # names that a test makes from a parameter
    families |= {name for name in FAULTS if re.fullmatch("sig.*-cluster", name)}
    assert [name for name in FAULTS if f'"{name}"' not in sources and name not in families] == []


def test_the_page_explains_every_exit_code() -> None:
    page = ROOT / "docs" / "operations.md"
    shown = re.findall(r"^\| ([\d, ]+) \|", page.read_text().partition("## Exit codes")[2], re.MULTILINE)
    codes = {int(code) for cell in shown for code in cell.split(",")}
    classes = [value for name in errors.__all__ if isinstance(value := getattr(errors, name), type)]
    own = {each.exit_code for each in classes if isinstance(getattr(each, "exit_code", None), int)}
    assert codes == {0, 137, *own, *(128 + number for number in STOP_SIGNALS)}
