"""The main process, which runs the driver in a child: signals, hangs, crashes, no leftovers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from raymoe.gang.main_process import TICK_S, stop_seconds
from tests.terminal import TERMINAL

PREAMBLE = """
    import os, signal, subprocess, sys, time
    from raymoe.gang.main_process import run_in_child
    from raymoe.gang.messages import Alive, Bounded, Ending, RunOutcome, Progressed
    from raymoe.gang import main_process

    def report(outcome):
        print(f"{outcome.exit_code}|{outcome.message}", flush=True)
"""


def start(body: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(PREAMBLE) + textwrap.dedent(body)
    return subprocess.Popen([*TERMINAL, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


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
        def work(send, stopped):
            for done in range(3):
                send(Progressed("a", done, 3))
            return RunOutcome(6, "wrong")
        messages = []
        outcome = run_in_child(work, messages.append)
        assert [message.done for message in messages] == [0, 1, 2], messages
        report(outcome)
    """)
    assert finish(process) == (6, "wrong")


def test_orphaned_processes_of_the_driver_are_ended() -> None:
    process = start("""
        def work(send, stopped):
            # A grandchild in its own process group, whose parent exits at once.
            script = "import subprocess as s; print(s.Popen(['sleep', '60'], process_group=0, stdout=s.DEVNULL).pid)"
            send(Progressed(subprocess.check_output([sys.executable, "-c", script], text=True).strip(), 0, 0))
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
        def work(send, stopped):
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
        def work(send, stopped):
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
        def work(send, stopped):
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


def test_under_nohup_a_hangup_ends_neither_the_main_process_nor_the_driver() -> None:
    process = start("""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        def work(send, stopped):
            print(os.getpid(), flush=True)
            seen = [stopped()]
            for _ in range(25):
                time.sleep(0.02)
                seen.append(stopped())
            return RunOutcome(0, f"done, asked to stop: {any(seen)}")
        report(run_in_child(work, print))
    """)
    assert process.stdout is not None
    driver = int(process.stdout.readline())
    os.kill(driver, signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    assert finish(process) == (0, "done, asked to stop: False")


def test_a_driver_that_exceeds_its_time_bound_ends_with_the_bounds_message() -> None:
    process = start("""
        def work(send, stopped):
            send(Bounded(0.3, 3, "nobody answered within 0.3 s"))
            time.sleep(60)
        report(run_in_child(work, print))
    """)
    assert finish(process) == (3, "nobody answered within 0.3 s")


def test_a_lifted_time_bound_does_not_end_the_driver() -> None:
    process = start("""
        def work(send, stopped):
            send(Bounded(0.2, 3, "too late"))
            send(Bounded(None))
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
        def work(send, stopped):
            {how}
        report(run_in_child(work, print))
    """)
    code, message = finish(process)
    assert code == 1 and said in message


def test_sigkill_of_the_main_process_ends_the_driver() -> None:
    process = start("""
        def work(send, stopped):
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


def test_a_driver_that_says_nothing_is_ended_and_its_state_is_named() -> None:
    process = start("""
        main_process.SILENT_S = 1.0
        def work(send, stopped):
            os.kill(os.getpid(), signal.SIGSTOP)
        report(run_in_child(work, print))
    """)
    code, message = finish(process)
    assert code == 5
    assert re.fullmatch(r"the driver process \(pid \d+\) is stopped and said nothing for 1 s", message), message
    process = start("""
        main_process.SILENT_S = 1.0
        def work(send, stopped):
            time.sleep(60)
        report(run_in_child(work, print))
    """)
    code, message = finish(process)
    assert code == 3 and message.startswith("lost Ray: the driver's call to it did not return for 1 s")


def test_a_driver_that_says_that_it_works_may_take_its_time() -> None:
    process = start("""
        main_process.SILENT_S = 0.8
        def work(send, stopped):
            for _ in range(10):
                time.sleep(0.2)
                send(Alive())
            return RunOutcome(0, "done")
        report(run_in_child(work, print))
    """)
    assert finish(process) == (0, "done")


def test_a_main_process_that_was_frozen_does_not_blame_its_driver() -> None:
    """Both are stopped for longer than SILENT_S, as by a container that is paused."""
    process = start("""
        main_process.SILENT_S = 3.0
        def work(send, stopped):
            print(os.getpid(), flush=True)
            for _ in range(10):
                time.sleep(0.2)
                send(Alive())
            return RunOutcome(0, "done")
        report(run_in_child(work, print))
    """)
    assert process.stdout is not None
    driver = int(process.stdout.readline())
    process.send_signal(signal.SIGSTOP)
    os.kill(driver, signal.SIGSTOP)
    time.sleep(3.5)
    process.send_signal(signal.SIGCONT)
    time.sleep(2 * TICK_S)  # the driver wakes up later
    os.kill(driver, signal.SIGCONT)
    assert finish(process) == (0, "done")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("then", ["os.abort()", "time.sleep(60)", "raise ValueError('while cleaning up')"])
def test_an_announced_outcome_is_final(then: str) -> None:
    process = start(f"""
        def work(send, stopped):
            send(Ending(RunOutcome(0, "done"), 0.5))
            {then}
        report(run_in_child(work, print))
    """)
    assert finish(process) == (0, "done")


def test_the_output_of_the_driver_is_kept_off_the_terminal_and_says_that_the_gcs_is_lost() -> None:
    process = start("""
        def work(send, stopped):
            os.system("echo rpc_client.h: Failed to connect to GCS within 60 seconds >&2")
            os._exit(1)
        outcome = run_in_child(work, print, keep_output=True)
        assert outcome.output == "rpc_client.h: Failed to connect to GCS within 60 seconds\\n", outcome.output
        report(outcome)
    """)
    code, message = finish(process)
    assert code == 3 and message.startswith("lost the Ray cluster: its GCS ended or does not answer")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("wait", "seconds"), [("", 2.0), ("10", 3.5), ("2", 1.0)])
def test_under_ray_job_stop_the_driver_gets_less_time_than_the_job(
    monkeypatch: pytest.MonkeyPatch, wait: str, seconds: float
) -> None:
    assert stop_seconds() == 3.5
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", wait)
    assert stop_seconds() == seconds
