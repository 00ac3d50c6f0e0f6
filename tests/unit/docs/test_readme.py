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


def test_its_table_is_that_of_the_comparison() -> None:
    table = table_of("both operations, tokens", "evidence/comparison.md")
    assert all(f"| {' | '.join(row)} |".replace("|  |", "| |") in README for row in table.cells()), "copy the table"


def test_the_index_leads_to_every_page() -> None:
    pages = {path.relative_to(REPOSITORY / "docs") for path in (REPOSITORY / "docs").rglob("*.md")}
    listed = set(re.findall(r"\]\(([^)#]+)", INDEX))
    missing = {str(page) for page in pages if str(page) not in listed and page.parent.name != "experiments"}
    assert missing == {"README.md", "package.md"}
    experiments = (REPOSITORY / "docs" / "evidence" / "experiments" / "README.md").read_text()
    names = {page.name for page in pages if page.parent.name == "experiments"} - {"README.md"}
    assert {name for name in names if f"]({name})" not in experiments} == set()
