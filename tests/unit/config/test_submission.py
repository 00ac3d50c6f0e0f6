"""Jobs: the errors of a wrong one, the request of a right one, and the line that `--dry-run` prints."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from raymoe import __version__, cli
from raymoe.config import load_job
from raymoe.config.submission import JobRequest, load_submission, submission_schema
from raymoe.errors import ConfigError
from raymoe.packaged import packaged_config, packaged_names
from tests.python_path import REPOSITORY, python_path
from tests.unit.config.configs_on_disk import write

JOBS = REPOSITORY / "jobs"
ADDRESS = "http://head:8265"


@pytest.fixture(autouse=True)
def bare_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a token, no variable that names a cluster, and the test's folder as working directory."""
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def problems(text: str, *sets: str) -> list[str]:
    """Return the problems that raymoe finds in a job."""
    Path("job.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_submission("job.yaml", sets)
    assert "\n" not in str(caught.value)
    return [str(problem) for problem in caught.value.problems]


def requested(text: str, *sets: str) -> JobRequest:
    Path("job.yaml").write_text(text)
    return load_submission("job.yaml", sets)[1]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["submit", *words, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    return out


LINES = [
    ("set: {}", "config: required, the name of a packaged config, or a file; a program takes its place"),
    ("config: 3", "line 1, config = 3: text is wanted, put it in quotes"),
    (
        "config: quikstart",
        "line 1, config = quikstart: neither a file nor a packaged config, did you mean 'quickstart'?",
    ),
    ("config: quickstart\nconfg: x", "line 2, confg = x: unknown key, did you mean 'config'?"),
    ("config: quickstart\ncpus: 1", "line 2, cpus = 1: unknown key, write cpus below entrypoint"),
    ("config: quickstart\nset: {world.rnks: 2}", "line 2, set.world.rnks = 2: unknown key, did you mean 'ranks'?"),
    (
        "config: quickstart\nset:\n  world: {ranks: x}",
        "line 3, set.world.ranks = x: a whole number is wanted, found text",
    ),
    ("config: quickstart\nset: [a]", "line 2, set = [a]: a mapping is wanted, found a list"),
    (
        "config: quickstart\naddress: ray://head:10001",
        "line 2, address = ray://head:10001: the Jobs API is not at a Ray Client address, "
        "write http://HOST:8265, the address of the cluster's dashboard",
    ),
    (
        "config: quickstart\nout: results",
        "line 2, out = results: is relative, but Ray deletes the working directory of a job, "
        "write an absolute path, ~/… or a URL",
    ),
    (
        "config: quickstart\nout: /results/{name}",
        "line 2, out = /results/{name}: only {run} is replaced, by the name of the run",
    ),
    ("config: quickstart\nentrypoint: {gpus: -1}", "line 2, entrypoint.gpus = -1: -1 is below the least value 0.0"),
    (
        "config: quickstart\nentrypoint: {memory: 2gb}",
        "line 2, entrypoint.memory = 2gb: has the unknown unit 'gb', did you mean 2GB?",
    ),
    (
        "config: quickstart\nentrypoint: {resources: {big: -1}}",
        "line 2, entrypoint.resources.big = -1: -1 is below the least value 0.0",
    ),
    (
        "config: quickstart\nentrypoint: {labels: {rack: 1}}",
        "line 2, entrypoint.labels.rack = 1: text is wanted, put it in quotes",
    ),
    (
        "config: quickstart\nruntime_env: {env_vars: {A: 1}}",
        "line 2, runtime_env.env_vars.A = 1: text is wanted, put it in quotes",
    ),
    (
        "config: quickstart\nruntime_env: {working_dr: .}",
        "line 2, runtime_env.working_dr = .: unknown key, did you mean 'working_dir'?",
    ),
    (
        "config: quickstart\nruntime_env: {pip: 3}",
        "line 2, runtime_env.pip = 3: a list of packages, the path of a file of them, or a mapping is wanted",
    ),
    (
        "config: quickstart\nruntime_env: {working_dir: nowhere}",
        "line 2, runtime_env.working_dir = nowhere: no such directory, looked for nowhere",
    ),
    (
        "config: quickstart\nruntime_env: {py_modules: [a]}",
        "line 2, runtime_env.py_modules.0 = a: no such file or directory",
    ),
    (
        "config: quickstart\nmetadata: {raymoe_out: /x}",
        "line 2, metadata.raymoe_out = /x: raymoe sets the keys that begin with raymoe_, use another name",
    ),
    ("config: quickstart\nmetadata: {a: 1}", "line 2, metadata.a = 1: text is wanted, put it in quotes"),
    ("[a]", "line 1: a mapping is wanted at the top"),
    ("", "is empty, a job needs at least a config or a program"),
]


@pytest.mark.parametrize(("text", "told"), LINES, ids=[text for text, _ in LINES])
def test_each_mistake_is_told_with_line_and_key(text, told):
    assert problems(text) == [f"job.yaml: {told}"]


def test_all_mistakes_of_a_job_and_of_its_config_are_told_at_once(capsys):
    Path("mine.yaml").write_text("workload: exchange\nshape: {hiden: 8}\n")
    Path("job.yaml").write_text("config: mine.yaml\nset: {shape.topk: x}\nentrypoint: {cpu: 1}\nout: results\n")
    code = cli.main(["submit", "job.yaml", "--set", "world.ranks=0", "--dry-run"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.splitlines()[:-1] == [
        "job.yaml: line 2, set.shape.topk = x: a whole number is wanted, found text",
        "job.yaml: line 3, entrypoint.cpu = 1: unknown key, did you mean 'cpus'?",
        "job.yaml: line 4, out = results: is relative, but Ray deletes the working directory of a job, "
        "write an absolute path, ~/… or a URL",
        "mine.yaml: line 2, shape.hiden = 8: unknown key, did you mean 'hidden'?",
        "--set world.ranks=0: 0 is below the least value 1",
    ]
    assert err.splitlines()[-1].startswith("job.yaml has 5 problems; the first is line 2, set.shape.topk = x: ")


def test_a_config_that_the_cluster_would_not_have_is_refused():
    for folder in ("in", "out"):
        Path(folder).mkdir()
    write(Path("in"), "workload: p2p\ndefaults: ../out/base.yaml\n", "child.yaml")
    write(Path("out"), "name: base\n", "base.yaml")
    write(Path("in"), "workload: p2p\n", "alone.yaml")
    where = "runtime_env.working_dir to a directory that holds it"
    assert problems("config: in/alone.yaml") == [
        "job.yaml: line 1, config = in/alone.yaml: the cluster has no in/alone.yaml, "
        f"since runtime_env.working_dir is not given, set {where}"
    ]
    assert problems("config: in/alone.yaml\nruntime_env: {working_dir: 's3://b/x.zip'}") == [
        "job.yaml: line 1, config = in/alone.yaml: the cluster has no in/alone.yaml, "
        f"since runtime_env.working_dir is a URL, set {where}"
    ]
    assert problems("config: in/child.yaml\nruntime_env: {working_dir: in}") == [
        "job.yaml: line 2, runtime_env.working_dir = in: does not hold out/base.yaml, which the config needs, "
        "name a directory above both"
    ]
    assert requested("config: in/child.yaml\nruntime_env: {working_dir: .}").entrypoint[4] == "in/child.yaml"
    assert requested("config: in/alone.yaml\nruntime_env: {working_dir: in}").entrypoint[4] == "alone.yaml"


def test_a_trace_that_a_setting_names_is_found_on_the_cluster(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "ids.npy").write_bytes(b"x")
    job = "config: host_exchange\nruntime_env: {working_dir: ..}\n"
    job += "set: {routing.kind: trace, routing.file: ../data/ids.npy}"
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text(job)
    words = load_submission("jobs/job.yaml")[1].entrypoint
    assert words[4:] == ("host_exchange", "--set", "routing.kind=trace", "--set", "routing.file=data/ids.npy")


IDS = ["ids.npy", "my ids.npy", "a#b: c.npy", "😀.npy"]


@pytest.mark.parametrize("folder", ["jobs", "a: b", "run #3"])
@pytest.mark.parametrize("name", IDS)
def test_traces_of_any_name_are_those_of_the_job_wherever_they_are_set(tmp_path, monkeypatch, folder, name):
    """The command that the cluster gets, in the directory that it gets, means the same traces as the checked job."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(b"x")
    place = tmp_path / folder
    place.mkdir()
    quoted = json.dumps(f"../data/{name}", ensure_ascii=False)
    in_job = [
        f"{{routing.kind: trace, routing.file: {quoted}}}",
        f"{{routing.kind: trace, matrix.routing.file: [{quoted}]}}",
        f"{{routing: {{kind: trace, file: {quoted}}}}}",
    ]
    on_command = [[f"routing.file={quoted}"], [f"matrix.routing.file=[{quoted}]"], [f"routing={{file: {quoted}}}"]]
    for own, sets in [*((item, []) for item in in_job), *(("{routing.kind: trace}", item) for item in on_command)]:
        monkeypatch.chdir(tmp_path if own in in_job else place)
        (place / "job.yaml").write_text(f"config: host_exchange\nruntime_env: {{working_dir: ..}}\nset: {own}\n")
        job, request = load_submission(str(place / "job.yaml"), sets)
        wanted = [case.job.routing.file for case in job.cases()]
        monkeypatch.chdir(tmp_path)
        words = request.entrypoint[5:]
        loaded = load_job("host_exchange", list(words[1::2]))
        there = [str(Path(str(case.job.routing.file)).resolve()) for case in loaded.cases()]
        assert (
            there == [str(Path(str(item)).resolve()) for item in wanted] == [str(tmp_path / "data" / name)] * len(there)
        )
        assert not any(".." in word or str(tmp_path) in word for word in words)


def test_a_request_has_what_the_job_says_and_what_is_always_needed(tmp_path):
    Path("job.yaml").write_text(
        "config: quickstart\nset: {world.ranks: 2, matrix.shape.tokens: [1, 2], exchange: {backend: auto}}\n"
        "runtime_env: {working_dir: ., py_modules: ['.'], excludes: [data], env_vars: {A: '1'}, pip: [x]}\n"
        "entrypoint: {cpus: 0.5, memory: 2GiB, labels: {a: b}}\nmetadata: {team: x}\nout: /results/{run}\n"
    )
    job, request = load_submission("job.yaml", ["steps.count=3"])
    assert " ".join(request.entrypoint) == (
        "python -m raymoe run quickstart --set world.ranks=2 --set matrix.shape.tokens=[1, 2] "
        "--set exchange.backend=auto --set steps.count=3 --out /results/{run}"
    )
    assert job == load_job("quickstart", ["world.ranks=2", "matrix.shape.tokens=[1,2]", "steps.count=3"])
    assert request.runtime_env == {
        "working_dir": str(tmp_path),
        "py_modules": [str(tmp_path)],
        "excludes": ["/.git", "/.venv", "/runs", "data"],
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "10", "A": "1"},
        "pip": ["x"],
    }
    assert request.metadata == {
        "job_name": "quickstart",
        "team": "x",
        "raymoe_version": __version__,
        "raymoe_config": "quickstart",
        "raymoe_out": "/results/{run}",
    }
    assert (request.resources.cpus, request.resources.memory, request.resources.labels) == (0.5, 2**31, {"a": "b"})


def test_the_printed_line_holds_the_whole_request(capsys, tmp_path):
    text = (
        "config: quickstart\nset: {world.ranks: 2}\nentrypoint: {cpus: 1, gpus: 0.5, memory: 1GiB, resources: {r: 2}, "
        "labels: {a: b}}\nmetadata: {team: it's ours}\nout: ~/x y/{run}\n"
    )
    request = requested(text)
    words = shlex.split(printed(capsys, "job.yaml", "--address", ADDRESS))
    split = words.index("--")
    assert words[:5] == ["ray", "job", "submit", "--address", ADDRESS]
    options = dict(zip(words[5:split:2], words[6:split:2], strict=True))
    assert json.loads(options.pop("--runtime-env-json")) == request.runtime_env
    assert json.loads(options.pop("--metadata-json")) == request.metadata
    assert json.loads(options.pop("--entrypoint-resources")) == {"r": 2.0}
    assert json.loads(options.pop("--entrypoint-label-selector")) == {"a": "b"}
    assert options == {
        "--entrypoint-num-cpus": "1",
        "--entrypoint-num-gpus": "0.5",
        "--entrypoint-memory": str(2**30),
    }
    assert tuple(words[split + 1 :]) == request.entrypoint


def test_the_printed_line_holds_no_control_character_and_a_shell_reads_it(capsys):
    out = "~/it's\x1b]0;title\x07\u202e\\x"
    line = printed(capsys, _job_with(out), "--address", "http://head:8265/\x1b[2J")
    assert line.rstrip("\n").isprintable()
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, timeout=10, check=True
    ).stdout.splitlines()
    assert "http://head:8265/\x1b[2J" in words and out in words


def _job_with(out: str) -> str:
    Path("job.yaml").write_text(f"config: quickstart\nout: {json.dumps(out)}\n")
    return "job.yaml"


def test_errors_repeat_no_text_of_a_config_far_from_the_job(tmp_path):
    secret = "hunter2"
    for folder in ("project/jobs", "project/configs", "other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.yaml").write_text(f"workload: layer\npassword: {secret}\nworld: {{ranks: {secret}}}\n")
    job = tmp_path / "project" / "jobs" / "job.yaml"
    for config, is_shown in (("x.yaml", True), ("../configs/x.yaml", True), ("../../other/x.yaml", False)):
        job.write_text(f"config: {config}\n")
        with pytest.raises(ConfigError) as caught:
            load_submission(str(job), ())
        text = "\n".join(map(str, caught.value.problems))
        assert "line 2, password" in text and "line 3, world.ranks" in text
        assert (secret in text) is is_shown, config


def test_the_address_is_the_first_that_is_named(capsys, monkeypatch):
    Path("job.yaml").write_text("config: quickstart\naddress: http://job:1\n")
    Path("bare.yaml").write_text("config: quickstart\n")
    assert cli.main(["submit", "bare.yaml", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("no cluster is named; give --address http://HOST:8265")
    assert "--address http://job:1 " in printed(capsys, "job.yaml")
    assert "--address http://me:1 " in printed(capsys, "job.yaml", "--address", "http://me:1")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert printed(capsys, "bare.yaml").startswith("ray job submit --address head:6379 ")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://api:1")
    assert printed(capsys, "bare.yaml").startswith("ray job submit --address http://api:1 ")
    # Ray prefers the variable to its own --address.
    assert printed(capsys, "job.yaml").startswith(
        "RAY_API_SERVER_ADDRESS=http://job:1 ray job submit --address http://job:1 "
    )
    assert cli.main(["submit", "bare.yaml", "--dry-run", "--address", "ray://x:10001"]) == 2
    assert "the Jobs API is not at a Ray Client address" in capsys.readouterr().err


def test_the_printed_line_sends_the_token_where_there_is_one_and_no_mode(capsys, monkeypatch, bare_home):
    Path("job.yaml").write_text("config: quickstart\n")
    words = ("job.yaml", "--address", ADDRESS)
    assert printed(capsys, *words).startswith("ray job submit ")
    (bare_home / ".ray").mkdir(parents=True)
    (bare_home / ".ray" / "auth_token").write_text("secret")
    line = printed(capsys, *words)
    assert line.startswith("RAY_AUTH_MODE=token ray job submit ") and "secret" not in line
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert printed(capsys, *words).startswith("ray job submit ")


def test_a_dry_run_contacts_nothing_and_loads_no_ray(tmp_path):
    program = (
        "import socket, sys\n"
        "def connect(*_): raise AssertionError('a dry run opened a socket')\n"
        "socket.socket.connect = socket.create_connection = connect\n"
        "from raymoe.cli import main\n"
        f"code = main(['submit', 'quickstart', '--dry-run', '--address', {ADDRESS!r}])\n"
        "loaded = [name for name in ('torch', 'ray', 'cuda', 'numpy') if name in sys.modules]\n"
        "assert not code and not loaded, (code, loaded)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", packaged_names("jobs"))
def test_a_packaged_job_is_valid_for_raymoe_and_for_editors(name, capsys):
    path = packaged_config(name, "jobs")
    assert path is not None
    jsonschema.validate(yaml.safe_load(path.read_text()), submission_schema())
    [command] = [line.strip("# \n") for line in path.read_text().splitlines() if "   raymoe submit " in line]
    words = shlex.split(command)
    assert words[2] == name
    assert printed(capsys, *words[2:]).startswith(f"ray job submit --address {words[4]} ")


def test_the_job_of_the_page_is_valid():
    page = (JOBS.parent / "docs" / "submit.md").read_text()
    Path("mine.yaml").write_text("workload: exchange\n")
    Path("job.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    job, request = load_submission("job.yaml")
    assert job is not None and job.world.ranks == 8 and request.metadata["raymoe_out"] == "/shared/results/{run}"


def test_the_schema_refuses_what_raymoe_refuses(capsys):
    assert cli.main(["schema", "--job"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == submission_schema()
    for wrong in ({}, {"config": "x", "cpus": 1}, {"config": "x", "entrypoint": {"cpu": 1}}, {"config": 3}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_the_manifest_for_kubernetes_runs_a_valid_command():
    path = JOBS / "kubernetes" / "rayjob.yaml"
    assert "nobody here has run it" in path.read_text()
    manifest = yaml.safe_load(path.read_text())
    assert manifest["kind"] == "RayJob" and manifest["metadata"]["labels"] == {
        "kueue.x-k8s.io/queue-name": "user-queue"
    }
    spec = manifest["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:4] == ["python", "-m", "raymoe", "run"]
    sets = [value for option, value in zip(words[5::2], words[6::2], strict=True) if option == "--set"]
    job = load_job(words[4], sets)
    assert words[-2:] == ["--out", spec["metadata"]["raymoe_out"]] and spec["backoffLimit"] > 0
    worker = spec["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    assert int(worker["resources"]["limits"]["nvidia.com/gpu"]) == job.world.ranks
    assert spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    env = yaml.safe_load(spec["runtimeEnvYAML"])
    assert env == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "10"}}
