"""Tests that a list names, `folder/file.py::test`: which of them are not there."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]


@cache
def names_in(path: str) -> frozenset[str]:
    """Of a file's tests; none where there is no such file."""
    file = TESTS / path
    tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def missing(named: Iterable[str]) -> list[str]:
    """
    >>> missing(["unit/test_plan.py::test_specs_that_cannot_be", "unit/test_plan.py::test_of_nothing"])
    ['unit/test_plan.py::test_of_nothing']
    """
    return [each for each in named if each.partition("::")[2] not in names_in(each.partition("::")[0])]
