"""Ray's Jobs API: submit a job, ask about it, stop it. Every request is bounded, every failure is a sentence."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import requests
from pydantic import ValidationError
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from raymoe.errors import ClusterError, ConfigError, RaymoeError, one_line, shown
from raymoe.gang.address import JOBS_ADDRESSES, reachable, token_source

CONNECT_S, ANSWER_S, UPLOAD_S = 5.0, 30.0, 600.0
AGENT_S = 60.0  # how long a cluster without an agent is asked again; agents start after the head
FIND_S = 20.0  # to ask a head at host:port for the address of its dashboard
FIND = "import sys; from ray.dashboard.utils import ray_address_to_api_server_url as f; print(f(sys.argv[1]))"


@dataclass(frozen=True)
class JobRequest:
    """A job to submit, in the terms of the Jobs API."""

    entrypoint: str
    id: str
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 0.0
    gpus: float = 0.0
    memory: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class JobState:
    """The state of a job, as the cluster gives it. `exit_code` is that of its entrypoint, `node` the node that runs
    it."""

    id: str
    status: str  # PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED
    entrypoint: str
    message: str = ""
    error_type: str | None = None
    exit_code: int | None = None
    node: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    began_ms: int | None = None
    ended_ms: int | None = None

    @property
    def over(self) -> bool:
        """Whether the status is final."""
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")

    @classmethod
    def of(cls, details: JobDetails) -> JobState:
        """Take over what Ray's client returns."""
        return cls(
            id=details.submission_id or details.job_id or "",
            status=details.status.value,
            entrypoint=details.entrypoint,
            message=details.message or "",
            error_type=details.error_type,
            exit_code=details.driver_exit_code,
            node=details.driver_node_id,
            metadata=details.metadata or {},
            runtime_env=details.runtime_env or {},
            began_ms=details.start_time,
            ended_ms=details.end_time,
        )


