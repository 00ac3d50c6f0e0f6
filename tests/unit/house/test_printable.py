"""Text from outside reaches the terminal only with its control characters escaped."""

from __future__ import annotations

import io

import pytest

import raymoe.config
import raymoe.run
from raymoe import cli
from raymoe.errors import CannotWrite, printable
from raymoe.gang.messages import RunOutcome
from raymoe.report.progress import ProgressBar
from raymoe.run import Request

# A colour, a window title, a bell, a line end, C1's own "clear the screen", a reversed line, a lone surrogate.
HOSTILE = "a\x1b[31m\x1b]0;title\x07\r\n\x85\x9b2J\u202e\u2066\u2028\x7f\udc80z"
VALID = "workload: layer\n"


def is_plain(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n")) and not text.startswith("\n")


def test_what_is_hostile_here_is_hostile() -> None:
    assert not is_plain(HOSTILE)


def test_every_control_character_is_escaped_and_text_is_kept() -> None:
    controls = [chr(code) for code in (*range(32), *range(0x7F, 0xA0), 0x200E, 0x202E, 0x2066, 0x2069, 0xFEFF, 0xDC80)]
    assert all(printable(each).isascii() and printable(each).startswith("\\") for each in controls)
    assert printable("Größe 4 µs — 东京 ✓") == "Größe 4 µs — 东京 ✓"


@pytest.mark.parametrize(
    "arguments",
    [
        ("validate", HOSTILE),
        ("show", HOSTILE),
        ("validate", "quickstart", "--set", f"{HOSTILE}=1"),
        ("validate", "quickstart", "--set", f"world.{HOSTILE}=1"),
        ("validate", "quickstart", "--set", f"name={HOSTILE}"),
        ("validate", "quickstart", "--set", "routing.kind=trace", "--set", f'routing.file="{HOSTILE[:5]}\u2066"'),
        ("show", "quickstart", HOSTILE),
        ("validate", "no_config", HOSTILE),
        ("run", "quickstart", "--resume", HOSTILE),
        ("run", "--resume", HOSTILE),
        (HOSTILE,),
        ("validate", f"--{HOSTILE}"),
    ],
    ids=lambda arguments: " ".join(arguments).encode("unicode_escape").decode()[:50],
)
def test_a_command_line(capsys, arguments) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") >= 1
    assert is_plain(err)


@pytest.mark.parametrize(("text", "code"), [(VALID, 0), ("shape: {hiden: 1, topk: 99}\n", 2), ("a: [", 2)])
def test_the_name_of_a_config(capsys, tmp_path, text, code) -> None:
    name = HOSTILE.replace("\udc80", "")
    (tmp_path / name).write_text(text)
    assert cli.main(["validate", str(tmp_path / name)]) == code
    out, err = capsys.readouterr()
    assert is_plain(out) and is_plain(err)
    assert "a\\x1b[31m" in out + err


def test_out_inside_a_ray_job(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert cli.main(["run", "quickstart", "--out", HOSTILE]) == 2
    assert is_plain(capsys.readouterr().err)


def test_out_that_cannot_be_written(capsys, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["run", "quickstart", "--out", str(tmp_path / "file" / HOSTILE)]) == 8
    assert is_plain(capsys.readouterr().err)


def test_a_bug_and_its_traceback(capsys, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr(raymoe.config, "load_job", broken)
    assert cli.main(["validate", "quickstart"]) == 1
    err = capsys.readouterr().err
    assert is_plain(err) and "Traceback" in err and "in broken" in err


def test_the_end_of_a_run(capsys, monkeypatch, tmp_path) -> None:
    outcome = RunOutcome(4, HOSTILE, traceback=f"Traceback\n  {HOSTILE}\n")
    monkeypatch.setattr(raymoe.run, "_run", lambda *_: outcome)
    assert raymoe.run.run(Request("quickstart", out=str(tmp_path / "out"))) == 4
    err = capsys.readouterr().err
    assert is_plain(err) and err.startswith("Traceback\n")


def test_a_reason_of_the_system(capsys, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise CannotWrite(HOSTILE)

    monkeypatch.setattr(raymoe.config, "load_job", broken)
    assert cli.main(["show", "quickstart"]) == 8
    assert is_plain(capsys.readouterr().err)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_progress_of_a_run(monkeypatch, stream) -> None:
    monkeypatch.setattr("raymoe.report.progress.SECONDS_BETWEEN_LINES", 0.0)
    case = f"[blink]x[/]file={HOSTILE}"  # the first part would be a style for rich
    said = stream()
    with ProgressBar(said, cases=1) as progress:
        progress.note(f"results go to {HOSTILE}")
        progress.doing(f"the Ray cluster at {HOSTILE} is up")
        progress.step(case, 1, 2)
        progress.case_done(case)
    text = said.getvalue()
    hostile = ("\x1b]0;", "\x07", "\x9b", "\x85", "\u202e", "\u2066", "\udc80")
    assert not [each for each in hostile if each in text]
    assert "results go to a\\x1b[31m" in text
    assert stream is Terminal or is_plain(text)
    if stream is Terminal:
        assert "[blink]" in text
