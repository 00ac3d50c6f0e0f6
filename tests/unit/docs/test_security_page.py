"""docs/security.md: every claim names tests, and they are there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.python_path import REPOSITORY

PAGE = REPOSITORY / "docs" / "security.md"
ROWS = re.findall(r"^\| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
CLAIMS = [(claim, tests) for claim, tests in ROWS if "](../tests/" in tests]


def test_there_are_claims() -> None:
    assert len(CLAIMS) > 15
    two_columns = [claim for claim, _ in ROWS if claim not in ("claim", "---") and claim.count(" | ") == 0]
    assert two_columns == [claim for claim, _ in CLAIMS], "a claim names no test"


@pytest.mark.parametrize(("claim", "tests"), CLAIMS, ids=[claim[:40] for claim, _ in CLAIMS])
def test_the_tests_of_a_claim_are_there(claim: str, tests: str) -> None:
    for part in tests.split("; "):
        found = re.fullmatch(r"\[[\w.]+\]\(([^)]+)\) ((?:`\w+`(?:, )?)+)", part)
        assert found, f"{part!r} names no test of a file"
        file = (PAGE.parent / found[1]).resolve()
        there = {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
        named = re.findall(r"`(\w+)`", found[2])
        assert named and set(named) <= there
        assert all(name.startswith("test_") for name in named)
