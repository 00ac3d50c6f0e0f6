"""Executes a job and writes its run directory: the work of `raymoe run`.

This process holds the run directory and the terminal. `gang.main_process` runs the driver in a child process; its
messages become lines in results.jsonl and progress on stderr.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from raymoe.config import Job, job_from_resolved, load_job
from raymoe.doctor.examine import DEFAULT, DEFAULT_ON_GPUS, usable_gpus
from raymoe.errors import CannotWrite, ClusterError, ConfigError, printable
from raymoe.gang.address import choose, needs_token
from raymoe.gang.local_gpus import visible_gpus
from raymoe.gang.local_ray import configure, remove_session
from raymoe.gang.main_process import Send, Stopped, Work, run_in_child
from raymoe.gang.messages import (
    CaseDone,
    CaseStopped,
    Connected,
    GenerationEnded,
    Message,
    Profiled,
    Progressed,
    Ready,
    Recovered,
    RunOutcome,
    Waiting,
)
from raymoe.gang.private_ray import private_ray
from raymoe.report.directory import RunDirectory, write_atomically
from raymoe.report.environment import busy, environment
from raymoe.report.history import numbered
from raymoe.report.opening import open_directory
from raymoe.report.progress import ProgressBar
from raymoe.report.ray_job import version_notice
from raymoe.report.results import PAGE, RESTART, RESUME, START, STOPPED, Generation, Line, Record, Summary, complete
from raymoe.report.storage import Mirror
from raymoe.report.tables import render
from raymoe.report.trace import ChromeTrace
from raymoe.shell import Interrupted, check_stdout
from raymoe.workload.memory_needed import bytes_per_rank, check_memory
from raymoe.workload.progress import in_words
from raymoe.workload.traces import check_traces


@dataclass(frozen=True)
class Request:
    """The command line of `raymoe run`."""

    config: str | None
    sets: tuple[str, ...] = ()
    address: str | None = None
    out: str | None = None  # a directory, or a URL that gets a copy of it
    quiet: bool = False
    resume: Path | None = None
    profile: bool = False


def run(request: Request) -> int:
    """Execute a request and return the exit code. If it is not 0, the last line on stderr says why."""
    job, directory, mirror = _open(request)
    with directory:
        outcome = _run(job, directory, request, mirror)
    if outcome.traceback:
        print("\n".join(map(printable, outcome.traceback.splitlines())), file=sys.stderr)
    if outcome.exit_code != 0:
        print(printable(" ".join(outcome.message.split())), file=sys.stderr, flush=True)
    return outcome.exit_code


def _own_ray(request: Request) -> AbstractContextManager[Path | None]:
    """Keep other users away from the Ray that this run starts, if it starts one. Call it before a child imports Ray."""
    return private_ray(os.environ) if choose(request.address) is None else nullcontext()


def _open(request: Request) -> tuple[Job, RunDirectory, Mirror | None]:
    if request.resume is not None:
        if request.config is not None or request.sets or request.out is not None:
            raise ConfigError("--resume DIR continues the run in DIR unchanged; give no CONFIG, --set or --out with it")
        directory = RunDirectory.resume(request.resume)
        return job_from_resolved(directory.read_config()), directory, None
    if request.config is None:
        raise ConfigError("raymoe run needs a CONFIG (a file, or a name such as quickstart) or --resume DIR")
    config, notice = _config_for_here(request, request.config)
    job = load_job(config, request.sets)
    check_traces(job)
    if choose(request.address) is None:
        check_memory(job.world.ranks, bytes_per_rank(job))  # in a cluster, the chosen node checks its own memory
    directory, mirror = open_directory(request.out, job)
    directory.notices += [notice] if notice else []
    return job, directory, mirror


def _config_for_here(request: Request, config: str) -> tuple[str, str | None]:
    """Return the config to run, and a notice. A new user's first run uses the GPUs of this machine, if two can be.

    A run with settings of `world`, on a cluster, or with a file of that name is as the user says.
    """
    own = config != DEFAULT or Path(config).exists() or choose(request.address) is not None
    if own or any(setting.startswith("world") for setting in request.sets) or visible_gpus() < 2:
        return config, None
    gpus = usable_gpus()
    if gpus < 2:
        return config, "GPU ranks cannot run here, so CPU ranks do; `raymoe doctor` says why"
    return DEFAULT_ON_GPUS, f"{gpus} GPUs are here: runs {DEFAULT_ON_GPUS}; --set world.device=cpu runs it on CPU ranks"


@dataclass
class Recorder:
    """Writes the driver's messages into the run directory, and shows progress."""

    directory: RunDirectory
    progress: ProgressBar
    cases: list[str]  # names of the job's cases
    mirror: Mirror | None = None
    facts: dict[str, object] = field(default_factory=dict)  # content of environment.json
    generations: list[Generation] = field(default_factory=list)
    trace: ChromeTrace = field(init=False)
    stopped: list[Line] = field(default_factory=list)  # of the case in which the gang was told to stop
    _ready_s: float | None = None
    _number: int = 0  # of the generation that was ready last

    def __post_init__(self) -> None:
        self.trace = ChromeTrace(self.directory.run)

    def receive(self, message: Message) -> None:
        match message:
            case Connected(address, seconds):
                ray = f"the Ray cluster at {address}" if address else "a local Ray"
                self.progress.doing(f"{ray} is up after {seconds:.1f} s, placing ranks")
            case Waiting(text):
                self.progress.note(text)
            case Ready(generation, seconds, ranks):
                self._ready_s, self._number = round(seconds, 3), generation
                known = {"generation": generation, "began": self._began(generation), "ready_s": self._ready_s}
                document = {**self.facts, **known, "ranks": list(ranks)}
                self.directory.write_environment(document, self.generations)
                pids = ", ".join(f"rank {rank['rank']} pid {rank['pid']}" for rank in ranks)
                self.progress.note(f"generation {generation}: {len(ranks)} ranks ready after {seconds:.1f} s ({pids})")
            case Recovered(generation, seconds):
                text = f"generation {generation}: all ranks have done a step {seconds:.1f} s after the loss"
                self.progress.note(text)
            case Progressed(case, done, total, step_s):
                self.progress.step(case, in_words(done, total, step_s), done / total if total else 0.0)
            case Profiled(process, host, spans, shift):
                self.trace.add(process, host, spans)
                self.trace.shift(host, shift.seconds, shift.error)
            case CaseDone(case, generation, lines):
                self.directory.add_case(self._completed(lines, generation))
                if self.mirror is not None:
                    self.mirror.start()
                self.progress.case_done(case)
                for reason in dict.fromkeys(line["skipped"] for line in lines if line.get("skipped")):
                    self.progress.note(f"{case} is skipped: {reason}")
            case CaseStopped(generation, lines):
                self.stopped = self._completed(lines, generation)
            case GenerationEnded(generation, cause, culprit, explanation, restarting):
                began = self._began(generation)
                self.generations.append(Generation(self._ready_s, cause, culprit, generation, began))
                self._ready_s = None
                if restarting:
                    self.progress.note(f"generation {generation}: {explanation}; starting the gang again")

    def _completed(self, lines: Sequence[Mapping[str, object]], generation: int) -> list[Line]:
        commit = str(self.facts["commit"]) if self.facts["commit"] else None
        return [complete(line, run=self.directory.run, generation=generation, commit=commit) for line in lines]

    def _began(self, generation: int) -> str:
        if generation > self.directory.first_generation:
            return RESTART
        return RESUME if self.directory.resumed else START

    def summarise(self, outcome: RunOutcome) -> None:
        """Write summary.json. A generation whose end the driver did not report ends now."""
        if self._ready_s is not None:  # the driver crashed, hung, was too slow to stop or was ended
            cause = "stopped" if outcome.exit_code in STOPPED else "unknown"
            began = self._began(self._number)
            self.generations.append(Generation(self._ready_s, cause, None, self._number, began))
            self._ready_s = None
        if outcome.exit_code in STOPPED and self.stopped:
            self.directory.add_stopped(self.stopped)
            case, samples = self.stopped[0]["case"], self.stopped[0]["samples"]
            self.progress.note(f"{case} was stopped: its lines have {samples} samples, and are marked as stopped")
            self.stopped = []
        summary = Summary.of(
            outcome.exit_code, outcome.message, self.cases, self.directory.finished(), self.generations
        )
        self.directory.write_summary(summary)

    def cannot_write(self, error: CannotWrite) -> RunOutcome:
        """Return the outcome of a run whose files cannot be written, and summarise it if there is room for that."""
        outcome = RunOutcome(error.exit_code, str(error))
        with suppress(CannotWrite):  # `error` is the reason already
            self.summarise(outcome)
        return outcome


