"""The Jobs API without a cluster: a server that answers as Ray's head does, and the verdict on the end of a job."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from raymoe import cli
from raymoe import submit as commands
from raymoe.config.submission import JobRequest
from raymoe.errors import ClusterError, ConfigError
from raymoe.gang import follow, jobs_api
from raymoe.gang.follow import Follower
from raymoe.gang.jobs_api import JobsApi, JobState
from raymoe.submit import table, verdict

BUSY = (500, "No available agent to submit job, please try again later.")


class FakeHead(ThreadingHTTPServer):
    """Answers the requests of a Jobs client. `refusals` are given to submissions before one is accepted."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refusals: list[tuple[int, str]] = []
        self.version = "2.57.0"
        self.submitted: list[dict[str, object]] = []
        self.silent = False
        self.drips = False
        self.answer = ""
        self.moved_to = ""
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.states: dict[str, dict[str, object]] = {}
        self.logs: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing for a client that has left: the thread may outlive its test, and the next one reads stderr."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: FakeHead

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))
        if self.server.silent:
            time.sleep(3)
        if self.server.drips:
            return self._drip()
        if self.server.moved_to:
            self.send_response(302)
            self.send_header("Location", self.server.moved_to)
            return self.end_headers()
        if self.server.answer:
            self._answer(200, self.server.answer)
        elif self.path == "/api/version":
            self._answer(200, json.dumps({"version": "4", "ray_version": self.server.version, "ray_commit": ""}))
        elif self.path == "/api/jobs/":
            self._answer(200, json.dumps(list(self.server.states.values())))
        elif self.path.endswith("/logs"):
            name = self.path.removeprefix("/api/jobs/").removesuffix("/logs")
            self._answer(200, json.dumps({"logs": self.server.logs[name]}))
        elif state := self.server.states.get(self.path.removeprefix("/api/jobs/")):
            self._answer(200, json.dumps(state))
        else:
            self._answer(404, "Job x does not exist")
        return None

    def _drip(self) -> None:
        """Answer a byte at a time, and never to the end."""
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        with suppress(OSError):  # the client has gone
            for _ in range(60):
                self.wfile.write(b" ")
                time.sleep(0.05)

    def do_POST(self) -> None:
        name, _, verb = self.path.removeprefix("/api/jobs/").partition("/")
        if verb == "stop":
            self.server.states[name] |= {"status": "STOPPED"}
            return self._answer(200, json.dumps({"stopped": True}))
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.refusals:
            return self._answer(*self.server.refusals.pop(0))
        self.server.submitted.append(job)
        return self._answer(200, json.dumps({"job_id": job["submission_id"], "submission_id": job["submission_id"]}))

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHead]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with FakeHead() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join(timeout=5)


REQUEST = JobRequest(("true",))


def test_a_cluster_whose_agent_is_not_up_is_asked_again(fake: FakeHead) -> None:
    fake.refusals = [BUSY, BUSY]
    lines: list[str] = []
    JobsApi(fake.url).submit("quick-1", REQUEST, lines.append)
    assert [job["submission_id"] for job in fake.submitted] == ["quick-1"]
    assert lines == [f"the cluster at {fake.url} has no agent for jobs yet; asking again for 60 s"]


def test_a_submission_that_arrived_although_its_answer_did_not_is_no_error(fake: FakeHead) -> None:
    fake.refusals = [BUSY, (400, "ValueError: Job with submission_id quick-1 already exists.")]
    JobsApi(fake.url).submit("quick-1", REQUEST, print)
    fake.refusals = [(400, "ValueError: Job with submission_id quick-1 already exists.")]
    with pytest.raises(ClusterError, match="already exists"):
        JobsApi(fake.url).submit("quick-1", REQUEST, print)


def test_a_cluster_that_never_has_an_agent_is_given_up(fake: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_api, "AGENT_S", 0.5)
    fake.refusals = [BUSY] * 9
    with pytest.raises(
        ClusterError, match=f"asked for the Jobs API of the cluster at {fake.url}, and it failed: .*agent"
    ):
        JobsApi(fake.url).submit("quick-1", REQUEST, print)
    assert fake.submitted == []


def test_a_head_that_does_not_answer_is_given_up(fake: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_api, "ANSWER_S", 0.5)
    fake.silent = True
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"got no answer: .*Read timed out"):
        JobsApi(fake.url)
    assert time.monotonic() - began < 2.5


