"""Submits jobs to a Ray cluster, and brings their results back: `raymoe submit`, `attach`, `stop`, `logs` and `jobs`.

The job's log goes to stdout; lines about the job go to stderr. Importing this module loads no Ray.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raymoe.config.submission import EntrypointSection, JobRequest, address_problem, load_submission
from raymoe.errors import CannotWrite, ClusterError, ConfigError, RaymoeError, one_line, printable, shown
from raymoe.gang.address import JOBS_ADDRESSES, jobs_address, send_token
from raymoe.report.directory import new_run_id
from raymoe.report.environment import uploaded_commit
from raymoe.report.progress import last_progress
from raymoe.report.ray_job import run_of
from raymoe.report.results import Record
from raymoe.report.transfer import copy_if_readable, unpack
from raymoe.shell import Interrupted
from raymoe.workload.traces import check_traces

if TYPE_CHECKING:
    from raymoe.gang.jobs_api import JobsApi, JobState

MOST_LOGS = 20  # of running jobs that `jobs` reads
RESULTS_S = 60.0  # for the job that reads results on the driver's node


def submit(
    file: str, sets: Sequence[str], address: str | None, out: Path | None, dry_run: bool = False, detach: bool = False
) -> int:
    """Submit the job in a file, follow it and copy its results to `out`; return the exit code.

    Raises RaymoeError if nothing was started.
    """
    config, request = load_submission(file, sets)
    named = address, request.address
    address = _address(*named)
    if config is not None:
        check_traces(config)
    directory = request.runtime_env.get("working_dir", "")
    if directory.startswith("/"):
        request = dataclasses.replace(request, metadata=request.metadata | uploaded_commit(directory))
    if dry_run:
        print(command_line(request, address), flush=True)
        return 0
    _check_destination(out)
    api = connect(address)
    if notice := ray_version_notice(api.ray_version, importlib.metadata.version("ray")):
        _note(notice)
    job = new_run_id(request.name)
    where = "" if named == (None, None) else f" --address {shlex.quote(address)}"
    if directory.startswith("/"):
        _note(f"uploading {directory}, unless the cluster has it")
    try:
        api.submit(job, request, _note)
    except KeyboardInterrupt:
        _note(f"stopped while the cluster was asked; it may have started job {job}: raymoe attach {job}{where}")
        raise
    stops = "" if detach else "; Ctrl-C stops it, and Ctrl-C twice leaves it"
    _note(f"job {job} is submitted to {shown(api.address)}{stops}")
    if detach:
        _note(f"to follow it and copy its results: raymoe attach {job}{where}")
        print(job, flush=True)
        return 0
    return _follow(api, job, out, where)


def attach(job: str, address: str | None, out: Path | None) -> int:
    """Follow a job that was submitted before. Unlike those of `submit`, signals leave the job running."""
    _check_destination(out)
    api = connect(_address(address))
    where = _where(address)
    if not api.state(job).over:
        _note(f"following job {shown(job)}; Ctrl-C leaves it running, `raymoe stop {quoted(job)}{where}` stops it")
    return _follow(api, job, out, where, stops=False)


def stop(job: str, address: str | None) -> int:
    """Stop a job, and wait for its end."""
    api = connect(_address(address))
    from raymoe.gang.follow import stop

    over = api.state(job).over
    state = stop(api, job)
    how = "had ended before" if over else "has ended"
    _note(f"job {job} {how}: {state.status}; raymoe attach {quoted(job)}{_where(address)} copies its results")
    return 0


def logs(job: str, address: str | None) -> int:
    """Print what a job has printed so far."""
    _print_log(connect(_address(address)).log(job))
    return 0


def _where(address: str | None) -> str:
    """Return the option that names the same cluster in another command."""
    return "" if address is None else f" --address {shlex.quote(address)}"


def jobs(address: str | None) -> str:
    """List the runs that a cluster knows, the last one first."""
    api = connect(_address(address))
    runs = [state for state in api.states() if _is_run(state)]
    running = [state.id for state in runs if state.status == "RUNNING"][:MOST_LOGS]
    return table(runs, time.time(), {job: _progress(api, job) for job in running})


def _progress(api: JobsApi, job: str) -> str:
    """Read from the log of a job where its run is."""
    try:
        return last_progress(api.log(job))
    except RaymoeError:  # the table is complete without it
        return "its log cannot be read"


def connect(address: str) -> JobsApi:
    """Connect to the Jobs API of a cluster, with the token if there is one."""
    if send_token():
        os.environ["RAY_AUTH_MODE"] = "token"  # read when Ray is imported
    from raymoe.gang.jobs_api import JobsApi

    return JobsApi(address)


# The command line that does the same.


def command_line(request: JobRequest, address: str) -> str:
    """Return the `ray job submit` line that does what `submit` does, to be typed in a shell."""
    words = ["ray", "job", "submit", "--address", address]
    words += ["--runtime-env-json", json.dumps(request.runtime_env)]
    words += ["--metadata-json", json.dumps(request.metadata)]
    resources = request.resources
    amounts = {"num-cpus": resources.cpus, "num-gpus": resources.gpus, "memory": resources.memory}
    for name, amount in amounts.items():
        words += (
            [f"--entrypoint-{name}", f"{amount:.15g}" if isinstance(amount, float) else str(amount)] if amount else []
        )
    for name, mapping in {"resources": resources.resources, "label-selector": resources.labels}.items():
        words += [f"--entrypoint-{name}", json.dumps(mapping)] if mapping else []
    return _variables(address) + " ".join(map(quoted, [*words, "--", *request.entrypoint]))


def quoted(word: str) -> str:
    r"""Quote a word for a shell. Control characters become escapes, which bash, zsh and ksh read within $'...'.

    >>> quoted("steps.count=2"), quoted("a b"), quoted("it's\n")
    ('steps.count=2', "'a b'", "$'it\\x27s\\x0a'")
    """
    if word.isprintable():
        return shlex.quote(word)
    plain = (c if c.isprintable() and c not in "'\\" else _bytes(c) for c in word)
    return f"$'{''.join(plain)}'"


def _bytes(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))


def _variables(address: str) -> str:
    """Set what the line needs here: the mode of the token, and the address where a variable would override it."""
    token = "RAY_AUTH_MODE=token " if send_token() else ""
    overridden = jobs_address() not in (None, address)
    return token + (f"{JOBS_ADDRESSES[0]}={quoted(address)} " if overridden else "")


def _address(*named: str | None) -> str:
    address = jobs_address(*named)
    if address is None:
        raise ConfigError(
            "no cluster is named; give --address http://HOST:8265, address in the job, or set RAY_API_SERVER_ADDRESS"
        )
    if wrong := address_problem(address):
        raise ConfigError(f"the address {shown(address)} is {wrong[0]}; {wrong[1]}")
    return address


def ray_version_notice(cluster: str, here: str) -> str | None:
    """Say that the cluster's Ray differs from the one here; None if it does not.

    >>> ray_version_notice("2.60.0", "2.60.0")
    >>> ray_version_notice("2.58.0", "2.60.0")
    "the cluster runs Ray 2.58.0 and this machine has Ray 2.60.0; the job uses the cluster's"
    """
    if cluster == here:
        return None
    return f"the cluster runs Ray {shown(cluster)} and this machine has Ray {here}; the job uses the cluster's"


# Following a job to its end.


def _follow(api: JobsApi, job: str, out: Path | None, where: str, stops: bool = True) -> int:
    """Follow a job. `where` is the rest of the command that follows it again: its address, if one was given."""
    from raymoe.gang.follow import Follower

    again = f"raymoe attach {quoted(job)}{where}"
    follower = Follower(api, job, _print_log, _note, again, stops)
    follower.follow()
    if follower.left and follower.signum is not None:
        how = "is being stopped" if follower.stopping else "goes on"
        stop = "" if follower.stopping else f", `raymoe stop {quoted(job)}{where}` stops it"
        return _ended(f"left job {job}, which {how}; `{again}` follows it{stop}", 128 + follower.signum)
    state = follower.state
    assert state is not None, "following ends with a state, a signal or an error"
    destination = out or Path("runs") / run_of(job)  # an ID may be any text, also one with `/` or `..`
    problem: RaymoeError | None = None
    try:
        copied = bring_results(api, state, destination)
    except RaymoeError as error:  # the end of the job counts, not what its dashboard says of its results
        copied, problem = False, error
    except Interrupted as interrupt:
        code = interrupt.stopped.exit_code
        return _ended(f"stopped by {signal.Signals(code - 128).name}; the results of job {job} are not copied", code)
    if copied:
        _note(f"results are in {destination}")
    exit_code, sentence = verdict(state, destination if copied else None)
    if follower.signum is not None:
        name = signal.Signals(follower.signum).name
        kept = "" if _is_program(state) else ", finished cases are kept"
        return _ended(f"stopped by {name}; job {job} is {state.status}{kept}", 128 + follower.signum)
    if problem is not None:
        unread = f"the results of job {job} cannot be copied: {problem}"
        if exit_code == 0:
            return _ended(unread, CannotWrite.exit_code)
        _note(unread)
    return exit_code if exit_code == 0 else _ended(sentence, exit_code)


def bring_results(api: JobsApi, state: JobState, destination: Path) -> bool:
    """Copy the directory of a job that has ended; False if the job made none, or was not submitted by raymoe.

    It is copied from here if this machine can read it, else by a second job on the node of the driver.
    """
    refused = state.exit_code == ConfigError.exit_code and not _is_program(state)  # before it made a directory
    if not _is_run(state) or refused:
        return False
    out = state.metadata.get("raymoe_out")
    if copy_if_readable(out, state.id, destination):
        return True
    if state.node is None:  # the job never started
        return False
    from raymoe.gang.follow import output_of

    reader = JobRequest(
        entrypoint=("python", "-m", "raymoe.report.transfer", out or "", state.id),
        runtime_env=dict(state.runtime_env),
        metadata={"job_name": f"results of {state.id}"},
        resources=EntrypointSection(labels={"ray.io/node-id": state.node}),
    )
    output = output_of(api, f"{run_of(state.id)}-results-{secrets.token_hex(2)}", reader, RESULTS_S)
    unpack(output, state.id, destination)
    return True


def verdict(state: JobState, results: Path | None) -> tuple[int, str]:
    """Return the exit code for the end of a job, and the sentence for it.

    It is the job's own exit code. A job that Ray stopped has none: then that of its summary counts, else 143. A failed
    job whose code a process here cannot end with (1 to 255) gives 1.
    """
    summary = _summary(results)
    message = str(summary.get("message", "")) if summary else ""
    if state.status == "SUCCEEDED":
        return 0, "done"
    if state.status == "STOPPED":
        code = summary.get("exit_code") if summary else None
        if not isinstance(code, int) or isinstance(code, bool) or not _says_failed(code):
            code = 128 + signal.SIGTERM
        return code, f"job {state.id} was stopped{': ' if message else ''}{one_line(message)}"
    if state.exit_code is None:
        kind = (state.error_type or "no reason").lower().replace("_", " ")
        return ClusterError.exit_code, f"job {state.id} did not run ({kind}): {one_line(state.message)}"
    code = state.exit_code if state.exit_code >= 0 else 128 - state.exit_code
    last = message or state.message.rstrip().rpartition("\n")[2].strip()
    if "No module named raymoe" in last:
        last = "raymoe is not installed there; use an image that has it, or set runtime_env.pip or working_dir"
    failed = f"job {state.id} failed with exit code {shown(str(code))}: {one_line(last)}"
    return code if _says_failed(code) else RaymoeError.exit_code, failed


def _says_failed(code: int) -> bool:
    """Whether a process that ends with this code has failed. The system keeps the lowest 8 bits: 256 would be 0."""
    return 0 < code < 256


def _summary(results: Path | None) -> dict[str, object] | None:
    try:
        return Record.read(results).summary if results else None
    except ConfigError:
        return None


def _is_run(state: JobState) -> bool:
    own = any(key.startswith("raymoe_") for key in state.metadata)
    return own or " raymoe run " in f" {state.entrypoint} "


def _is_program(state: JobState) -> bool:
    return "raymoe_program" in state.metadata


def _check_destination(out: Path | None) -> None:
    """Refuse a place for results that is in use or cannot be made, before anything is submitted."""
    if out is None:
        return
    try:
        if (out.is_symlink() or out.exists()) and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"--out {shown(str(out))} is not an empty directory; name another for the results")
        above = next(parent for parent in out.absolute().parents if parent.exists())
        if not out.exists() and not above.is_dir():
            raise CannotWrite(f"--out {shown(str(out))} cannot be used: {shown(str(above))} is not a directory")
        if not out.exists() and not os.access(above, os.W_OK | os.X_OK):
            raise CannotWrite(f"--out {shown(str(out))} cannot be used: {shown(str(above))} cannot be written")
    except OSError as error:
        raise CannotWrite(f"--out {shown(str(out))} cannot be used: {error.strerror}") from error


# Output on the terminal.


def _print_log(text: str) -> None:
    """Print a piece of a job's log, with control characters escaped: it comes from another machine."""
    sys.stdout.write("\n".join(map(printable, text.expandtabs().split("\n"))))
    sys.stdout.flush()


