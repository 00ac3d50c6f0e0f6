"""Results on their way: out of a cluster as text, to a URL and back, and a run that Ray starts again."""

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

import raymoe
from raymoe.config import Job, load_job
from raymoe.errors import CannotWrite, ClusterError, ConfigError
from raymoe.report import environment as environment_module
from raymoe.report import storage, transfer
from raymoe.report.directory import RAY_JOB, RunDirectory
from raymoe.report.environment import environment, submitted_commit, uploaded_commit
from raymoe.report.opening import open_directory
from raymoe.report.ray_job import run_name, version_notice
from raymoe.report.results import Record, Summary

JOB = "quick-20261123T070000Z-abcd"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a working directory of the test's own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RAY_JOB, raising=False)
    return tmp_path / "home"


@pytest.fixture
def under_ray(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the entrypoint of a Ray job that `raymoe submit` started."""
    metadata = {"job_submission_id": JOB, "raymoe_version": raymoe.__version__}
    monkeypatch.setenv(RAY_JOB, json.dumps({"runtime_env": {}, "metadata": metadata}))


def results(path: Path, job: str = JOB) -> Path:
    """A run directory as a job leaves it."""
    (path / "plots").mkdir(parents=True)
    (path / "config.yaml").write_text("# raymoe run quick\nname: quick\n")
    (path / "environment.json").write_text(json.dumps({"ray_job": job}))
    (path / "plots" / "a.svg").write_bytes(os.urandom(5000))
    (path / "summary.json").write_text("{}")
    (path / ".lock").write_text("process 1")
    (path / "passwd").symlink_to("/etc/passwd")
    os.mkfifo(path / "fifo")
    return path


def names(path: Path) -> list[str]:
    found = (str(each.relative_to(path)) for each in path.rglob("*") if each.is_file() or each.is_symlink())
    return sorted(name for name in found if name != transfer.RECORD)


PLAIN = ["config.yaml", "environment.json", "plots/a.svg", "summary.json"]


def test_a_run_directory_arrives_as_text_without_links_and_hidden_files(tmp_path):
    source, target = results(tmp_path / "run"), tmp_path / "here" / "got"
    log = f"Running entrypoint for job x\n{transfer.pack(source, JOB)}bye\n"
    transfer.unpack(log, JOB, target)
    assert names(target) == PLAIN
    assert all((target / name).read_bytes() == (source / name).read_bytes() for name in PLAIN)
    assert [path.name for path in target.parent.iterdir()] == ["got"], "nothing half-done is left"


def archive(*members: tuple[str, bytes, bytes]) -> str:
    """Return what a malicious job could print: an archive with files of any name and type."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, len(content), "/etc/passwd"
            tar.addfile(member, io.BytesIO(content))
    raw = data.getvalue()
    return (
        f"raymoe-run-begins {len(raw)} {hashlib.sha256(raw).hexdigest()}\n"
        f"{base64.b64encode(raw).decode()}\nraymoe-run-ends\n"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nothing", "printed no results"),
        ("raymoe-run-missing no run of this job is in /x\x1b\n", r"no run of this job is in /x\\x1b"),
        (f"raymoe-run-begins 3 {'0' * 64}\nAAAA\nraymoe-run-ends\n", "damaged: 3 bytes arrived"),
        (f"raymoe-run-begins 3 {hashlib.sha256(b'abc').hexdigest()}\nYWJj\nraymoe-run-ends\n", "is damaged"),
        (f"raymoe-run-begins 3 {'0' * 64}\nA!\nraymoe-run-ends\n", "is damaged"),
        (archive(("../out", tarfile.REGTYPE, b"x")), "is not a file of a run directory"),
        (archive(("/tmp/out", tarfile.REGTYPE, b"x")), "is not a file of a run directory"),
        (archive(("link", tarfile.SYMTYPE, b"")), "is not a file of a run directory"),
        (archive(("a", tarfile.REGTYPE, bytes(20_000))), "more than 0 MiB"),
        (archive((".bashrc", tarfile.REGTYPE, b"x")), "bashrc is not a file of a run directory"),
        (archive(("a\n\x1b[2J", tarfile.REGTYPE, b"x")), r"a\\n\\x1b\[2J is not a file of a run directory"),
        (archive(("a", tarfile.REGTYPE, b"x"), ("a", tarfile.REGTYPE, b"y")), "a cannot be a file of it: File exists"),
        (archive(("a", tarfile.REGTYPE, b"x"), ("a/b", tarfile.REGTYPE, b"y")), "b cannot be a file of it: "),
        (archive(("x" * 300, tarfile.REGTYPE, b"x")), "cannot be a file of it: File name too long"),
    ],
    ids=range(14),
)
def test_text_that_lies_is_refused_and_leaves_nothing(tmp_path, monkeypatch, text, told):
    monkeypatch.setattr(transfer, "MOST_BYTES", 20_000)
    with pytest.raises(transfer.TransferError, match=told):
        transfer.unpack(text, JOB, tmp_path / "got")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_readable_is_copied_if_it_is_of_that_job(tmp_path):
    source = results(tmp_path / "shared" / JOB)
    out, target = str(tmp_path / "shared" / "{run}"), tmp_path / "got"
    assert transfer.copy_if_readable(out, JOB, target) and names(target) == PLAIN
    assert not transfer.copy_if_readable(str(source), "another-job", tmp_path / "other")
    assert not transfer.copy_if_readable(str(tmp_path / "nowhere"), JOB, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert transfer.copy_if_readable(str(source), JOB, source), "results that are there already"
    (source / "more").write_text("x")
    assert transfer.copy_if_readable(out, JOB, target) and names(target) == sorted([*PLAIN, "more"]), "a later copy"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    with pytest.raises(CannotWrite, match="mine: Directory not empty"):
        transfer.copy_if_readable(out, JOB, tmp_path / "mine")
    assert names(tmp_path / "mine") == ["notes"]
    assert "no run of this job is in" in transfer.pack(source, "another-job")


def test_a_later_copy_keeps_the_files_of_the_user(tmp_path):
    source, target = results(tmp_path / "shared" / JOB), tmp_path / "got"
    transfer.unpack(transfer.pack(source, JOB), JOB, target)
    (target / "notes.txt").write_text("mine")
    (target / "plots" / "mine.png").write_text("mine")
    (target / "plots" / "a.svg").write_text("drawn again")
    (source / "config.yaml").unlink()
    (source / "summary.json").write_text('{"exit_code": 0}')
    (source / "report.html").write_text("<html>")
    for _ in range(2):
        transfer.unpack(transfer.pack(source, JOB), JOB, target)
        assert names(target) == sorted([*PLAIN[1:], "notes.txt", "plots/mine.png", "report.html"])
        assert (target / "plots" / "a.svg").read_text() == "drawn again", "it is as it was in the run"
        assert (target / "summary.json").read_text() == '{"exit_code": 0}'
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [], "nothing half-done is left"


@pytest.mark.parametrize("record", ["as it was", "none", "[]", '{"../mine": "x", "summary.json": 5}'])
def test_a_later_copy_overwrites_no_file_that_it_did_not_write(tmp_path, record):
    source, target, mine = results(tmp_path / "shared" / JOB), tmp_path / "got", tmp_path / "mine"
    transfer.unpack(transfer.pack(source, JOB), JOB, target)
    mine.write_text("mine")
    if record == "none":
        (target / transfer.RECORD).unlink()
    elif record != "as it was":
        (target / transfer.RECORD).write_text(record)
    (target / "summary.json").write_text("mine")
    (source / "summary.json").write_text('{"exit_code": 0}')
    (source / "report.html").write_text("<html>")
    before = names(target)
    with pytest.raises(CannotWrite, match=r"got/summary.json would be overwritten, .*; move it away, or name another"):
        transfer.unpack(transfer.pack(source, JOB), JOB, target)
    assert names(target) == before and (target / "summary.json").read_text() == "mine" and mine.read_text() == "mine"


def test_a_later_copy_does_not_write_through_a_link(tmp_path):
    source, target, elsewhere = results(tmp_path / "shared" / JOB), tmp_path / "got", tmp_path / "elsewhere"
    transfer.unpack(transfer.pack(source, JOB), JOB, target)
    (target / "plots").rename(elsewhere)
    (target / "plots").symlink_to(elsewhere)
    (source / "plots" / "b.svg").write_text("x")
    with pytest.raises(CannotWrite, match=r"plots/b\.svg would be overwritten"):
        transfer.unpack(transfer.pack(source, JOB), JOB, target)
    assert names(elsewhere) == ["a.svg"]


@pytest.mark.parametrize("home", ["unset", "of nobody"])
def test_results_in_a_home_that_this_machine_lacks_are_read_by_the_second_job(tmp_path, monkeypatch, home):
    out = "~nosuchuser/{run}"
    if home == "unset":
        out = None
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 3_000_000)
    assert not transfer.copy_if_readable(out, JOB, tmp_path / "got")
    printed = transfer._printed(out, JOB)
    assert (
        printed.startswith("raymoe-run-missing they are in ~") and "a home directory that this machine lacks" in printed
    )
    assert list(tmp_path.iterdir()) == []


