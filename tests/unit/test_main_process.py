"""The main process, which runs the driver in a child: signals, hangs, crashes, no leftovers."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

PREAMBLE = """
    import os, signal, subprocess, sys, time
    from raymoe.gang.main_process import run_in_child
    from raymoe.gang.messages import Bounded, RunOutcome, Progressed

    def report(outcome):
        print(f"{outcome.exit_code}|{outcome.message}", flush=True)
"""


def start(body: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(PREAMBLE) + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], seconds: float = 20.0) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    code, _, message = output.strip().splitlines()[-1].partition("|")
    return int(code), message


def has_ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_messages_arrive_in_order_and_the_outcome_last() -> None:
    process = start("""
        def work(tell, stopped):
            for done in range(3):
                tell(Progressed("a", done, 3))
            return RunOutcome(6, "wrong")
        messages = []
        outcome = run_in_child(work, messages.append)
        assert [message.done for message in messages] == [0, 1, 2], messages
        report(outcome)
    """)
    assert finish(process) == (6, "wrong")


def test_orphaned_processes_of_the_driver_are_ended() -> None:
    process = start("""
        def work(tell, stopped):
            # A grandchild in its own process group, whose parent exits at once.
            script = "import subprocess as s; print(s.Popen(['sleep', '60'], process_group=0, stdout=s.DEVNULL).pid)"
            tell(Progressed(subprocess.check_output([sys.executable, "-c", script], text=True).strip(), 0, 0))
            return RunOutcome(0, "done")
        pids = []
        outcome = run_in_child(work, lambda message: pids.append(int(message.case)))
        state = open(f"/proc/{pids[0]}/stat").read() if os.path.exists(f"/proc/{pids[0]}") else "gone"
        report(RunOutcome(outcome.exit_code, state))
    """)
    assert finish(process) == (0, "gone")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_driver_that_checks_for_signals_may_finish_its_clean_up(number: signal.Signals, code: int) -> None:
    process = start("""
        def work(tell, stopped):
            print("up", flush=True)
            while stopped() is None:
                time.sleep(0.02)
            print("drained", flush=True)
            return RunOutcome(128 + stopped(), "stopped on request")
        report(run_in_child(work, print))
    """)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(number)
    assert process.stdout.readline() == "drained\n"
    assert finish(process)[0] == code


def test_a_hung_driver_is_ended_within_5_s_of_sigterm() -> None:
    process = start("""
        def work(tell, stopped):
            print(os.getpid(), flush=True)
            time.sleep(60)
        report(run_in_child(work, print))
    """)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, message = finish(process)
    assert code == 143 and "SIGTERM" in message
    assert time.monotonic() - began < 5.0 and has_ended(child)


def test_a_second_signal_ends_the_driver_at_once() -> None:
    process = start("""
        def work(tell, stopped):
            print("up", flush=True)
            time.sleep(60)
        report(run_in_child(work, print))
    """)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130 and time.monotonic() - began < 3.0


def test_a_driver_that_exceeds_its_time_bound_ends_with_the_bounds_message() -> None:
    process = start("""
        def work(tell, stopped):
            tell(Bounded(0.3, 3, "nobody answered within 0.3 s"))
            time.sleep(60)
        report(run_in_child(work, print))
    """)
    assert finish(process) == (3, "nobody answered within 0.3 s")


def test_a_lifted_time_bound_does_not_end_the_driver() -> None:
    process = start("""
        def work(tell, stopped):
            tell(Bounded(0.2, 3, "too late"))
            tell(Bounded(None))
            time.sleep(0.5)
            return RunOutcome(0, "done")
        report(run_in_child(work, print))
    """)
    assert finish(process) == (0, "done")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("os.abort()", "was killed by SIGABRT"),
        ("os._exit(9)", "ended with exit code 9"),
        ("raise ValueError('odd')", "ValueError: odd"),
    ],
)
def test_a_crash_of_the_driver_is_reported_in_one_sentence(how: str, said: str) -> None:
    process = start(f"""
        def work(tell, stopped):
            {how}
        report(run_in_child(work, print))
    """)
    code, message = finish(process)
    assert code == 1 and said in message


def test_sigkill_of_the_main_process_ends_the_driver() -> None:
    process = start("""
        def work(tell, stopped):
            print(os.getpid(), flush=True)
            subprocess.Popen(["sleep", "60"], start_new_session=True)
            while stopped() is None:
                time.sleep(0.02)
            return RunOutcome(143, "stopped")
        run_in_child(work, print)
    """)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=10)
    deadline = time.monotonic() + 5
    while not has_ended(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert has_ended(child)