def _note(line: str) -> None:
    print(printable(" ".join(line.split())), file=sys.stderr, flush=True)


def _ended(sentence: str, exit_code: int) -> int:
    _note(sentence)
    return exit_code


def table(states: Sequence[JobState], now: float, progress: Mapping[str, str] | None = None) -> str:
    """Format jobs as a table: id, config or program, status with exit code, start, duration, and progress."""
    rows = [("job", "runs", "status", "started (UTC)", "took", "progress" if progress else "")]
    for state in sorted(states, key=lambda state: state.began_ms or 0, reverse=True):
        status = state.status if state.exit_code in (None, 0) else f"{state.status} ({shown(str(state.exit_code))})"
        began, ended = state.began_ms, now * 1000 if state.ended_ms is None else state.ended_ms
        started, took = "" if began is None else _time(began), "" if began is None else _duration(began, ended)
        where = (progress or {}).get(state.id, "")
        runs = state.metadata.get("raymoe_config") or state.metadata.get("raymoe_program", "")
        rows.append((shown(state.id), shown(runs), status, started, took, where))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


def _time(milliseconds: int) -> str:
    """Format a time that a cluster gives; `?` for one that is in no calendar.

    >>> _time(1_000), _time(10**18)
    ('1970-01-01 00:00:01', '?')
    """
    try:
        return f"{datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "?"


def _duration(began: int, ended: float) -> str:
    """Format the time between two times that a cluster gives; `?` if one of them cannot be.

    >>> _duration(0, 61_000), _duration(61_000, 0), _duration(0, 10**18)
    ('61 s', '?', '?')
    """
    known = "?" not in (_time(began), _time(int(ended)))
    return f"{(ended - began) / 1000:.0f} s" if known and began <= ended else "?"
