"""The pictures of docs/report.md are pages of whole, verified runs of clean commits, which the page names."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.python_path import REPOSITORY
from tests.unit.docs.measured_figures import FOLDER
from tests.unit.docs.report_pictures import PICTURES, html_of

PAGE = (REPOSITORY / "docs" / "report.md").read_text()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_of_a_verified_run_of_a_clean_commit(name: str, tmp_path: Path) -> None:
    picture = PICTURES[name]
    lines = list(picture.source.lines())
    commits = {str(line["commit"]) for line in lines}
    assert len(commits) == 1 and not any(commit.endswith("-dirty") for commit in commits)
    assert f"`{commits.pop()}`" in PAGE and f"benchmarks/{picture.source.file}.jsonl" in PAGE
    assert f"figures/{name}.png" in PAGE
    html = html_of(picture, tmp_path)
    assert "✓ Done" in html and "WRONG" not in html and str(lines[0]["run"]) in html
    fastest = "fused is 1.60x as fast as staged at 8192 tokens a rank" if name == "report-desktop" else "experts 87%"
    assert fastest in html


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_the_size_of_its_window(name: str) -> None:
    header = (FOLDER / f"{name}.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:24]) == PICTURES[name].size
