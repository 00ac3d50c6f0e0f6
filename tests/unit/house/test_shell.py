"""The process of a command as its shell sees it: stop signals at any moment, and standard streams that are gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.python_path import python_path
from tests.terminal import TERMINAL
from tests.unit.config.configs_on_disk import write

SIGNALS = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM]
AT_IMPORT = """
import os, signal, sys

class Sender:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Sender())
from raymoe.__main__ import main
sys.exit(main())
"""


def python(program: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    given = {"capture_output": True, "text": True, "timeout": 60, "env": environment()} | options
    command = [*TERMINAL, sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=False, **given)  # type: ignore[call-overload]


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `raymoe` is the command."""
    line = line.replace("raymoe", f"{sys.executable} -m raymoe")
    command = [*TERMINAL, "bash", "-c", f"set -o pipefail; {line}"]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environment())


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("module", ["typer", "raymoe.config"])
def test_a_signal_during_an_import_ends_with_the_one_sentence(module: str, number: signal.Signals) -> None:
    ended = python(AT_IMPORT.format(module=module, number=int(number)), "validate", "quickstart")
    said = f"stopped by {number.name}; finished cases are kept\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, "", said)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("moment", ["environment", "remove_session"])
def test_a_signal_before_or_after_the_driver_leaves_a_summary(
    tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    """`environment` is called before the driver starts, and `remove_session` when it has ended."""
    program = f"""
import os, sys
import raymoe.run
from raymoe.gang.messages import RunOutcome
raymoe.run.run_in_child = lambda *_, **__: RunOutcome(0, "done", session=object())
raymoe.run.{moment} = lambda *_: os.kill(os.getpid(), {int(number)}) or {{"commit": None}}
from raymoe.__main__ import main
sys.exit(main())
"""
    ended = python(program, "run", "quickstart", "--out", str(tmp_path / "run"))
    assert ended.returncode == 128 + number, ended.stderr
    assert ended.stderr.splitlines()[-1] == f"stopped by {number.name}; finished cases are kept"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("stopped", 128 + number)


def test_the_hangup_of_a_terminal_does_not_stop_a_command_under_nohup() -> None:
    ended = shell(f"trap '' HUP; raymoe validate quickstart & sleep {0.02}; kill -HUP $!; wait $!")
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT], ids=lambda number: number.name)
def test_ctrl_c_stops_a_command_that_a_script_started_in_the_background(number: signal.Signals) -> None:
    """A script's `&` ignores both, and its commands are in the terminal's process group all the same."""
    program = AT_IMPORT.format(module="typer", number=int(number))
    line = [*TERMINAL, "env", "--ignore-signal=INT,QUIT", sys.executable, "-c", program, "validate", "quickstart"]
    ended = subprocess.run(line, check=False, capture_output=True, text=True, timeout=60, env=environment())
    assert (ended.returncode, ended.stderr) == (128 + number, f"stopped by {number.name}; finished cases are kept\n")


def test_tests_of_signals_pass_where_pytest_itself_ignores_them() -> None:
    chosen = [__file__, "-k", "during_an_import and typer", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    line = ["env", "--ignore-signal=HUP,INT,QUIT", sys.executable, "-m", "pytest", *chosen]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=100, env=environment())
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout


def test_a_second_signal_ends_a_command_that_lost_the_first() -> None:
    program = """
import os, signal, sys
from raymoe import shell
shell.prepare()
class Swallows:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)  # an exception in __del__ is lost
Swallows()
print("goes on", flush=True)
os.kill(os.getpid(), signal.SIGINT)
print("not reached", flush=True)
"""
    ended = python(program)
    assert (ended.returncode, ended.stdout) == (130, "goes on\n")
    assert ended.stderr.splitlines()[-1] == "stopped by SIGINT; finished cases are kept"


@pytest.mark.parametrize("command", ["schema", "--help"])
@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("raymoe {} | true", 0, ""),
        ("raymoe {} >&-", 0, ""),
        ("raymoe {} <&- >&- 2>&-", 0, ""),
        ("raymoe {} >/dev/full", 8, "the output cannot be written: No space left on device\n"),
        ("raymoe {} >/dev/full 2>/dev/full", 8, ""),
    ],
)
def test_an_output_that_nobody_takes(command: str, line: str, code: int, said: str) -> None:
    ended = shell(line.format(command))
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", said)


@pytest.mark.parametrize("sink", ["2>/dev/full", "2>&-", "2> >(true)"])
def test_a_failure_keeps_its_code_where_nobody_can_read_the_reason(sink: str) -> None:
    assert shell(f"raymoe validate no_such_config {sink}").returncode == 2


def test_a_reader_of_stderr_that_takes_nothing_stalls_the_command_once() -> None:
    program = """
import sys, time
from raymoe import shell
shell.STALL_S = 0.3
shell.prepare()
for _ in range(20000):
    print("a line that nobody reads", file=sys.stderr)
sys.exit(7)
"""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, env=environment())
    assert process.stderr is not None
    try:
        assert process.wait(timeout=20) == 7
        assert time.monotonic() - began > 0.3
        assert len(process.stderr.read()) >= 4096, "the lines before the stall are kept"
    finally:
        process.kill()
        process.stderr.close()


def test_a_pipe_that_another_process_made_non_blocking_gets_all_of_the_output() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    program = "import sys; from raymoe import shell; shell.prepare(); sys.stdout.write('x' * 1_000_000)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=writer, env=environment())
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as output:
            time.sleep(0.3)
            assert output.read() == b"x" * 1_000_000
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait(timeout=10)


def test_characters_that_the_terminal_lacks_are_escaped(tmp_path: Path) -> None:
    config = write(tmp_path, "workload: layer\nname: käse\n")
    program = "import sys; from raymoe.__main__ import main; sys.exit(main())"
    ended = python(program, "validate", config, env=environment() | {"PYTHONIOENCODING": "ascii"})
    assert ended.returncode == 2 and "k\\xe4se" in ended.stderr
    plain = "import sys; from raymoe import shell; shell.prepare(); sys.stdout.write('caf\\xe9\\n')"
    assert python(plain, env=environment() | {"PYTHONIOENCODING": "ascii"}).stdout == "caf\\xe9\n"


@pytest.mark.parametrize("command", ["run quickstart", "run quickstart --out here", "validate quickstart"])
def test_a_deleted_working_directory_is_named(command: str, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    ended = shell(f"cd {tmp_path}/gone; rmdir {tmp_path}/gone; raymoe {command}")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "the current directory has been deleted; change to one that exists\n"


def test_doctor_ends_its_probes_and_their_ray_when_it_is_stopped() -> None:
    command = [*TERMINAL, sys.executable, "-m", "raymoe", "doctor"]
    doctor = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment())
    assert doctor.stderr is not None
    try:
        deadline = time.monotonic() + 60
        while "gcs_server" not in (probes := in_sessions_of(doctor.pid)).values() and time.monotonic() < deadline:
            time.sleep(0.05)
        began = time.monotonic()
        doctor.send_signal(signal.SIGTERM)
        assert doctor.wait(timeout=20) == 143
        assert time.monotonic() - began < 6
        assert doctor.stderr.read() == b"stopped by SIGTERM; finished cases are kept\n"
    finally:
        doctor.kill()
        doctor.stderr.close()
    assert "gcs_server" in probes.values()
    deadline = time.monotonic() + 3
    while (left := [pid for pid in probes if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def in_sessions_of(parent: int) -> dict[int, str]:
    """The name of every process in a session that a child of `parent` leads."""
    leaders, found = set(children_of(parent)), {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) in leaders:
                found[int(entry.name)] = (entry / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