def test_results_go_into_an_empty_directory_here_or_behind_a_link(tmp_path, monkeypatch):
    source = results(tmp_path / "shared" / JOB)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert transfer.copy_if_readable(str(source), JOB, Path()) and names(Path()) == PLAIN
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert transfer.copy_if_readable(str(source), JOB, tmp_path / "link")
    assert names(tmp_path / "there") == PLAIN and (tmp_path / "link").is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "link", "shared", "there"]


@pytest.mark.parametrize("out", ["", "file://results/x"])
def test_a_place_that_names_nothing_is_refused(home, out):
    with pytest.raises(ConfigError, match=r"--out is empty|a file URL of this machine begins with file:///"):
        open_directory(out, small())
    assert not home.exists() and list(home.parent.iterdir()) == []


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.thorough)])
def remote(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place for runs, by the form of a run's URL: a directory, or a bucket of an S3 server on this machine."""
    if request.param == "file":
        yield f"file://{tmp_path}/remote/{{}}"
        return
    moto = pytest.importorskip("moto.server")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        with urlopen(Request(f"http://{host}:{port}/bucket", method="PUT")):
            yield f"s3://bucket/runs/{{}}?region=us-east-1&scheme=http&endpoint_override={host}:{port}"
    finally:
        server.stop()


def test_a_run_is_copied_to_a_url_and_back(tmp_path, remote):
    source, url = results(tmp_path / "run"), remote.format("quick")
    mirror = storage.Mirror(source, url)
    mirror.start()
    mirror.finish()
    assert storage.fetch(url, tmp_path / "there") and names(tmp_path / "there") == PLAIN
    assert (tmp_path / "there/plots/a.svg").read_bytes() == (source / "plots/a.svg").read_bytes()
    assert transfer.copy_if_readable(url, JOB, tmp_path / "got")
    assert names(tmp_path / "got") == PLAIN
    assert not transfer.copy_if_readable(url, "another-job", tmp_path / "other") and not (tmp_path / "other").exists()
    assert not storage.fetch(remote.format("nothing"), tmp_path / "other")
    (source / "summary.json").unlink()  # a retry has begun
    mirror.finish()
    assert storage.fetch(url, tmp_path / "again") and "summary.json" not in names(tmp_path / "again")


@pytest.mark.parametrize("remote", ["s3"], indirect=True)
@pytest.mark.thorough
def test_a_bucket_that_is_not_there_is_named(tmp_path, remote):
    with pytest.raises(CannotWrite, match=r"Bucket 'nobodys' not found.*; they are in") as refused:
        storage.Mirror(results(tmp_path / "run"), remote.format("quick").replace("bucket", "nobodys", 1)).finish()
    assert refused.value.exit_code == 8


def test_a_url_that_cannot_be_used_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match=rf"to file://{tmp_path}/file/x: .*; they are in {tmp_path}/run"):
        storage.Mirror(results(tmp_path / "run"), f"file://{tmp_path}/file/x").finish()
    with pytest.raises(ClusterError, match="cannot read nope://x: Protocol not known: nope"):
        storage.fetch("nope://x", tmp_path / "got")


