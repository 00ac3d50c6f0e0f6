"""Ray's own tools: `ray job submit`, before and after a local run left its auth token."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gang import configs
from tests.gang.conftest import REPO, UNSET, Head, Start
from tests.gang.prometheus import prometheus

BIN = Path(sys.executable).parent


def submit(head: Head, home: Path, *words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    command = [str(BIN / "ray"), "job", "submit", "--address", head.dashboard, "--working-dir", str(REPO), "--", *words]
    environment = {**os.environ, "HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}", **(env or {})}
    environment = {name: value for name, value in environment.items() if value != UNSET}
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=110, check=False, cwd=home
        )
        output = done.stdout + done.stderr
        if "No available agent" not in output or time.monotonic() > deadline:  # the agent comes up after the head
            return done.returncode, output
        time.sleep(0.5)


def quick(out: Path | None = None, ranks: int = 1) -> list[str]:
    small = [f"world.ranks={ranks}", "shape.tokens=16", "shape.experts=8", "steps.count=2"]
    sets = [word for key in small for word in ("--set", key)]
    return ["raymoe", "run", "quickstart", *sets, *(["--out", str(out)] if out else [])]


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_job_submit_works_before_and_after_a_local_run(
    tmp_path: Path, start: Start, head: Head, guarded: tuple[Head, Path]
) -> None:
    """Before the local run there is no token. The run leaves one, so a head started later asks for it."""
    home = tmp_path / "home"
    home.mkdir()
    bare = {"HOME": str(home), "RAY_AUTH_MODE": UNSET}
    code, output = submit(head, home, *quick(ranks=2), env=bare)
    assert code == 0 and "succeeded" in output, output
    match = re.search(r"results go to (\S+)", output)
    assert match and (Path(match[1]) / "summary.json").exists()
    assert "_ray_pkg" not in match[1], "Ray deletes the working directory"

    local = start(configs.write(tmp_path, world__ranks=1), env=bare)
    assert local.end() == 0, local.stderr()
    assert (home / ".ray" / "auth_token").exists()
    head_with_auth, its_home = guarded
    its_bare = {"HOME": str(its_home), "RAY_AUTH_MODE": UNSET}
    its_token = {**its_bare, "RAY_AUTH_MODE": "token"}
    run_sends_it = start(configs.write(tmp_path), "--address", head_with_auth.address, env=its_bare)
    with ThreadPoolExecutor() as pool:
        between = pool.submit(submit, head, home, "raymoe", "--version", env=bare)
        unasked = pool.submit(submit, head_with_auth, its_home, *quick(its_home / "unasked"), env=its_bare)
        after = pool.submit(submit, head_with_auth, its_home, *quick(its_home / "after"), env=its_token)
    code, output = between.result()
    assert code == 0 and "succeeded" in output, output
    code, output = unasked.result()
    assert code != 0 and "RAY_AUTH_MODE" in output, "docs/ray.md says why"
    code, output = after.result()
    assert code == 0 and "succeeded" in output, output
    assert (its_home / "after" / "summary.json").exists()
    assert run_sends_it.end() == 0, run_sends_it.stderr()
    with prometheus(head_with_auth.folder, tmp_path) as server:  # the metrics port asks for no token
        run = (its_home / "after" / "config.yaml").read_text().splitlines()[0].removeprefix("# raymoe run ")
        assert server.wait_for(f'sum(ray_raymoe_steps_total{{run="{run}"}})')[0].value == 4


def test_a_bad_config_fails_the_job_with_exit_code_2(head: Head, tmp_path: Path) -> None:
    code, output = submit(head, Path(os.environ["HOME"]), "raymoe", "run", "quickstart", "--set", "shape.hiden=3")
    assert code == 1 and "failed with exit code 2" in output, output
    assert "did you mean" in output and "hidden" in output
