"""Ray's Jobs API: submit a job, ask about it, stop it. Every request is bounded, every failure is a sentence."""

from __future__ import annotations

import json
import logging
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import requests
from pydantic import ValidationError
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from raymoe.config.submission import JobRequest
from raymoe.errors import ClusterError, ConfigError, RaymoeError, one_line, shown
from raymoe.gang.address import JOBS_ADDRESSES, reachable, token_source

CONNECT_S, ANSWER_S, UPLOAD_S = 5.0, 30.0, 600.0
MOST_ANSWER_BYTES = 256 * 2**20  # the largest answer is the log of a job that prints results
AGENT_S = 60.0  # how long a cluster without an agent is asked again; agents start after the head
FIND_S = 20.0  # to ask a head at host:port for the address of its dashboard
FIND = "import sys; from ray.dashboard.utils import ray_address_to_api_server_url as f; print(f(sys.argv[1]))"


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
        name = details.submission_id or details.job_id
        if not name:
            raise ValueError("a job without an ID")
        return cls(
            id=name,
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
    """Ray's client, with bounds on every request: its time, also that of an answer that drips, and its size."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        seconds = UPLOAD_S if method == "PUT" else ANSWER_S
        options |= {"timeout": (CONNECT_S, seconds), "hooks": {"response": _limit_size}, "allow_redirects": False}
        response = _within(CONNECT_S + seconds, partial(super()._do_request, method, endpoint, **options))
        if response.is_redirect:  # not followed: it would take RAY_JOB_HEADERS to a server that nobody named
            raise ClusterError(
                f"asked for the Jobs API of the cluster at {shown(self._address)}, and it refers to "
                f"{shown(response.headers['location'])}; give that address if it is the cluster's"
            )
        return response


T = TypeVar("T")


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """Make a request in a thread of its own, and raise Timeout if that has not ended after `seconds`.

    The time limits of `requests` are for each read of the socket, and a name server has none. The thread is a daemon:
    a request that hangs delays no exit.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put((ask(), None))
        except BaseException as error:  # noqa: BLE001  the thread that waits raises it
            answers.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise requests.exceptions.Timeout(f"no whole answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]  # T may be None itself


def _limit_size(response: requests.Response, *_: object, **__: object) -> None:
    """Make a read of an answer fail past MOST_ANSWER_BYTES."""
    response.raw = _BoundedBody(response.raw)


class _BoundedBody:
    """The body of an answer, of which `requests` reads at most MOST_ANSWER_BYTES."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def stream(self, *options: Any, **named: Any) -> Iterator[bytes]:
        total = 0
        for piece in self._body.stream(*options, **named):
            total += len(piece)
            if total > MOST_ANSWER_BYTES:
                raise requests.exceptions.RequestException(f"it is larger than {MOST_ANSWER_BYTES >> 20} MiB")
            yield piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


class JobsApi:
    """The Jobs API of one cluster."""

    def __init__(self, address: str) -> None:
        """Connect to the cluster at `http://host:port` (its dashboard), at `host:port` or at `auto`."""
        self.named_address = address
        for name in ("dashboard_sdk", "job.sdk"):  # they log uploads and closed connections
            logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)
        headers = os.environ.get("RAY_JOB_HEADERS")
        with self._failures(), _without(JOBS_ADDRESSES):  # Ray's client prefers these to the address that it is given
            self.address = _dashboard(address)
            try:
                extra_headers = json.loads(headers) if headers else None
            except ValueError as error:
                raise ConfigError(f"RAY_JOB_HEADERS is no JSON: {error}") from error
            if extra_headers is not None and not isinstance(extra_headers, dict):
                raise ConfigError("RAY_JOB_HEADERS is no JSON mapping from names to texts")
            self._client = _Client(self.address, headers=extra_headers)
            self.ray_version = str(self._client._do_request("GET", "/api/version").json().get("ray_version"))

    def submit(self, job: str, request: JobRequest, notify: Callable[[str], None]) -> None:
        """Submit a job under the ID `job`. A cluster that has no agent yet is asked again for AGENT_S."""
        deadline, is_retry = time.monotonic() + AGENT_S, False
        while True:
            try:
                with self._failures(submits=True):
                    self._submit_once(job, request)
                return
            except ClusterError as error:
                if is_retry and "already exists" in str(error):  # an earlier try arrived after all
                    return
                if "No available agent" not in str(error) or time.monotonic() > deadline:
                    raise
                if not is_retry:
                    notify(
                        f"the cluster at {self.named_address} has no agent for jobs yet; asking again for {AGENT_S:g} s"
                    )
                is_retry = True
                time.sleep(1.0)

    def _submit_once(self, job: str, request: JobRequest) -> None:
        resources = request.resources
        self._client.submit_job(
            entrypoint=shlex.join(request.entrypoint),
            submission_id=job,
            runtime_env=dict(request.runtime_env),
            metadata=dict(request.metadata),
            entrypoint_num_cpus=resources.cpus or None,
            entrypoint_num_gpus=resources.gpus or None,
            entrypoint_memory=resources.memory,
            entrypoint_resources=dict(resources.resources) or None,
            entrypoint_label_selector=dict(resources.labels) or None,
        )

    def state(self, job: str) -> JobState:
        """Ask what became of a job. Raises ConfigError if the cluster does not know it."""
        with self._failures():
            return JobState.of(self._client.get_job_info(_in_url(job)))

    def states(self) -> list[JobState]:
        """List all jobs of the cluster."""
        with self._failures():
            return [JobState.of(details) for details in self._client.list_jobs()]

    def stop(self, job: str) -> None:
        """Ask the cluster to stop a job: SIGTERM, and SIGKILL some seconds later."""
        with self._failures():
            self._client.stop_job(_in_url(job))

    def log(self, job: str) -> str:
        """Read the whole log of a job."""
        with self._failures():
            return str(self._client.get_job_logs(_in_url(job)))

    async def tail(self, job: str) -> AsyncIterator[str]:
        """Follow the log of a job from its beginning to its end."""
        async for text in self._client.tail_job_logs(_in_url(job)):
            yield text

    @contextmanager
    def _failures(self, submits: bool = False) -> Iterator[None]:
        """Raise each failure of Ray's client as an error that names the request and the reason."""
        request = f"asked for the Jobs API of the cluster at {shown(self.named_address)}"
        try:
            yield
        except RaymoeError:
            raise
        except AuthenticationError as error:
            refusal = f"it refuses the token in {token_source()}" if token_source() else "it asks for a token"
            way = "put the token of that cluster into ~/.ray/auth_token and leave RAY_AUTH_MODE unset"
            raise ClusterError(f"{request}, and {refusal}; {way}") from error
        except (requests.exceptions.ConnectionError, ConnectionError) as error:
            way = "give the address of its dashboard, as http://HOST:8265"
            raise ClusterError(f"{request}, and nothing answers there; {way}") from error
        except (requests.exceptions.JSONDecodeError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise self._no_ray_head() from error
        except requests.exceptions.RequestException as error:
            raise ClusterError(f"{request}, and got no answer: {one_line(str(error))}; is a Ray head there?") from error
        except ValueError as error:  # also pydantic's, of JSON of another kind
            if not submits or isinstance(error, ValidationError):
                raise self._no_ray_head() from error
            # Ray's client refuses what it was given, before it asks the cluster.
            raise ConfigError(f"Ray refuses the job: {_first_line(error)}") from error
        except (RuntimeError, OSError) as error:
            if "does not exist" in str(error) and "404" in str(error):
                raise ConfigError(f"{request}, and it does not know this job; `raymoe jobs` lists its jobs") from error
            raise ClusterError(f"{request}, and it failed: {_first_line(error)}") from error

    def _no_ray_head(self) -> ClusterError:
        request = f"asked for the Jobs API of the cluster at {shown(self.named_address)}"
        return ClusterError(f"{request}, and got an answer that no Ray head gives; is a Ray head there?")


def _in_url(job: str) -> str:
    """Quote the ID of a job for a URL, which would otherwise ask for something else: `/`, `?` and `#` end a name there.

    >>> _in_url("quick-1"), _in_url("a/b?c")
    ('quick-1', 'a%2Fb%3Fc')
    """
    if job in ("", ".", ".."):
        raise ConfigError(f"{job!r} is not the ID of a job; `raymoe jobs` lists them")
    return quote(job, safe="", errors="surrogateescape")


def _first_line(error: Exception) -> str:
    """Return the line of an error that says most: the last one of a traceback that the cluster sent, else the first."""
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
    host_port = reachable(address)
    ask = partial(
        requests.get, f"http://{host_port}/api/version", timeout=CONNECT_S, stream=True, allow_redirects=False
    )
    try:
        _within(2 * CONNECT_S, ask).close()
        return f"http://{host_port}"
    except requests.exceptions.RequestException:
        return _ask_head(host_port)


def _ask_head(address: str) -> str:
    """Ask a head for its dashboard, in another process: Ray's C++ may wait for long, or end the process."""
    try:
        head = subprocess.run(
            [sys.executable, "-c", FIND, address],
            capture_output=True,
            text=True,
            timeout=FIND_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{address} did not tell the address of its dashboard within {FIND_S:g} s") from None
    url = head.stdout.strip().rpartition("\n")[2]
    if head.returncode != 0 or not url.startswith("http"):
        raise RuntimeError(f"{address} does not tell the address of a dashboard; give it as http://HOST:8265")
    return url
