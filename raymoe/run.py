"""Executes a job and writes its run directory: the work of `raymoe run`.

This process holds the run directory and the terminal. `gang.main_process` runs the driver in a child process; its
messages become lines in results.jsonl and progress on stderr.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from raymoe.config import Job, load_job
from raymoe.errors import CannotWrite, ConfigError, printable
from raymoe.gang.address import choose
from raymoe.gang.main_process import Stopped, Tell, Work, run_in_child
from raymoe.gang.messages import CaseDone, Connected, GenerationEnded, Message, Progressed, Ready, RunOutcome
from raymoe.gang.private_ray import private_ray
from raymoe.report.directory import RunDirectory
from raymoe.report.environment import environment
from raymoe.report.progress import ProgressBar
from raymoe.report.results import Generation, Summary, complete
from raymoe.report.tables import render
from raymoe.workload.memory_needed import bytes_per_rank, check_memory


@dataclass(frozen=True)
class Request:
    """The command line of `raymoe run`."""

    config: str | None
    sets: tuple[str, ...] = ()
    address: str | None = None
    out: Path | None = None
    quiet: bool = False
    resume: Path | None = None


def run(request: Request) -> int:
    """Execute a request and return the exit code. If it is not 0, the last line on stderr says why."""
    job, directory = _open(request)
    with directory, _own_ray(request):
        outcome = _run(job, directory, request)
    if outcome.traceback:
        print("\n".join(map(printable, outcome.traceback.splitlines())), file=sys.stderr)
    if outcome.exit_code != 0:
        print(printable(" ".join(outcome.message.split())), file=sys.stderr, flush=True)
    return outcome.exit_code


def _own_ray(request: Request) -> AbstractContextManager[object]:
    """Keep others away from the Ray that this run starts, if it starts one. Before the child, which imports Ray."""
    return private_ray(os.environ) if choose(request.address) is None else nullcontext()


def _open(request: Request) -> tuple[Job, RunDirectory]:
    if request.resume is not None:
        if request.config is not None or request.sets or request.out is not None:
            raise ConfigError("--resume DIR continues the run in DIR unchanged; give no CONFIG, --set or --out with it")
        directory = RunDirectory.resume(request.resume)
        return Job.from_resolved(directory.read_config()), directory
    if request.config is None:
        raise ConfigError("raymoe run needs a CONFIG (a file, or a name such as quickstart) or --resume DIR")
    job = load_job(request.config, request.sets)
    if choose(request.address) is None:
        check_memory(job.world.ranks, bytes_per_rank(job))  # in a cluster, the chosen node checks its own memory
    directory = RunDirectory.create(request.out, job.name)
    directory.write_config(job.resolved())
    return job, directory


@dataclass
class Recorder:
    """Writes the driver's messages into the run directory, and shows progress."""

    directory: RunDirectory
    progress: ProgressBar
    facts: dict[str, object]
    began: float = field(default_factory=time.monotonic)
    generations: list[Generation] = field(default_factory=list)
    _ready_s: float | None = None

    def receive(self, message: Message) -> None:
        match message:
            case Connected(address, seconds):
                ray = f"the Ray cluster at {address}" if address else "a local Ray"
                self.progress.doing(f"{ray} is up after {seconds:.1f} s, placing ranks")
            case Ready(generation, seconds, ranks):
                self._ready_s = round(seconds, 3)
                self.directory.write_environment({**self.facts, "generation": generation, "ranks": list(ranks)})
                pids = ", ".join(f"rank {rank['rank']} pid {rank['pid']}" for rank in ranks)
                self.progress.note(f"generation {generation}: {len(ranks)} ranks ready after {seconds:.1f} s ({pids})")
            case Progressed(case, done, total):
                self.progress.step(case, done, total)
            case CaseDone(case, generation, lines):
                commit = str(self.facts["commit"]) if self.facts["commit"] else None
                run = self.directory.run
                self.directory.add_case(
                    [complete(line, run=run, generation=generation, commit=commit) for line in lines]
                )
                self.progress.case_done(case)
                for reason in dict.fromkeys(line["skipped"] for line in lines if line.get("skipped")):
                    self.progress.note(f"{case} is skipped: {reason}")
            case GenerationEnded(generation, cause, culprit, explanation, restarting):
                self.generations.append(Generation(self._ready_s, cause, culprit))
                self._ready_s = None
                if restarting:
                    self.progress.note(f"generation {generation}: {explanation}; starting the gang again")


def _run(job: Job, directory: RunDirectory, request: Request) -> RunOutcome:
    cases = [case.name for case in job.cases()]
    facts = environment()
    with ProgressBar(sys.stderr, len(cases), len(directory.finished()), request.quiet) as progress:
        for notice in [*directory.notices, f"results go to {directory.path}"]:
            progress.note(notice)
        recorder = Recorder(directory, progress, facts)
        try:
            directory.write_environment(facts)
            outcome = run_in_child(_driver(job, directory, request), recorder.receive)
            summary = Summary.of(outcome.exit_code, outcome.message, cases, directory.finished(), recorder.generations)
            directory.write_summary(summary)
            if any(line["device"] != "cpu" or line["op"] == "copy" for line in directory.lines()):
                from raymoe.report.plots import write_plots  # matplotlib takes half a second to load

                if drawn := write_plots(directory.path, directory.lines()):
                    progress.note(f"plots go to {drawn[0].parent}")
        except CannotWrite as error:
            return RunOutcome(error.exit_code, str(error))
    if not request.quiet:
        width = shutil.get_terminal_size((100, 24)).columns
        print(render(directory.lines(), terminal=sys.stdout.isatty(), width=width), end="", flush=True)
    return outcome


def _driver(job: Job, directory: RunDirectory, request: Request) -> Work:
    """Make the work of the child process. Only the child imports Ray."""

    def work(tell: Tell, stopped: Stopped) -> RunOutcome:
        from raymoe.gang.driver import Driver, RunOrder

        finished = frozenset(directory.finished())
        return Driver(RunOrder(job, directory.run, request.address, finished), tell, stopped).run()

    return work