class _Client(JobSubmissionClient):
    """Ray's client, with a bound on every request: Ray's own waits for an answer without end."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        options.setdefault("timeout", (CONNECT_S, UPLOAD_S if method == "PUT" else ANSWER_S))
        return super()._do_request(method, endpoint, **options)


class JobsApi:
    """The Jobs API of one cluster."""

    def __init__(self, address: str) -> None:
        """Connect to the cluster at `http://host:port` (its dashboard), at `host:port` or at `auto`."""
        self.asked = address
        for name in ("dashboard_sdk", "job.sdk"):  # they tell of uploads and of closed connections
            logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)
        headers = os.environ.get("RAY_JOB_HEADERS")
        with self._failures(), _without(JOBS_ADDRESSES):  # Ray's client prefers these to the address that it is given
            self.address = _dashboard(address)
            try:
                given = json.loads(headers) if headers else None
            except ValueError as error:
                raise ConfigError(f"RAY_JOB_HEADERS is no JSON: {error}") from error
            if given is not None and not isinstance(given, dict):
                raise ConfigError("RAY_JOB_HEADERS is no JSON mapping from names to texts")
            self._client = _Client(self.address, headers=given)
            self.ray_version = str(self._client._do_request("GET", "/api/version").json().get("ray_version"))

    def submit(self, job: JobRequest, tell: Callable[[str], None]) -> None:
        """Submit a job. A cluster that has no agent yet is asked again for AGENT_S."""
        deadline, told = time.monotonic() + AGENT_S, False
        while True:
            try:
                with self._failures():
                    self._submit_once(job)
                return
            except ClusterError as error:
                if told and "already exists" in str(error):  # an earlier try arrived after all
                    return
                if "No available agent" not in str(error) or time.monotonic() > deadline:
                    raise
                if not told:
                    tell(f"the cluster at {self.asked} has no agent for jobs yet; asking again for {AGENT_S:g} s")
                told = True
                time.sleep(1.0)

    def _submit_once(self, job: JobRequest) -> None:
        self._client.submit_job(
            entrypoint=job.entrypoint,
            submission_id=job.id,
            runtime_env=dict(job.runtime_env),
            metadata=dict(job.metadata),
            entrypoint_num_cpus=job.cpus or None,
            entrypoint_num_gpus=job.gpus or None,
            entrypoint_memory=job.memory,
            entrypoint_resources=dict(job.resources) or None,
            entrypoint_label_selector=dict(job.labels) or None,
        )

    def state(self, job: str) -> JobState:
        """Ask what became of a job. Raises ConfigError if the cluster does not know it."""
        with self._failures():
            return JobState.of(self._client.get_job_info(job))

    def states(self) -> list[JobState]:
        """List all jobs of the cluster."""
        with self._failures():
            return [JobState.of(details) for details in self._client.list_jobs()]

    def stop(self, job: str) -> None:
        """Ask the cluster to stop a job: SIGTERM, and SIGKILL some seconds later."""
        with self._failures():
            self._client.stop_job(job)

    def log(self, job: str) -> str:
        """Read the whole log of a job."""
        with self._failures():
            return str(self._client.get_job_logs(job))

    async def tail(self, job: str) -> AsyncIterator[str]:
        """Follow the log of a job from its beginning to its end."""
        async for text in self._client.tail_job_logs(job):
            yield text

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise each failure of Ray's client as an error that says what was asked and what was found."""
        asked = f"asked for the Jobs API of the cluster at {shown(self.asked)}"
        try:
            yield
        except RaymoeError:
            raise
        except AuthenticationError as error:
            found = f"it refuses the token in {token_source()}" if token_source() else "it asks for a token"
            way = "put the token of that cluster into ~/.ray/auth_token and leave RAY_AUTH_MODE unset"
            raise ClusterError(f"{asked}, and {found}; {way}") from error
        except (requests.exceptions.ConnectionError, ConnectionError) as error:
            way = "give the address of its dashboard, as http://HOST:8265"
            raise ClusterError(f"{asked}, and nothing answers there; {way}") from error
        except requests.exceptions.RequestException as error:
            raise ClusterError(f"{asked}, and got no answer: {one_line(str(error))}; is a Ray head there?") from error
        except (KeyError, TypeError, AttributeError, ValidationError) as error:  # JSON of another kind
            raise ClusterError(f"{asked}, and got an answer that no Ray head gives; is a Ray head there?") from error
        except ValueError as error:  # Ray's client refuses what it was given, before it asks the cluster
            raise ConfigError(f"Ray refuses the job: {_first_line(error)}") from error
        except (RuntimeError, OSError) as error:
            if "does not exist" in str(error) and "404" in str(error):
                raise ConfigError(f"{asked}, and it does not know this job; `raymoe jobs` lists its jobs") from error
            raise ClusterError(f"{asked}, and it failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Give the line of an error that says most: the last one of a traceback that the cluster sent, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return one_line(lines[-1] if any("Traceback (" in line for line in lines) else lines[0])


@contextmanager
def _without(names: tuple[str, ...]) -> Iterator[None]:
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def _dashboard(address: str) -> str:
    """Find the URL of the dashboard. `host:port` may be that of the dashboard, or that of the head's `ray start`."""
    if "://" in address:
        return address
    found = reachable(address)
    try:
        requests.get(f"http://{found}/api/version", timeout=CONNECT_S)
        return f"http://{found}"
    except requests.exceptions.RequestException:
        return _ask_head(found)


def _ask_head(address: str) -> str:
    """Ask a head for its dashboard, in another process: Ray's C++ may wait for long, or end the process."""
    try:
        found = subprocess.run(
            [sys.executable, "-c", FIND, address],
            capture_output=True,
            text=True,
            timeout=FIND_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{address} did not tell the address of its dashboard within {FIND_S:g} s") from None
    url = found.stdout.strip().rpartition("\n")[2]
    if found.returncode != 0 or not url.startswith("http"):
        raise RuntimeError(f"{address} does not tell the address of a dashboard; give it as http://HOST:8265")
    return url