class Forbidding(BaseHTTPRequestHandler):
    """An S3 server that refuses everybody."""

    protocol_version = "HTTP/1.1"

    def refuse(self) -> None:
        said = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(said)

    do_GET = do_HEAD = do_PUT = do_POST = refuse  # noqa: N815 - their names in the library

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.thorough
def test_storage_that_refuses_or_is_gone_ends_a_run_with_8_and_its_own_words(home, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Forbidding)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"s3://bucket/run?region=us-east-1&scheme=http&endpoint_override=127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(CannotWrite, match=r"cannot read s3://bucket/run.*: .*ACCESS_DENIED.*; check the URL and"):
            open_directory(url, small())
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with pytest.raises(CannotWrite, match=r"cannot read s3://bucket/run.*NETWORK_CONNECTION") as refused:
        open_directory(url, small())
    assert refused.value.exit_code == 8 and "s3fs" not in str(refused.value)


def test_the_advice_to_make_room_stands_only_where_room_helps():
    with pytest.raises(CannotWrite, match=r"cannot write /proc/run.*: [^;]*; name another place with --out$"):
        open_directory("/proc/run", small())


def small(**changes: object) -> Job:
    return load_job("host_exchange", [f"{key}={value}" for key, value in changes.items()])


def finish(directory: RunDirectory, exit_code: int) -> None:
    directory.write_environment({})
    directory.write_summary(Summary.of(exit_code, "over", ["a"], []))
    directory.close()


