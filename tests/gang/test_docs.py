"""Every command of a page or of a config's comment that a reader copies is run here, or by the test in ELSEWHERE.

Commands that need GPUs are only validated. test_doc_commands.py parses all, also those in sentences. The
README's first run starts its own Ray, as on a reader's machine. Other runs are on a shared cluster, to save the start.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import ray

from raymoe.config import load_job
from raymoe.config.job import kind_of_ranks
from tests.gang.conftest import REPO, Head, address_file
from tests.python_path import python_path
from tests.unit.docs import library_page
from tests.unit.docs.doc_commands import COMMENTED, PAGES, Command, commented_commands, name_of, whole_commands

README = REPO / "README.md"
READ_FIRST = [README, *(page for page in PAGES if page != README)]
ELSEWHERE = {
    "make test": "tests/gang/test_docs.py",  # it runs this test
    "make test-all": "tests/gang/test_docs.py",  # or this one, which runs the commands of pages
    "make check": "Makefile",  # a half of `make test`
    "torchrun --nproc-per-node 2 examples/train.py": "tests/gang/test_examples.py",
    "make hosts": "tests/hosts/test_torchtitan.py",
    "torchrun --nproc-per-node 8 -m torchtitan.train --module qwen3 --config … --override.imports $on.dispatcher "
    "$on.selective_ac": "tests/hosts/test_torchtitan.py",
    'make unit PYTEST="tests/unit -k plan"': "tests/unit/exchange/test_plan.py",
    'make unit PYTEST="tests/unit/cuda/test_kernels_compile.py tests/unit/exchange/peer/test_kernels_emulated.py"': (
        "tests/unit/exchange/peer/test_kernels_emulated.py"
    ),
    "pip install .": "tests/unit/house/test_packaging.py",
    "pip install raymoe": "tests/gang/test_wheel.py",
    "ray start --head": "tests/gang/conftest.py",
    "ray job submit --working-dir . -- raymoe run quickstart": "tests/gang/test_submit.py",
    "prometheus --config.file=/tmp/ray/session_latest/metrics/prometheus/prometheus.yml": "tests/gang/test_metrics.py",
    "export RAY_AUTH_MODE=token": "tests/gang/test_submit.py",
    "export RAY_API_SERVER_ADDRESS=http://HOST:8265": "tests/gang/test_docs.py",  # with the address of the head
    "raymoe submit quickstart": "tests/gang/test_submit_command.py",
    "raymoe submit quickstart --detach": "tests/gang/test_submit_command.py",
    "raymoe submit train": "tests/hosts/test_training_job.py",
    "raymoe run train --set steps.count=100000 --set train.checkpoint_every=1000": "tests/gang/test_train.py",
    "raymoe attach ID": "tests/gang/test_submit_command.py",
    "raymoe logs ID": "tests/gang/test_submit_command.py",
    "raymoe stop ID": "tests/gang/test_submit_command.py",
    "python -m tests.perf.sm_probe --out sm_probe.jsonl": "tests/unit/cuda/test_sm_probe.py",
    "torchrun --nproc-per-node 2 -m tests.perf.few_sms --out few_sms.jsonl": "tests/perf/few_sms.py",  # on two GPUs
    "torchrun --nproc-per-node 2 -m tests.perf.few_sms --layouts expert --tokens 16 128 256 512 "
    "--ways flags divided lines --out few_tokens.jsonl": "tests/perf/few_sms.py",  # on two GPUs
    "raymoe schema --markdown > docs/configuration.md": "tests/unit/docs/test_configuration_page.py",
    "pytest -m thorough tests/gpu/test_microbatches_gpu.py -k 10000": "tests/gpu/test_microbatches_gpu.py",
    "pytest tests/unit/exchange/peer -k protocol": "tests/unit/exchange/peer/test_protocol_explorer.py",
}
"""Commands with the file that runs them, or runs what they run."""


def steps(command: Command) -> list[str]:
    return command.text.split(" && ")


def of_configs() -> list[Command]:
    """Return the commands in the comments of configs and jobs."""
    return [command for path in COMMENTED for command in commented_commands(path) if command.whole]


def to_run(line: str) -> str | None:
    """Return what to run for a line of a page; None if another test runs it.

    A run that needs GPUs is validated. A job for a cluster at HOST, and `doctor --tune`, are only parsed.
    """
    words = Command(line, "", whole=True).words
    if line in ELSEWHERE or "HOST" in line or "--tune" in words:
        return None
    if words[1] != "run" or words[2].endswith(".yaml"):
        return line
    sets = [word for before, word in pairwise(words) if before == "--set"]
    return line.replace("run", "validate", 1) if kind_of_ranks(load_job(words[2], sets)) == "cuda" else line


def yaml_block(page: Path) -> str:
    block = re.search(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert block
    return block[1]


def test_every_command_is_run_by_a_test() -> None:
    commands = [command for page in PAGES for command in whole_commands(page)] + of_configs()
    lines = [line for command in commands for line in steps(command)]
    assert len(lines) > 50
    explored = "python -m tests.explorer "  # tests/unit/docs/test_doc_commands.py runs these
    unknown = [line for line in lines if line not in ELSEWHERE and not line.startswith(("raymoe ", explored))]
    assert not unknown, "no test runs these commands; run them here or name their test in ELSEWHERE"
    assert set(ELSEWHERE) <= set(lines), "ELSEWHERE names a command that no page has"
    assert [path for path in ELSEWHERE.values() if not (REPO / path).is_file()] == []


@pytest.fixture(scope="module")
def ran() -> set[str]:
    """The commands that ran. A command that leaves no file for the next one runs once, even if many pages have it."""
    return set()


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", [*READ_FIRST, None], ids=lambda page: "configs" if page is None else name_of(page))
def test_the_raymoe_commands_of_a_page_succeed(page: Path | None, tmp_path: Path, head: Head, ran: set[str]) -> None:
    commands = of_configs() if page is None else whole_commands(page)
    lines = [line for command in commands for line in steps(command) if line.startswith("raymoe ")]
    if page is not None and any("my.yaml" in line for line in lines):
        (tmp_path / "my.yaml").write_text(yaml_block(page))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment["RAY_API_SERVER_ADDRESS"] = head.dashboard
    if page != README:
        environment["RAY_ADDRESS"] = head.address
    with address_file(head.address):
        for line in map(to_run, lines):
            if line is None or (line in ran and "--out" not in line):
                continue
            ran.add(line)
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
            if line.startswith(("raymoe run ", "raymoe report ")):
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


@pytest.mark.thorough
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
