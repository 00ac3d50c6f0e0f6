"""The commands as a shell sees them: output, last line of stderr, exit code, time."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import yaml

from raymoe import cli
from raymoe.config import job_from_resolved, job_schema, load_job
from tests.python_path import python_path
from tests.unit.config.configs_on_disk import write


def command(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": python_path()}
    given = {"capture_output": True, "text": True, "timeout": 30, "env": environment} | options
    return subprocess.run([sys.executable, "-m", "raymoe", *arguments], check=False, **given)  # type: ignore[call-overload]


def in_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, list[str]]:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err.splitlines()


def test_validate_prints_workload_ranks_and_cases(capsys, tmp_path):
    config = write(tmp_path, "workload: exchange\nmatrix: {shape.tokens: [1, 2]}\n")
    assert in_process(capsys, "validate", config) == (0, f"{config} is valid: exchange on 4 ranks, 2 cases\n", [])
    assert in_process(capsys, "validate", "quickstart", "--set", "world.ranks=2")[:2] == (
        0,
        "quickstart is valid: layer on 2 ranks, 1 case\n",
    )


def test_validate_takes_several_files_and_names_the_problems_of_all(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("workload: layer\nshape: {hiden: 8}\n")
    Path("b.yaml").write_text("workload: exchange\n")
    code, out, err = in_process(capsys, "validate", "a.yaml", "b.yaml", "none", "quickstart")
    assert (code, out.splitlines()) == (
        2,
        ["b.yaml is valid: exchange on 4 ranks, 1 case", "quickstart is valid: layer on 4 ranks, 1 case"],
    )
    assert err[:2] == [
        "a.yaml: line 2, shape.hiden = 8: unknown key, did you mean 'hidden'?",
        err[1],
    ]
    assert err[1].startswith("none: neither a file nor a packaged config")
    assert len(err) == 3 and err[2].startswith("2 of 4 configs are wrong; the first: a.yaml has 1 problem: line 2")


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (numpy.zeros((8, 3), numpy.int64), "the job needs ids of shape [4 or 8, 2]"),
        (numpy.full((8, 2), 99), "ids go from 99 to 99, and with 8 experts they must be in [-1, 7]"),
        (numpy.zeros((8, 2)), "the trace must hold integers"),
    ],
    ids=["shape", "range", "floats"],
)
def test_a_wrong_trace_is_refused_before_a_gang_starts(capsys, tmp_path, monkeypatch, ids, says):
    monkeypatch.chdir(tmp_path)
    numpy.save("ids.npy", ids)
    Path("x.yaml").write_text(
        "workload: exchange\nworld: {ranks: 2, device: cpu}\nshape: {tokens: 4, experts: 8, topk: 2, hidden: 64}\n"
        "routing: {kind: trace, file: ids.npy}\n"
    )
    for arguments in (["validate", "x.yaml"], ["run", "x.yaml"], ["submit", "job.yaml", "--dry-run"]):
        Path("job.yaml").write_text("config: x.yaml\naddress: http://head:8265\nruntime_env: {working_dir: .}\n")
        code, _, err = in_process(capsys, *arguments)
        assert code == 2 and says in err[-1] and "routing.file: " in err[-1], (arguments, err)
    assert not Path("runs").exists()


def test_the_process_that_forks_has_no_thread_after_it_read_a_trace(tmp_path):
    numpy.save(tmp_path / "ids.npy", numpy.zeros((8, 2), numpy.int64))
    config = write(tmp_path, "workload: exchange\nshape: {topk: 2}\nrouting: {kind: trace, file: ids.npy}\n")
    program = (
        "import os, sys; from raymoe.run import Request, run\n"
        f"try: run(Request({config!r}, ('shape.tokens=3',)))\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print('numpy' in sys.modules, len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS'))"
    )
    several = os.environ | {"PYTHONPATH": python_path(), "OPENBLAS_NUM_THREADS": "3"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=several, check=True)
    assert ended.stdout.split() == ["ConfigError", "True", "1", "3"]


def test_all_cases_of_a_trace_are_checked(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    numpy.save("ids.npy", numpy.zeros((8, 2), numpy.int64))
    Path("x.yaml").write_text(
        "workload: exchange\nworld: {ranks: 2, device: cpu}\nshape: {experts: 8, topk: 2, hidden: 64}\n"
        "routing: {kind: trace, file: ids.npy}\nmatrix: {shape.tokens: [4, 5, 6, 8]}\n"
    )
    code, _, err = in_process(capsys, "validate", "x.yaml")
    assert code == 2 and len(err) == 3 and err[-1].startswith("2 problems with traces; the first is routing.file: ")


def test_all_problems_go_to_stderr_and_the_last_line_sums_up(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("workload: layer\nshape:\n  topk: 2\n  hiden: 1024\n")
    assert in_process(capsys, "validate", "x.yaml", "--set", "world.ranks=x", "--set", "shape.topk=99") == (
        2,
        "",
        [
            "x.yaml: line 4, shape.hiden = 1024: unknown key, did you mean 'hidden'?",
            "--set world.ranks=x: a whole number is wanted, found text",
            "--set shape.topk=99: topk 99 is more than the 32 experts, at most 32",
            "x.yaml has 3 problems; the first is line 4, shape.hiden = 1024: unknown key, did you mean 'hidden'?",
        ],
    )


def test_a_single_problem_is_printed_once(capsys):
    code, _, err = in_process(capsys, "show", "quikstart")
    assert (code, err) == (2, ["quikstart: neither a file nor a packaged config, did you mean 'quickstart'?"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Missing command; raymoe --help tells more"),
        (["foo"], "No such command 'foo'"),
        (["validate"], "Missing argument 'CONFIG...'; raymoe validate --help tells more"),
        (["show", "a", "b"], "unexpected extra argument"),
        (["validate", "a", "--nope"], "No such option: --nope"),
        (["validate", "a", "--set"], "requires an argument"),
    ],
    ids=str,
)
def test_a_wrong_command_line_exits_2_with_a_sentence(capsys, arguments, expected):
    code, out, err = in_process(capsys, *arguments)
    assert (code, out) == (2, "")
    assert expected in err[-1] and err[-1].endswith("--help tells more")
    assert len(err) == 1 or err[0].startswith("Usage: raymoe")


def test_show_prints_a_config_that_loads_as_the_same_job(capsys, tmp_path):
    for config in ("quickstart", "host_exchange", "p2p_host"):
        code, out, err = in_process(capsys, "show", config, "--set", "steps.count=7")
        assert (code, err) == (0, [])
        job = load_job(config, ["steps.count=7"])
        assert load_job(write(tmp_path, out)) == job
        assert job_from_resolved(yaml.safe_load(out)) == job


def test_schema_prints_the_job_schema_as_json(capsys):
    code, out, _ = in_process(capsys, "schema")
    assert (code, json.loads(out)) == (0, job_schema())


def test_help_and_version_are_printed(capsys):
    code, out, err = in_process(capsys, "--help")
    assert (code, err) == (0, []) and "validate" in out
    assert in_process(capsys, "--version")[1].startswith("raymoe ")


def test_a_bug_exits_1_with_a_traceback_and_a_sentence(capsys, monkeypatch):
    def broken(*_: object) -> None:
        raise KeyError("oh\nno")

    monkeypatch.setattr(cli, "_load", broken)
    code, _, err = in_process(capsys, "validate", "quickstart")
    assert code == 1 and err[0].startswith("Traceback") and err[-1] == "a bug in raymoe: KeyError: 'oh\\nno'"


def test_sigint_exits_130(capsys, monkeypatch):
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli, "_load", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job started by & ignores SIGINT
    try:
        code, _, err = in_process(capsys, "validate", "quickstart")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, err[-1]) == (130, "stopped by SIGINT; finished cases are kept")


def test_a_full_disk_behind_stdout_exits_8():
    with Path("/dev/full").open("w") as full:
        ended = command("schema", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (8, "the output cannot be written: No space left on device\n")


def test_a_closed_pipe_behind_stdout_exits_0():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = command("schema", capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_last_line_is_plain_and_unwrapped_on_a_narrow_terminal(tmp_path):
    config = write(tmp_path, "workload: layer\nshape: {" + ", ".join(f"key_number_{i}: 1" for i in range(9)) + "}\n")
    narrow = os.environ | {"PYTHONPATH": python_path(), "COLUMNS": "20", "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    ended = command("validate", config, env=narrow)
    assert ended.returncode == 2 and "\x1b" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(f"{config} has 9 problems; the first is line 2, shape.key_number_0")


def test_validate_loads_neither_torch_nor_ray_and_takes_under_0_6_s():
    script = (
        "import sys; from raymoe.cli import main; code = main(['validate', 'quickstart'])\n"
        "heavy = {'torch', 'ray', 'cuda', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    environment = os.environ | {"PYTHONPATH": python_path()}
    assert subprocess.run([sys.executable, "-c", script], check=False, env=environment, timeout=30).returncode == 0

    def cpu_seconds() -> float:
        """Return the processor time of one call, which the load of other processes hardly changes."""
        began = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert command("validate", "quickstart").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(time.monotonic() - began)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    took: list[float] = []
    assert min(cpu_seconds() for _ in range(7)) < 0.6
    assert min(took) < 2, "it waits for something"
