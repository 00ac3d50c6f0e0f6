"""The commands in README.md, CONTRIBUTING.md and docs/ work: they are run here, or listed with the test that runs them.

The first run of a page starts its own Ray, as on a reader's machine. RAY_ADDRESS points later runs to a shared
cluster, which saves the start.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from tests.gang.conftest import REPO, Head, address_file
from tests.python_path import python_path
from tests.unit import library_page

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))]
WANT_GPUS = ("raymoe run p2p ", "raymoe run exchange_", "raymoe run bench_")
ELSEWHERE = {
    "make run": "`make` set up this test run; the command itself is `raymoe run quickstart`, tested below",
    "make test": "it runs this test",
    "make check": "a half of `make test`",
    'make unit PYTEST="tests/unit -k plan"': "a part of `make test`",
    "pip install .": "tests/unit/test_packaging.py",
    "ray start --head": "the fixture `head`",
    "ray job submit --working-dir . -- raymoe run quickstart": "tests/gang/test_submit.py",
    "prometheus --config.file=/tmp/ray/session_latest/metrics/prometheus/prometheus.yml": "tests/gang/test_metrics.py",
    "export RAY_AUTH_MODE=token": "tests/gang/test_submit.py",
    "export RAY_API_SERVER_ADDRESS=http://HOST:8265": "below, with the address of the fixture `head`",
    "raymoe submit quickstart": "tests/gang/test_submit_command.py",
    "raymoe submit quickstart --detach": "tests/gang/test_submit_command.py",
    "raymoe attach ID": "tests/gang/test_submit_command.py",
}


def commands(page: Path) -> list[str]:
    """Return the commands in the page's fenced blocks that name no language."""
    fenced = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in fenced if not language]
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and re.match(r"[a-z]+ ", line) and "──" not in line]


def yaml_block(page: Path) -> str:
    found = re.search(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def test_every_command_in_the_docs_is_run_by_a_test() -> None:
    lines = [line for page in PAGES for line in commands(page)]
    assert len(lines) > 10
    unknown = [line for line in lines if line not in ELSEWHERE and not line.startswith("raymoe ")]
    assert not unknown, "no test runs these commands; run them here or name their test in ELSEWHERE"
    assert set(ELSEWHERE) <= set(lines), "ELSEWHERE names a command that no page has"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_the_raymoe_commands_of_a_page_succeed(page: Path, tmp_path: Path, head: Head) -> None:
    lines = [line for line in commands(page) if line.startswith("raymoe ") and line not in ELSEWHERE]
    if any("my.yaml" in line for line in lines):
        (tmp_path / "my.yaml").write_text(yaml_block(page))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if page.name == "submit.md":
        environment["RAY_API_SERVER_ADDRESS"] = head.dashboard
    with address_file(head.address):
        for line in lines:
            if f"{line} ".startswith(WANT_GPUS):  # validate only
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


@ray.remote(num_cpus=0)
class Reader:
    """A user's actor that runs code copied from the pages."""

    def run(self, blocks: list[str], rank: int, size: int) -> float:
        """Run the blocks; return the relative error of y against the README's experts."""
        import torch

        import raymoe

        x = torch.randn(512, 1024).bfloat16()
        topk_weights, topk_idx = torch.rand(512, 32).topk(4)
        names = {"raymoe": raymoe, "rank": rank, "size": size, "x": x, "experts": lambda rows: 2 * rows}
        names |= {"topk_idx": topk_idx, "topk_weights": topk_weights}
        for block in blocks:
            exec(block, names)
        names["world"].close()
        want = 2 * x.float() * topk_weights.sum(1, keepdim=True)
        return float((names["y"] - want).abs().max() / want.abs().max()) if "y" in names else 0.0


@pytest.mark.timeout(200)
def test_the_python_blocks_for_ray_actors_compute_the_expected_y(head: Head) -> None:
    """The README's block, and the block of docs/library.md that needs Ray."""
    ray.init(
        address=head.address,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
    )
    try:
        readme = [text for _, text in library_page.blocks(REPO / "README.md")]
        library = [text for need, text in library_page.blocks() if need == "ray"]
        assert len(readme) == len(library) == 1
        readers = [Reader.remote() for _ in range(2)]
        for blocks in (readme, library):
            errors = ray.get([reader.run.remote(blocks, rank, 2) for rank, reader in enumerate(readers)], timeout=100)
            assert max(errors) < 1e-2
    finally:
        ray.shutdown()
