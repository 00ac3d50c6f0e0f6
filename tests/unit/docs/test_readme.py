"""README.md is short, its tables are those of the evidence, and docs/README.md leads to every page."""

from __future__ import annotations

import re

from tests.python_path import REPOSITORY
from tests.unit.docs.measured_tables import TABLES, Table

README = (REPOSITORY / "README.md").read_text()
INDEX = (REPOSITORY / "docs" / "README.md").read_text()


def table_of(first: str, page: str) -> Table:
    [table] = [each for each in TABLES if (each.first, each.page) == (first, page)]
    return table


def test_it_is_read_in_a_minute() -> None:
    assert len(README.splitlines()) <= 110
    assert 500 < len(README.split()) < 900


def test_its_table_has_rows_of_the_comparison() -> None:
    table = table_of("tokens, 2× H200", "evidence/comparison.md")
    head, _, *rows = table.cells()
    assert f"| {' | '.join(head)} |" in README
    lines = [f"| {' | '.join(row)} |" for row in rows if row[0] in ("128", "4096")]
    assert len(lines) == 2 and all(line in README for line in lines), "copy the rows from comparison.md"


def test_its_times_as_fp8_are_those_of_the_performance_page() -> None:
    rows = {
        row["tokens as fp8, 2× H200"]: row
        for row in table_of("tokens as fp8, 2× H200", "evidence/performance.md").rows()
    }
    few, many = rows["128"], rows["4096"]
    said = (
        f"As fp8 a dispatch takes {few['dispatch as fp8']} and {many['dispatch as fp8']}; "
        f"its row push {few['row push as fp8']} and {many['row push as fp8']}."
    )
    assert said in " ".join(README.split())


def test_the_index_leads_to_every_page() -> None:
    pages = {path.relative_to(REPOSITORY / "docs") for path in (REPOSITORY / "docs").rglob("*.md")}
    listed = set(re.findall(r"\]\(([^)#]+)", INDEX))
    missing = {str(page) for page in pages if str(page) not in listed and page.parent.name != "experiments"}
    assert missing == {"README.md", "package.md"}
    experiments = (REPOSITORY / "docs" / "evidence" / "experiments" / "README.md").read_text()
    names = {page.name for page in pages if page.parent.name == "experiments"} - {"README.md"}
    assert {name for name in names if f"]({name})" not in experiments} == set()
