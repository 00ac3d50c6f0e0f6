"""Ray's tools: `ray job submit`, before and after a local run leaves its auth token, and the exported metrics."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.gang import configs
from tests.gang.conftest import REPO, UNSET, Head, Start, ray_head

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


@pytest.mark.timeout(300)
def test_job_submit_works_before_and_after_a_local_run(tmp_path: Path, start: Start, head: Head) -> None:
    """Before the local run there is no token. The run leaves one, so a head started later asks for it."""
    home = tmp_path / "home"
    home.mkdir()
    bare = {"HOME": str(home), "RAY_AUTH_MODE": UNSET}
    code, output = submit(head, home, *quick(ranks=2), env=bare)
    assert code == 0 and "succeeded" in output, output
    found = re.search(r"results go to (\S+)", output)
    assert found and (Path(found[1]) / "summary.json").exists()
    assert "_ray_pkg" not in found[1], "Ray deletes the working directory"

    local = start(configs.write(tmp_path, world__ranks=1), env=bare)
    assert local.end() == 0, local.stderr()
    assert (home / ".ray" / "auth_token").exists()
    code, output = submit(head, home, *quick(home / "between"), env=bare)
    assert code == 0 and "succeeded" in output, output
    assert (home / "between" / "summary.json").exists()

    with ray_head(tmp_path, env=bare) as head_with_auth:
        code, output = submit(head_with_auth, home, *quick(home / "unasked"), env=bare)
        assert code != 0 and "RAY_AUTH_MODE" in output, "docs/ray.md says why"
        code, output = submit(head_with_auth, home, *quick(home / "after"), env={"RAY_AUTH_MODE": "token"})
        assert code == 0 and "succeeded" in output, output
        assert (home / "after" / "summary.json").exists()

        refused = start(configs.write(tmp_path), "--address", head_with_auth.address, env=bare)
        assert refused.end(60) == 3 and "RAY_AUTH_MODE=token" in refused.last_line()


def test_a_bad_config_fails_the_job_with_exit_code_2(head: Head, tmp_path: Path) -> None:
    code, output = submit(head, Path(os.environ["HOME"]), "raymoe", "run", "quickstart", "--set", "shape.hiden=3")
    assert code == 1 and "failed with exit code 2" in output, output
    assert "did you mean" in output and "hidden" in output


def test_steps_and_rank_states_are_exported_as_metrics(start: Start, head: Head, tmp_path: Path) -> None:
    run = start(configs.write(tmp_path, steps__count=configs.LONG), "--address", head.address)
    run.pids()
    name = (run.out / "config.yaml").read_text().splitlines()[0].removeprefix("# raymoe run ")
    url, text = f"http://127.0.0.1:{head.metrics_port}/metrics", ""
    wanted = [f'ray_raymoe_steps_total{{.*rank="{rank}",run="{name}"' for rank in range(3)]
    wanted += [f'ray_raymoe_step_seconds_bucket{{.*run="{name}"']
    wanted += [f'raymoe_rank_state{{.*rank="{rank}",run="{name}",state="running"}} 1.0' for rank in range(3)]
    deadline = time.monotonic() + 40
    while not all(re.search(name, text) for name in wanted) and time.monotonic() < deadline:
        time.sleep(0.5)
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
    run.signal(signal.SIGTERM)
    assert run.end(10) == 143
    missing = [name for name in wanted if not re.search(name, text)]
    assert not missing, text