def _run(job: Job, directory: RunDirectory, request: Request, mirror: Mirror | None) -> RunOutcome:
    cases = [case.name for case in job.cases()]
    with ProgressBar(sys.stderr, len(cases), len(directory.finished()), request.quiet) as progress:
        for notice in [version_notice(), *directory.notices, f"results go to {directory.path}"]:
            if notice is not None:
                progress.note(notice)
        recorder = Recorder(directory, progress, cases, mirror)
        try:
            outcome = _execute(job, recorder, request)
        except (Interrupted, ClusterError) as error:  # before the driver ran, or after
            outcome = _outcome(error)
            recorder.summarise(outcome)
        except CannotWrite as error:
            outcome = recorder.cannot_write(error)
        try:
            _draw(directory, progress)
        except Interrupted as interrupted:
            outcome = _outcome(interrupted)
            recorder.summarise(outcome)
        except CannotWrite as error:
            if outcome.exit_code == 0:  # the reason of an earlier failure matters more
                outcome = recorder.cannot_write(error)
            elif outcome.exit_code != error.exit_code:  # the last line names the same disk already
                progress.note(str(error))
    if not request.quiet:
        outcome = _show_table(recorder, outcome)
    if (page := directory.path / PAGE).is_file():
        recorder.progress.note(f"the report is {page}")  # last, where a table of many lines leaves it in sight
    return outcome if mirror is None else _mirrored(mirror, recorder, outcome)


