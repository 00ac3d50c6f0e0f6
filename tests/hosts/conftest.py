"""The environments of the hosts: made by the first test that needs one, in `.hosts/`, or in $RAYMOE_HOSTS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Programs for the environments.
collect_ignore_glob = [
    "deep_ep_*.py",
    "deepspeed_*.py",
    "megatron_*.py",
    "torchtitan_*.py",
    "transformers_*.py",
    "vllm_[mrw]*.py",
]


BROKEN_BY_VLLM = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM for CPUs brings, in builds for CUDA. transformers imports those that are there."""


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def python_of(host: str, without: tuple[str, ...] = ()) -> Path:
    """Return the interpreter of a host's environment, which has what `tests/hosts/HOST.txt` lists.

    The packages `without` are removed again: those that the others bring and that do not work. Where packages cannot
    be installed, the test is skipped. In CI it fails.
    """
    folder = Path(os.environ.get("RAYMOE_HOSTS", ROOT / ".hosts")) / host
    wanted = ROOT / "tests" / "hosts" / f"{host}.txt"
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == wanted.read_text():
        return python
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(wanted)]
    commands = [[sys.executable, "-m", "venv", "--clear", str(folder)], install]
    if without:
        commands.append([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *without])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            reason = f"the packages of {host} cannot be installed here: {last_line(done.stderr or done.stdout)}"
            pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    stamp.write_text(wanted.read_text())
    return python


Run = Callable[..., str]


@pytest.fixture
def on_ranks() -> Run:
    """`on_ranks(host, ranks, module, *arguments)` runs a module on ranks under torchrun, and returns its output."""

    def run(host: str, ranks: int, module: str, *arguments: str) -> str:
        python = python_of(host)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        done = subprocess.run(
            [str(python), *(torchrun if ranks else ["-m"]), module, *arguments],
            capture_output=True,
            text=True,
            timeout=600,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done.stdout + done.stderr

    return run
