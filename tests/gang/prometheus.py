"""A real Prometheus on this machine, which scrapes a Ray head through the file that Ray writes for it."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gang.conftest import free_port

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
- job_name: ray
  file_sd_configs:
  - {{files: ['{targets}'], refresh_interval: 1s}}
"""


@dataclass(frozen=True)
class Series:
    """One series of an answer: its labels and its value."""

    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus that answers at `url`."""

    url: str

    def ask(self, query: str) -> list[Series]:
        """The answer to a query now, without series that are not a number."""
        words = urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{words}", timeout=5) as answer:
                reply = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from error
        series = [Series(line["metric"], float(line["value"][1])) for line in reply["data"]["result"]]
        return [line for line in series if not math.isnan(line.value)]

    def wait_for(self, query: str, seconds: float = 40.0) -> list[Series]:
        """The first answer that has a series; fails without one in time."""
        deadline = time.monotonic() + seconds
        while not (answer := self.ask(query)):
            assert time.monotonic() < deadline, f"no data within {seconds} s: {query}"
            time.sleep(0.5)
        return answer


@contextmanager
def prometheus(sessions: Path, folder: Path) -> Iterator[Prometheus]:
    """Start Prometheus with a data folder in `folder`; `sessions` is the temporary directory of a Ray head."""
    program = shutil.which("prometheus")
    if program is None:
        reason = "there is no prometheus on this machine; apt-get install --no-install-recommends prometheus"
        assert "CI" not in os.environ, reason
        pytest.skip(reason)
    config, log, port = folder / "prometheus.yml", folder / "prometheus.log", free_port()
    config.write_text(CONFIG.format(targets=sessions / "prom_metrics_service_discovery.json"))
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'prometheus'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}", process, log)
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
                return
        except OSError:  # also HTTPError: it is starting
            assert process.poll() is None and time.monotonic() < deadline, f"no Prometheus:\n{log.read_text()}"
            time.sleep(0.1)