def test_a_head_that_answers_a_byte_at_a_time_is_given_up(fake: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_api, "CONNECT_S", 0.3)
    monkeypatch.setattr(jobs_api, "ANSWER_S", 0.3)
    fake.drips = True
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"got no answer: no whole answer within 0.6 s; is a Ray head there?"):
        JobsApi(fake.url)
    assert time.monotonic() - began < 2.0


def test_a_head_at_host_and_port_that_answers_a_byte_at_a_time_is_given_up(
    fake: FakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_api, "CONNECT_S", 0.3)
    monkeypatch.setattr(jobs_api, "ANSWER_S", 0.3)
    fake.drips = True
    with pytest.raises(ClusterError, match="no whole answer"):
        JobsApi(fake.url.removeprefix("http://"))


def test_an_answer_without_end_is_given_up(fake: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_api, "MOST_ANSWER_BYTES", 1 << 20)
    fake.answer = " " * (3 << 20)
    with pytest.raises(ClusterError, match="got no answer: it is larger than 1 MiB"):
        JobsApi(fake.url)


def test_headers_go_to_no_server_that_another_one_names(fake: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_HEADERS", '{"X-Mine": "secret"}')
    with FakeHead() as other:
        thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        fake.moved_to = f"{other.url}/api/version"
        with pytest.raises(ClusterError, match=rf"and it refers to {other.url}/api/version; give that address if"):
            JobsApi(fake.url)
        other.shutdown()
        thread.join(timeout=5)
    assert other.asked == [] and [headers["X-Mine"] for _, headers in fake.asked] == ["secret"]


@pytest.mark.parametrize(
    "answer", ["[]", "null", '"x"', "[null]", "<html>", '{"ray_version": null}', '{"ray_version": "x"}']
)
def test_a_server_that_is_no_ray_head_is_named(fake: FakeHead, answer: str) -> None:
    fake.answer = answer
    with pytest.raises(ClusterError, match=r"got an answer that no Ray head gives; is a Ray head there?"):
        JobsApi(fake.url)


@pytest.mark.parametrize("headers", ["[1]", "x"])
def test_headers_that_are_no_mapping_are_refused(fake: FakeHead, monkeypatch: pytest.MonkeyPatch, headers: str) -> None:
    monkeypatch.setenv("RAY_JOB_HEADERS", headers)
    with pytest.raises(ConfigError, match=r"^RAY_JOB_HEADERS is no"):
        JobsApi(fake.url)


@pytest.mark.parametrize("number", ["1" + "0" * 5000, '"soon"', "NaN"])
def test_an_answer_with_a_number_that_is_none_is_no_mistake_of_the_user(fake: FakeHead, number: str) -> None:
    api = JobsApi(fake.url)
    fake.answer = json.dumps([job(start_time=5)]).replace(": 5", f": {number}")
    with pytest.raises(ClusterError, match="got an answer that no Ray head gives"):
        api.states()


def job(name: str | None = "quick-1", **changes: object) -> dict[str, object]:
    """A job as the Jobs API describes it."""
    described = {"type": "SUBMISSION", "submission_id": name, "status": "SUCCEEDED", "entrypoint": "raymoe run quick"}
    return {**described, "metadata": {"raymoe_config": "quick"}, "runtime_env": {}, "driver_exit_code": 0} | changes


@pytest.mark.parametrize(
    ("name", "path"), [("a/b", "a%2Fb"), ("../../x", "..%2F..%2Fx"), ("?x=1", "%3Fx%3D1"), ("a#b", "a%23b")]
)
def test_the_id_of_a_job_is_one_name_of_the_url(fake: FakeHead, name: str, path: str) -> None:
    fake.states = {path: job(name)}
    assert JobsApi(fake.url).state(name).id == name


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_text_that_is_the_id_of_no_job_is_refused(fake: FakeHead, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^'{name}' is not the ID of a job; `raymoe jobs` lists them"):
        JobsApi(fake.url).state(name)


def test_a_job_without_an_id_is_none_of_ray(fake: FakeHead) -> None:
    fake.states = {"x": job(None)}
    with pytest.raises(ClusterError, match="got an answer that no Ray head gives"):
        JobsApi(fake.url).state("x")


def test_jobs_of_impossible_times_are_listed(fake: FakeHead, capsys: pytest.CaptureFixture[str]) -> None:
    times = [(10**300, 5), (10**18, None), (-(10**17), 5), (2000, 1000), (1000, 10**300), (0, 3000)]
    fake.states = {str(i): job(f"job{i}", start_time=times[i][0], end_time=times[i][1]) for i in range(6)}
    fake.states["code"] = job("code", status="FAILED", driver_exit_code=2**300)
    assert cli.main(["jobs", "--address", fake.url]) == 0
    lines = sorted(line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert lines[1:] == [
        *(["job" + str(i), "quick", "SUCCEEDED", "?", "?"] for i in range(3)),
        ["job3", "quick", "SUCCEEDED", "1970-01-01", "00:00:02", "?"],
        ["job4", "quick", "SUCCEEDED", "1970-01-01", "00:00:01", "?"],
        ["job5", "quick", "SUCCEEDED", "1970-01-01", "00:00:00", "3", "s"],
    ]
    assert lines[0][3].endswith("…)") and len(lines[0][3]) < 90


class DoneApi:
    """An API of a job that has ended without results."""

    def __init__(self, described: JobState) -> None:
        self.described = described

    def state(self, _: str) -> JobState:
        return self.described

    async def tail(self, _: str):
        yield ""

    def submit(self, *_: object) -> None:
        raise ConfigError("Ray refuses the job: Only .zip files are supported")


@pytest.mark.parametrize(("code", "status", "ended"), [(6, "FAILED", 6), (0, "SUCCEEDED", 8)])
def test_the_end_of_a_job_counts_where_its_results_cannot_be_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    status: str,
    ended: int,
) -> None:
    """The cluster gives a runtime_env that Ray refuses for the job that reads the results."""
    monkeypatch.chdir(tmp_path)
    metadata = {"raymoe_config": "q", "raymoe_out": "~nosuchuser/x"}
    described = JobState("x", status, "", "m", exit_code=code, node="n", metadata=metadata)
    assert commands._follow(DoneApi(described), "x", None, "") == ended  # type: ignore[arg-type]
    assert "the results of job x cannot be copied: Ray refuses the job: Only .zip" in capsys.readouterr().err


def test_results_of_a_job_with_any_id_stay_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    copied = []
    monkeypatch.setattr(commands, "bring_results", lambda _api, _state, destination: copied.append(destination))
    for name in ("../../x", "/etc/x", "..", "a/b", "quick-1"):
        commands._follow(DoneApi(JobState(name, "SUCCEEDED", "")), name, None, "")  # type: ignore[arg-type]
    assert [str(path) for path in copied] == ["runs/x", "runs/etc-x", "runs/run", "runs/a-b", "runs/quick-1"]


def test_nothing_there_and_an_unknown_job(fake: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")  # the address that is given counts
    api = JobsApi(fake.url)
    with pytest.raises(ConfigError, match="does not know this job"):
        api.state("x")
    with pytest.raises(ClusterError, match="nothing answers there; give the address of its dashboard"):
        JobsApi("http://127.0.0.1:1")


@pytest.mark.parametrize("version", ["2.57.0", "99.0.0"], ids=["older", "newer"])
def test_another_version_of_ray_is_named_before_the_job_starts(
    fake: FakeHead, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    fake.version = version
    assert cli.main(["submit", "quickstart", "--address", fake.url, "--detach"]) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert lines[0].startswith(f"the cluster runs Ray {version} and this machine has Ray 2.")
    assert lines[1].startswith(f"job {out.strip()} is submitted to {fake.url}")
    [job] = fake.submitted
    assert job["entrypoint"] == "python -m raymoe run quickstart --set world.placement_timeout_s=600"
    assert job["runtime_env"] == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "10"}}


def test_a_place_for_results_that_is_in_use_is_refused_before_anything_is_submitted(
    fake: FakeHead, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["submit", "quickstart", "--address", fake.url, "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path} is not an empty directory" in capsys.readouterr().err and fake.submitted == []
    below = tmp_path / "file" / "runs" / "one"
    assert cli.main(["submit", "quickstart", "--address", fake.url, "--out", str(below)]) == 8
    refusal = capsys.readouterr().err
    assert refusal.startswith("--out /") and fake.submitted == []  # a long path is shown shortened there
    assert f" cannot be used: {tmp_path / 'file'} is not a directory" in refusal


def test_a_place_for_results_that_cannot_be_written_is_refused_before_anything_is_submitted(
    fake: FakeHead, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # the superuser may write everywhere
    assert cli.main(["submit", "quickstart", "--address", fake.url, "--out", str(tmp_path / "a" / "b")]) == 8
    refusal = capsys.readouterr().err
    assert f"--out {tmp_path / 'a' / 'b'} cannot be used: {tmp_path} cannot be written" in refusal
    assert fake.submitted == []


def test_stop_ends_a_job_and_says_how_to_get_its_results(fake: FakeHead, capsys: pytest.CaptureFixture[str]) -> None:
    fake.states = {"x": job("x", status="RUNNING"), "y": job("y", status="SUCCEEDED")}
    assert cli.main(["stop", "x", "--address", fake.url]) == 0
    copies = f"raymoe attach x --address {fake.url} copies its results"
    assert capsys.readouterr().err == f"job x has ended: STOPPED; {copies}\n"
    assert cli.main(["stop", "y", "--address", fake.url]) == 0
    assert capsys.readouterr().err.startswith("job y had ended before: SUCCEEDED; ")
    assert fake.states["y"]["status"] == "SUCCEEDED"
    assert cli.main(["stop", "z", "--address", fake.url]) == 2


def test_logs_prints_what_a_job_has_printed_without_control_characters(
    fake: FakeHead, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.logs = {"x": "results go to /a\ncase 1/2 a\x1b[31m: done\n"}
    assert cli.main(["logs", "x", "--address", fake.url]) == 0
    assert capsys.readouterr().out == "results go to /a\ncase 1/2 a\\x1b[31m: done\n"


def test_jobs_shows_where_running_jobs_are_and_when_they_end(
    fake: FakeHead, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.states = {name: job(name, status="RUNNING", start_time=1) for name in "abc"} | {"d": job("d", start_time=1)}
    fake.logs = {"a": "case 2/6 x: step 7/50, 2 ms a step; 4 more cases, about 3 min left\n", "b": "results go to /a\n"}
    assert cli.main(["jobs", "--address", fake.url]) == 0
    by_job = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert by_job["job"].endswith("progress") and by_job["a"].endswith(" case 2/6, about 3 min left")
    assert by_job["b"].endswith(" s") and by_job["d"].endswith(" s")
    assert by_job["c"].endswith("its log cannot be read")


class RunningApi(DoneApi):
    """An API of a job that runs; `stopped` says whether somebody asked to stop it."""

    def __init__(self, number: int) -> None:
        super().__init__(JobState("x", "RUNNING", "true"))
        self.number, self.stopped = number, False

    def state(self, _: str) -> JobState:
        os.kill(os.getpid(), self.number)
        return self.described

    def stop(self, _: str) -> None:
        self.stopped = True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_attach_leaves_a_job_running_at_the_first_signal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    api = RunningApi(number)
    monkeypatch.setattr(follow, "POLL_S", 30.0)
    # `nohup` and shells without job control have these ignored, and what is ignored stays so.
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        assert commands._follow(api, "x", None, "", stops=False) == 128 + number  # type: ignore[arg-type]
    finally:
        signal.signal(number, before)
    assert not api.stopped
    told = "left job x, which goes on; `raymoe attach x` follows it, `raymoe stop x` stops it\n"
    assert capsys.readouterr().err == told


def test_attach_says_that_ctrl_c_leaves_the_job(
    fake: FakeHead, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.states = {"x": job("x", status="RUNNING")}
    passed: list[dict[str, object]] = []

    def followed(*_: object, **options: object) -> int:
        passed.append(options)
        return 0

    monkeypatch.setattr(commands, "_follow", followed)
    assert cli.main(["attach", "x", "--address", fake.url]) == 0 and passed == [{"stops": False}]
    where = f"--address {fake.url}"
    assert f"Ctrl-C leaves it running, `raymoe stop x {where}` stops it" in capsys.readouterr().err


class LostApi:
    """An API that answers once, then no more; its log breaks off, and begins anew at the second try."""

    def __init__(self, lost: bool) -> None:
        self.lost, self.asked, self.read = lost, 0, 0

    def state(self, job: str) -> JobState:
        self.asked += 1
        if self.asked > 1 and self.lost:
            raise ClusterError("nothing answers there")
        return JobState(job, "SUCCEEDED" if self.read > 1 else "RUNNING", "true")

    async def tail(self, _: str):
        self.read += 1
        yield "one\n"
        if self.read == 1 or self.lost:
            raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")
        yield "two\n"


def test_a_log_that_breaks_off_goes_on_where_it_was() -> None:
    log: list[str] = []
    ended = Follower(LostApi(lost=False), "x", log.append, print, "raymoe attach x")  # type: ignore[arg-type]
    ended.follow()
    assert "".join(log) == "one\ntwo\n" and ended.state is not None and ended.state.status == "SUCCEEDED"


def test_a_cluster_that_is_lost_is_named_with_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LOST_S", 0.5)
    with pytest.raises(ClusterError, match=r"not answered for 0.5 s \(.*\); follow it again with `raymoe attach x`"):
        Follower(LostApi(lost=True), "x", print, print, "raymoe attach x").follow()  # type: ignore[arg-type]


def summary_of(folder: Path, exit_code: int, message: str) -> Path:
    (folder / "config.yaml").write_text("# raymoe run x\nname: x\n")
    document = {"status": "stopped", "exit_code": exit_code, "message": message, "cases": {}, "generations": []}
    (folder / "summary.json").write_text(json.dumps(document))
    return folder


FAILED = "Job entrypoint command failed with exit code 6, last available logs:\nso\nthe rows differ\n"


@pytest.mark.parametrize(
    ("state", "summary", "code", "told"),
    [
        (JobState("x", "SUCCEEDED", "", exit_code=0), None, 0, "done"),
        (JobState("x", "FAILED", "", FAILED, exit_code=6), None, 6, "job x failed with exit code 6: the rows differ"),
        (JobState("x", "FAILED", "", FAILED, exit_code=6), (6, "row 3"), 6, "job x failed with exit code 6: row 3"),
        (JobState("x", "FAILED", "", "a", exit_code=-9), None, 137, "job x failed with exit code 137: a"),
        (
            JobState("x", "FAILED", "", "python: No module named raymoe", exit_code=1),
            None,
            1,
            "job x failed with exit code 1: raymoe is not installed there; "
            "use an image that has it, or set runtime_env.pip or working_dir",
        ),
        (JobState("x", "FAILED", "", "a", exit_code=256), None, 1, "job x failed with exit code 256: a"),
        (JobState("x", "FAILED", "", "a", exit_code=-256), None, 1, "job x failed with exit code 384: a"),
        (JobState("x", "FAILED", "", "a", exit_code=0), None, 1, "job x failed with exit code 0: a"),
        (JobState("x", "STOPPED", ""), None, 143, "job x was stopped"),
        (JobState("x", "STOPPED", ""), (4, "rank 1 died"), 4, "job x was stopped: rank 1 died"),
        (JobState("x", "STOPPED", ""), (0, "done"), 143, "job x was stopped: done"),
        (
            JobState("x", "FAILED", "", "no\nconda\x1b", "RUNTIME_ENV_SETUP_FAILURE"),
            None,
            3,
            "job x did not run (runtime env setup failure): no conda\\x1b",
        ),
        (
            JobState("x", "FAILED", "", "gone", "JOB_SUPERVISOR_ACTOR_DIED", node="n"),
            None,
            3,
            "job x did not run (job supervisor actor died): gone",
        ),
    ],
    ids=range(13),
)
def test_the_verdict_on_a_job(tmp_path: Path, state: JobState, summary, code: int, told: str) -> None:
    results = summary_of(tmp_path, *summary) if summary else None
    assert verdict(state, results) == (code, told)


def test_the_table_of_jobs() -> None:
    states = [
        JobState("a", "SUCCEEDED", "", exit_code=0, metadata={"raymoe_config": "p2p"}, began_ms=0, ended_ms=61_000),
        JobState("b\x1b", "FAILED", "", exit_code=4, began_ms=1000, ended_ms=3000),
        JobState("c", "PENDING", ""),
    ]
    assert table(states, now=5.0).splitlines() == [
        "job    runs  status      started (UTC)        took",
        "b\\x1b        FAILED (4)  1970-01-01 00:00:01  2 s",
        "a      p2p   SUCCEEDED   1970-01-01 00:00:00  61 s",
        "c            PENDING",
    ]
