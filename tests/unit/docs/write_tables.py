"""Writes the measured and the derived tables into the pages, out of benchmarks/: `make tables`."""

from __future__ import annotations

from tests.unit.docs.derived_tables import DERIVED, Derived
from tests.unit.docs.measured_tables import DOCS, TABLES, Table, written


def derived(table: Derived, page: str) -> str:
    """The page with the rows of a derived table as they are computed now."""
    start = page.index(f"| {table.first} |")
    end = page.find("\n\n", start)
    head = page[start:].splitlines()[:2]
    rows = [f"| {' | '.join(row)} |" for row in table.rows()]
    return page[:start] + "\n".join([*head, *rows]) + (page[end:] if end > 0 else "\n")


def measured(table: Table, page: str) -> str:
    start, end = table.block()
    return page[:start] + written(table) + page[end:]


if __name__ == "__main__":
    for each in TABLES:
        path = DOCS / each.page
        path.write_text(measured(each, path.read_text()))
    for other in DERIVED:
        path = DOCS / other.page
        path.write_text(derived(other, path.read_text()))
