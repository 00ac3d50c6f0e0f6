"""kernels/README.md names every kernel and every header, and only headers that the kernel uses."""

from __future__ import annotations

import re
from pathlib import Path

from raymoe.packaged import packaged_folder
from tests.python_path import REPOSITORY

KERNELS = packaged_folder("kernels")
HEADERS = KERNELS / "include" / "raymoe"
PAGE = (REPOSITORY / "kernels" / "README.md").read_text()


def included(path: Path) -> set[str]:
    """Every header that a file includes, directly or through another."""
    found: set[str] = set()
    waiting = [path]
    while waiting:
        for name in set(re.findall(r'#include "raymoe/(\S+)"', waiting.pop().read_text())) - found:
            found.add(name)
            waiting.append(HEADERS / name)
    return found


def test_the_page_names_every_kernel() -> None:
    assert set(re.findall(r"^\| \[(\w+\.cu)\]", PAGE, re.MULTILINE)) == {path.name for path in KERNELS.rglob("*.cu")}


def test_the_page_names_every_header_in_its_folder() -> None:
    listed, folder = set(), ""
    for line in PAGE.partition("## Headers")[2].splitlines():
        if cells := re.match(r"\| (?:`([\w/]+)/`)? *\| (.*?) \|", line):
            folder = cells[1] or folder
            listed |= {f"{folder}/{name}" for name in re.findall(r"`(\w+\.cuh)`", cells[2])}
    assert listed == {str(path.relative_to(HEADERS)) for path in HEADERS.rglob("*.cuh")}


def test_a_kernel_uses_the_headers_beside_its_name() -> None:
    kernel, wrong = "", []
    for line in PAGE.partition("## Headers")[0].splitlines():
        if line.startswith("|"):
            named = re.match(r"\| \[\w+\.cu\]\(([\w/]+\.cu)\)", line)
            kernel = named[1] if named else kernel
            for header in re.findall(r"`([\w/]+/\w+\.cuh)`", line):
                if header not in included(KERNELS / kernel):
                    wrong.append(f"{kernel}: {header}")
    assert wrong == []
