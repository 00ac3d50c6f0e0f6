"""Check names of tests, written `folder/file.py::test`, against the files."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the names of a file's top-level functions; none if there is no such file."""
    file = TESTS / path
    tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def missing(named: Iterable[str]) -> list[str]:
    """Return the names to which no test belongs.

    >>> file = "unit/exchange/test_plan.py"
    >>> missing([f"{file}::test_impossible_specs_are_refused", f"{file}::test_of_nothing"])
    ['unit/exchange/test_plan.py::test_of_nothing']
    """
    return [each for each in named if each.partition("::")[2] not in names_in(each.partition("::")[0])]
