"""Links in the documents resolve, and files that documents and code name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.python_path import REPOSITORY

ROOT = REPOSITORY
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "kernels" / "README.md"])
FOLDERS = ("raymoe", "kernels", "tests", "configs", "jobs", "docs", "examples", "benchmarks")
SOURCES = [
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
]
NAMES = {path.name for path in SOURCES} | {path.name for path in ROOT.iterdir()}
EXTERNAL_NAMES = {
    "a.cuh",  # an example
    "job_supervisor.py",  # of Ray
    *("elastic.py", "comm.cuh"),  # of DeepEP
    *("trtllm_moe_alltoall.py", "comm.py"),  # of FlashInfer
    "nvshmem_extension.cu",  # of torch
}
"""File names that are not in the repository."""
_SOURCE_NAME = re.compile(r"(?<![\w.*{-])([a-z][a-z0-9_]*\.(?:py|cu|cuh))\b(?!\()")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_resolves(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = page if not path else (page.parent / path).resolve()
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_named_in_a_page_exist(page: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_files_named_in_code_and_pages_exist() -> None:
    wrong = []
    for path in [*SOURCES, *PAGES]:
        if path.suffix not in (".py", ".cu", ".cuh", ".md") or path.name == "CHANGELOG.md":
            continue
        if REPOSITORY / "tests" / "unit" in path.parents:  # unit tests name files that they create
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            names = set(_SOURCE_NAME.findall(line)) - NAMES - EXTERNAL_NAMES
            wrong += [f"{path.relative_to(ROOT)}:{number}: {name}" for name in names]
    assert wrong == []
