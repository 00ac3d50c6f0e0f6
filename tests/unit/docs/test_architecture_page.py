"""docs/internals/architecture.md has every folder of raymoe/, and counts the lines of its reading order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.python_path import REPOSITORY

PAGE = (REPOSITORY / "docs" / "internals" / "architecture.md").read_text()
HOUSE, READING = (
    PAGE[PAGE.index(start) : PAGE.index(end)]
    for start, end in (
        ("## The house", "To read in a day"),
        ("To read in a day", "## Three planes"),
    )
)


def test_every_folder_and_file_at_the_top_of_the_package_is_listed() -> None:
    top = [path for path in (REPOSITORY / "raymoe").iterdir() if not path.name.startswith(("_", "."))]
    names = {f"{path.name}/" if path.is_dir() else path.name for path in top}
    sources = {name for name in names if name.endswith(("/", ".py"))}
    assert sources - set(re.findall(r"`([\w./]+)`", HOUSE)) == set()


def test_the_reading_order_has_as_many_lines_as_it_says() -> None:
    stated = re.search(r"about ([\d,]+) lines", READING)
    assert stated
    rows = [line for line in READING.splitlines() if line.startswith("|")]
    files = [found(name) for line in rows for name in re.findall(r"`([\w/]+\.\w+)`", line)]
    files.append(REPOSITORY / "docs" / "internals" / "architecture.md")
    assert len(files) > 15
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert lines == pytest.approx(int(stated[1].replace(",", "")), rel=0.05)


def found(name: str) -> Path:
    """Return the file that the page calls `name`: below the package, the repository or the kernels' headers."""
    places = (REPOSITORY / "raymoe", REPOSITORY, REPOSITORY / "kernels" / "include" / "raymoe")
    there = [place / name for place in places if (place / name).is_file()]
    assert len(there) == 1, f"{name} names {len(there)} files"
    return there[0]
