"""A full disk: exit code 8, and the results that were written before stay complete."""

import subprocess
import sys

import pytest

import raymoe.report.page
import raymoe.run
from raymoe.errors import CannotWrite, ClusterError

# Adds cases until one does not fit. Prints how many fitted; exits with the exit code of the error.
FILL = """
import sys
from pathlib import Path
from raymoe.errors import CannotWrite
from raymoe.report.directory import RunDirectory
from tests.unit.report.lines import exchange_case
directory = RunDirectory.create(Path(sys.argv[1]), "quick")
directory.write_config({"a": 1})
{limit}
for count in range(1000):
    try:
        directory.add_case(exchange_case(f"b{count}", 100.0))
    except CannotWrite as error:
        print(error, file=sys.stderr)
        print(count)
        sys.exit(error.exit_code)
"""
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))"
# Runs afterwards: the directory can be read, and holds the finished cases and nothing else.
LOOK = """
import sys
from pathlib import Path
from raymoe.report.results import Record
path = Path(sys.argv[1])
record = Record.read(path)
assert [line["op"] for line in record.lines] == ["dispatch", "combine", "exchange"] * int(sys.argv[2])
assert {each.name for each in path.iterdir()} == {".lock", "config.yaml", "results.jsonl"}, list(path.iterdir())
"""


def run(*command, root):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root, check=False)


def test_a_file_size_limit_exits_8_and_keeps_finished_cases(tmp_path, pytestconfig):
    """Runs everywhere: the system refuses the write in the middle of a file, as a full disk does."""
    root, place = pytestconfig.rootpath, str(tmp_path / "r")
    filled = run(sys.executable, "-c", FILL.replace("{limit}", LIMIT), place, root=root)
    assert filled.returncode == 8, filled.stderr
    assert filled.stderr == f"cannot write {place}/results.jsonl: File too large; " + (
        "make room there or name another place with --out\n"
    )
    assert int(filled.stdout) > 5
    looked = run(sys.executable, "-c", LOOK, place, filled.stdout.strip(), root=root)
    assert looked.returncode == 0, looked.stderr


def test_a_full_tmpfs_exits_8_and_keeps_finished_cases(tmp_path, pytestconfig):
    """The file system is in a new mount namespace, which ends with the shell in any case."""
    probe = run("unshare", "--mount", "mount", "-t", "tmpfs", "none", str(tmp_path), root="/")
    if probe.returncode != 0:
        pytest.skip(f"this user may not mount: {probe.stderr.strip()}; the test of a file size limit covers it")
    script = """
    mount -t tmpfs -o size=128k none "$1" || exit 99
    "$2" -c "$3" "$1/r" > "$1.count"; code=$?
    "$2" -c "$4" "$1/r" "$(cat "$1.count")" || exit 98
    exit $code
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    programs = (sys.executable, FILL.replace("{limit}", ""), LOOK)
    done = run("unshare", "--mount", "sh", "-c", script, "sh", str(disk), *programs, root=pytestconfig.rootpath)
    assert done.returncode == 8, done.stderr
    assert done.stderr.startswith(f"cannot write {disk}/r/results.jsonl: No space left on device; ")


@pytest.mark.parametrize(("failed", "notes"), [(CannotWrite, 0), (ClusterError, 1)])
def test_a_full_disk_is_told_once(tmp_path, monkeypatch, capsys, failed, notes):
    """The page meets the disk that results.jsonl met before. After another failure the page has a line of its own."""

    def full(*_, **__):
        raise CannotWrite("cannot write report.html: No space left on device")

    def fails(*_, **__):
        raise failed("the first reason")

    monkeypatch.setattr(raymoe.run, "run_in_child", fails)
    monkeypatch.setattr(raymoe.report.page, "write_page", full)
    code = raymoe.run.run(raymoe.run.Request("quickstart", out=str(tmp_path / "run")))
    said = capsys.readouterr().err.splitlines()
    assert code == failed.exit_code and said[-1] == "the first reason"
    assert len([line for line in said if "report.html" in line]) == notes, said