def _show_table(recorder: Recorder, outcome: RunOutcome) -> RunOutcome:
    """Print the results. A run that ended well fails if they cannot be printed, also in its summary and its report."""
    directory, width = recorder.directory, shutil.get_terminal_size((100, 24)).columns
    print(render(directory.lines(), terminal=sys.stdout.isatty(), width=width), end="", flush=True)
    if outcome.exit_code != 0:  # this reason matters more
        return outcome
    try:
        check_stdout()
    except CannotWrite as error:
        outcome = recorder.cannot_write(error)
        with suppress(CannotWrite):
            _draw(directory, recorder.progress)
    return outcome


def _execute(job: Job, recorder: Recorder, request: Request) -> RunOutcome:
    """Run the driver, and write its messages and how it ended."""
    directory, progress = recorder.directory, recorder.progress
    recorder.facts = environment()
    directory.write_environment(recorder.facts)
    if notice := _busy_notice(recorder.facts, request):
        progress.note(notice)
    token = needs_token(choose(request.address))
    with _own_ray(request) as ray:
        try:
            outcome = run_in_child(_driver(job, directory, request, token), recorder.receive, keep_output=True)
            recorder.summarise(outcome)
            _tidy(directory, outcome, recorder.generations, progress)
        except (CannotWrite, Interrupted):
            if ray is not None:  # its logs do not explain this end
                shutil.rmtree(ray, ignore_errors=True)
            raise
    if request.profile:
        trace = recorder.trace.write(directory.path, directory.first_generation)
        progress.note(f"the trace is {trace}")
    return outcome


def _busy_notice(facts: Mapping[str, object], request: Request) -> str | None:
    """Return a notice if this machine has other work. Ranks on a cluster may run on another one."""
    other_work = busy(facts) if choose(request.address) is None else None
    return other_work and f"this machine has other work ({other_work}), so times will be longer than on an idle one"


def _outcome(error: Interrupted | ClusterError) -> RunOutcome:
    reason = error.stopped if isinstance(error, Interrupted) else error
    return RunOutcome(reason.exit_code, str(reason))


def _mirrored(mirror: Mirror, recorder: Recorder, outcome: RunOutcome) -> RunOutcome:
    """Copy the results to their URL. A run that ended well fails if that fails."""
    try:
        mirror.finish()
    except CannotWrite as error:
        if outcome.exit_code == 0:
            return recorder.cannot_write(error)
        print(printable(str(error)), file=sys.stderr, flush=True)
    return outcome


DRIVER_LOG = "driver.log"
HARMLESS = ("done", "stopped")  # causes for which a generation may end


def _tidy(directory: RunDirectory, outcome: RunOutcome, generations: list[Generation], progress: ProgressBar) -> None:
    """Keep what Ray logged if something failed, and say where; else remove it."""
    ended_well = outcome.exit_code in {0, *STOPPED} and all(generation.cause in HARMLESS for generation in generations)
    if ended_well:
        if outcome.session is not None:
            remove_session(outcome.session)
        return
    logs = [] if outcome.session is None else [f"Ray's logs are kept in {outcome.session / 'logs'}"]
    if outcome.output:
        log = directory.path / numbered(DRIVER_LOG, directory.first_generation)
        write_atomically(log, outcome.output)
        logs.append(f"the driver's output in {log}")
    if logs:
        progress.note(", ".join(logs))


def _draw(directory: RunDirectory, progress: ProgressBar) -> None:
    """Write report.html, and plots/ where links were measured. Raises CannotWrite."""
    try:
        from raymoe.report.page import write_page
        from raymoe.report.plots import write_plots

        record = Record.read(directory.path)
        write_page(directory.path, [record])
        measured_links = any(line["device"] != "cpu" or line["op"] == "copy" for line in record.lines)
        if measured_links and (drawn := write_plots(record.path, record.lines, record.config)):
            progress.note(f"plots go to {drawn[0].parent}")
    except CannotWrite:
        raise
    except Exception as error:  # noqa: BLE001  (a bug of the report does not change how the run ended)
        progress.note(f"report.html or plots/ is missing, a bug in raymoe: {type(error).__name__}: {error}")


def _driver(job: Job, directory: RunDirectory, request: Request, token: bool) -> Work:
    """Make the work of the child process. Only the child imports Ray."""

    def work(send: Send, stopped: Stopped) -> RunOutcome:
        if choose(request.address) is None:
            configure(os.environ)
        if token:
            os.environ["RAY_AUTH_MODE"] = "token"
        from raymoe.gang.driver import Driver, DriverSettings

        settings = DriverSettings(
            job,
            directory.run,
            request.address,
            frozenset(directory.finished()),
            request.profile,
            directory.first_generation,
        )
        return Driver(settings, send, stopped).run()

    return work
