"""The commands in README.md and docs/ do what these pages say: run as they stand, or named with the test that does.

The first run of a page has a Ray of its own, as on a reader's machine. Later ones are pointed at a cluster by
RAY_ADDRESS, which spares them its start.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gang.conftest import REPO, Head, address_file

PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
WANT_GPUS = ("raymoe run p2p ", "raymoe run exchange_", "raymoe run bench_")
ELSEWHERE = {
    "make run": "`make` does the set-up of this very run; what it runs is `raymoe run quickstart`, below",
    "make test": "this is it",
    "pip install .": "tests/unit/test_packaging.py",
    "ray start --head": "the fixture `head`",
    "ray job submit --working-dir . -- raymoe run quickstart": "tests/gang/test_submit.py",
    "export RAY_AUTH_MODE=token": "tests/gang/test_submit.py",
}


def commands(page: Path) -> list[str]:
    """The lines of the page's fenced blocks that have no language."""
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and re.match(r"[a-z]+ ", line) and "──" not in line]


def yaml_block(page: Path) -> str:
    found = re.search(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def test_every_command_is_run_somewhere() -> None:
    lines = [line for page in PAGES for line in commands(page)]
    assert len(lines) > 10
    unknown = [line for line in lines if line not in ELSEWHERE and not line.startswith("raymoe ")]
    assert not unknown, "run these here, or say in ELSEWHERE which test does"
    assert set(ELSEWHERE) <= set(lines), "ELSEWHERE names a command that no page has"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_raymoe_commands_of_a_page(page: Path, tmp_path: Path, head: Head) -> None:
    lines = [line for line in commands(page) if line.startswith("raymoe ")]
    if any("my.yaml" in line for line in lines):
        (tmp_path / "my.yaml").write_text(yaml_block(page))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with address_file(head.address):
        for line in lines:
            if f"{line} ".startswith(WANT_GPUS):  # here only validated
                line = line.replace("run", "validate", 1)
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            if line.startswith("raymoe run "):
                environment["RAY_ADDRESS"] = head.address
            if shlex.split(line)[1] in ("run", "report"):
                assert "p50 us" in done.stdout, f"{line}: no table\n{done.stdout}"
