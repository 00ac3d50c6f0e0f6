"""docs/security.md: every claim names tests, and they are there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.python_path import REPOSITORY

PAGE = REPOSITORY / "docs" / "security.md"
CLAIMED = PAGE.read_text().partition("\n## Configs and traces\n")[2].partition("\n## Limits\n")[0]
ITEMS = [" ".join(item.split()) for item in re.findall(r"^\* (.+?)(?=^\*|^#|^$|\Z)", CLAIMED, re.MULTILINE | re.DOTALL)]
CLAIMS = [(claim, tests) for claim, tests in (re.split(r" (?=\[\w+\.py\])", item, maxsplit=1) for item in ITEMS)]


def test_there_are_claims() -> None:
    """An item without a test does not come so far: it cannot be split."""
    assert len(CLAIMS) > 15 and len(CLAIMS) == len(re.findall(r"^\* ", CLAIMED, re.MULTILINE))


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