def test_a_retried_ray_job_continues_its_unfinished_run(under_ray, tmp_path):
    out = str(tmp_path / "out")
    first, _ = open_directory(out, small())
    finish(first, 143)
    again, mirror = open_directory(out, small())
    assert again.run == first.run == JOB and mirror is None
    assert again.notices == [f"continues the unfinished run in {out}; 0 cases done before"]
    again.close()
    with pytest.raises(ConfigError, match="already holds config"):
        open_directory(out, small(**{"steps.count": 3}))  # another config
    finish(RunDirectory.resume(Path(out)), 0)
    with pytest.raises(ConfigError, match="already holds config"):
        open_directory(out, small())  # nothing is left to do


def test_outside_a_ray_job_a_directory_that_holds_results_is_refused(home, tmp_path):
    finish(open_directory(str(tmp_path / "out"), small())[0], 143)
    with pytest.raises(ConfigError, match="continue that run with --resume"):
        open_directory(str(tmp_path / "out"), small())


def test_a_retried_ray_job_continues_from_a_url(under_ray, home, tmp_path):
    url = f"file://{tmp_path}/remote"
    first, mirror = open_directory(url, small())
    assert mirror is not None and first.path == home / "raymoe_runs" / JOB
    finish(first, 143)
    mirror.finish()
    first.path.rename(tmp_path / "gone")  # the retry runs in a new pod
    again, mirror = open_directory(url, small())
    assert mirror is not None and Record.read(again.path).run == JOB and "continues" in again.notices[0]
    finish(again, 0)
    mirror.finish()
    again.path.rename(tmp_path / "gone too")
    with pytest.raises(ConfigError, match=f"--out {url} already holds results"):
        open_directory(url, small())
    assert not again.path.exists()


def test_a_run_of_raymoe_submit_has_the_name_of_its_job(under_ray, home, tmp_path):
    directory, _ = open_directory(str(tmp_path / "{run}"), small())
    assert directory.path == tmp_path / JOB and run_name("x") == JOB
    directory.close()
    (home / "raymoe_runs" / JOB).mkdir(parents=True)
    assert run_name("x").startswith("x-"), "a second run of the same job"
    tilde, _ = open_directory("~/here", small())
    assert tilde.path == home / "here"
    tilde.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"metadata": []}', '{"metadata": {"job_submission_id": 3}}'])
def test_what_is_no_ray_job_gives_a_run_of_its_own_name(home, monkeypatch, text):
    monkeypatch.setenv(RAY_JOB, text)
    assert run_name("x").startswith("x-") and version_notice() is None


def test_a_job_that_uploads_sources_records_their_commit(home, monkeypatch, tmp_path):
    """The upload has no .git; the commit is that of the directory from which the job was submitted."""
    sources = tmp_path / "sources"
    (sources / "raymoe").mkdir(parents=True)
    (sources / "raymoe" / "__init__.py").touch()
    git = ["git", "-C", str(sources), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout[:12]
    metadata = uploaded_commit(str(sources))
    assert metadata == {"raymoe_commit": head} and uploaded_commit(str(tmp_path)) == {}

    monkeypatch.setenv(RAY_JOB, json.dumps({"metadata": {"job_submission_id": JOB, **metadata}}))
    shutil.rmtree(sources / ".git")
    assert submitted_commit(sources) is None, "this process does not run in the upload"
    monkeypatch.chdir(sources)
    assert submitted_commit(sources) == head
    monkeypatch.setattr(environment_module, "SOURCES", sources)
    assert environment()["commit"] == head


@pytest.mark.parametrize("here", ["0.0.9", "9.0.0"], ids=["newer cluster", "older cluster"])
def test_another_version_than_the_one_that_submitted_is_named(under_ray, monkeypatch, here):
    assert version_notice() is None
    metadata = {"job_submission_id": JOB, "raymoe_version": here}
    monkeypatch.setenv(RAY_JOB, json.dumps({"metadata": metadata}))
    assert str(version_notice()).startswith(f"submitted by raymoe {here}, run by raymoe {raymoe.__version__}: ")
