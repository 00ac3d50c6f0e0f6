"""Defines the commands and their exit codes.

Each command imports what it needs when it runs, so that a mistake in a config is reported at once.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from raymoe import shell
from raymoe.errors import ConfigError, Problem, RaymoeError, Stopped, printable

if TYPE_CHECKING:
    from raymoe.config import Job
    from raymoe.report.results import Record

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A file, or the name of a packaged config.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a key; may be repeated.")]

Address = Annotated[
    str | None,
    typer.Option(help="Dashboard of the cluster, http://HOST:8265. Default: RAY_API_SERVER_ADDRESS, else RAY_ADDRESS."),
]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The ID of a job, as submit printed it.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Copy the results there. Default: runs/ID.")]

# Typer bundles click or depends on it, by version, and exports only this subclass of click's UsageError.
UsageError = cast(type[typer.BadParameter], typer.BadParameter.__base__)

app = typer.Typer(
    help="Expert-parallel Mixture-of-Experts work on a Ray cluster.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def run(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="A file, or a packaged config's name.")] = None,
    sets: Sets = None,
    address: Annotated[str | None, typer.Option(help="HOST:PORT of a Ray head, or auto. Default: RAY_ADDRESS.")] = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="The run directory, or a URL. Default: one in runs/.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no table.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Continue the run in DIR.")] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write trace.json: phases of all ranks, one clock.")
    ] = False,
) -> int:
    """Run a config, on a named Ray cluster or on a local Ray."""
    from raymoe.run import Request, run

    return run(Request(config, tuple(sets or ()), address, out, quiet, resume, profile))


@app.command()
def submit(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A file, or the name of a packaged job.")],
    address: Address = None,
    sets: Sets = None,
    out: Out = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the ray job submit line.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not follow the job. Print its ID.")] = False,
) -> int:
    """Submit a job to a Ray cluster, follow it and copy its results."""
    from raymoe.submit import submit

    return submit(job, sets or (), address, out, dry_run, detach)


@app.command()
def attach(
    job: JobId,
    address: Address = None,
    out: Out = None,
) -> int:
    """Follow a submitted job and copy its results. Ctrl-C leaves the job running."""
    from raymoe.submit import attach

    return attach(job, address, out)


@app.command()
def stop(job: JobId, address: Address = None) -> int:
    """Stop a submitted job."""
    from raymoe.submit import stop

    return stop(job, address)


@app.command()
def logs(job: JobId, address: Address = None) -> int:
    """Print what a submitted job has printed so far."""
    from raymoe.submit import logs

    return logs(job, address)


@app.command()
def jobs(address: Address = None) -> None:
    """List the runs on a Ray cluster."""
    from raymoe.submit import jobs

    print_result(jobs(address))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    plots: Annotated[bool, typer.Option("--plots", help="Also draw figures into plots/ of each run.")] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="PATH", help="Also write a page to PATH; in a directory, report.html."),
    ] = None,
) -> None:
    """Print how runs ended, and tables of their results. Several runs are compared with the first one."""
    import shutil

    from raymoe.report.compare import overview
    from raymoe.report.results import Record

    records = [Record.read(run) for run in runs]
    width = shutil.get_terminal_size((100, 24)).columns
    print_result(overview(records, terminal=sys.stdout.isatty(), width=width))
    if plots:
        _draw(records)
    if html is not None:
        from raymoe.report.page import write_page

        print_result(printable(f"the page is {write_page(html, records)}") + "\n")


@app.command()
def doctor(
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure the transports between the GPUs; transport auto uses the result.")
    ] = False,
) -> int:
    """Check what this machine can do, and say why not. Fails if quickstart cannot run."""
    if tune:
        return _tune()
    from contextlib import closing

    from raymoe.doctor.examine import examine

    with closing(examine()) as lines:
        for line in lines:
            print_result(f"{printable(line)}\n")
    return 0


@app.command()
def validate(
    configs: Annotated[list[str], typer.Argument(metavar="CONFIG...", help="Files, or names of packaged configs.")],
    sets: Sets = None,
) -> None:
    """Check configs and their traces, and print all problems."""
    errors = [error for config in configs if (error := _validate(config, sets)) is not None]
    if len(configs) == 1 and errors:
        raise errors[0]
    if errors:
        problems = [problem for error in errors for problem in error.problems or [_whole(error)]]
        raise ConfigError(f"{len(errors)} of {len(configs)} configs are wrong; the first: {errors[0]}", problems)


def _whole(error: ConfigError) -> Problem:
    """Make the problem of an error that lists none."""
    return Problem("", None, "", None, str(error))


def _validate(config: str, sets: list[str] | None) -> ConfigError | None:
    """Print that a config is valid, or return its error."""
    from raymoe.workload.traces import check_traces

    try:
        job = _load(config, sets)
        check_traces(job)
    except ConfigError as error:
        return error
    cases, ranks = len(job.cases()), job.world.ranks
    workloads = " and ".join(dict.fromkeys(case.job.workload for case in job.cases()))
    valid = f"is valid: {workloads} on {ranks} rank{'s' * (ranks > 1)}, {cases} case{'s' * (cases > 1)}"
    print_result(f"{printable(config)} {valid}\n")
    return None


@app.command()
def show(config: Config, sets: Sets = None) -> None:
    """Print a config with parents, settings and defaults applied."""
    from raymoe.config import to_yaml

    print_result(to_yaml(_load(config, sets).resolved()))


@app.command()
def schema(
    job: Annotated[bool, typer.Option("--job", help="The schema of the jobs that submit takes.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="All keys of configs and jobs as a page, docs/configuration.md.")
    ] = False,
) -> None:
    """Print the JSON Schema of configs, for editors."""
    import json

    from raymoe.config import job_schema
    from raymoe.config.reference import reference
    from raymoe.config.submission import submission_schema

    if markdown and job:
        raise typer.BadParameter("--markdown has the keys of configs and of jobs; leave --job out")
    if markdown:
        print_result(reference())
    else:
        print_result(json.dumps(submission_schema() if job else job_schema(), indent=2) + "\n")


@app.command()
def dashboard(
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder. Default: where Grafana reads Ray's dashboards.")
    ] = None,
) -> None:
    """Write raymoe's Grafana dashboard."""
    import json

    from raymoe.gang.dashboard import FILE, dashboard, default_folder
    from raymoe.report.directory import cannot_write, write_atomically

    folder = default_folder() if out is None else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    write_atomically(folder / FILE, json.dumps(dashboard(), indent=2) + "\n")
    print_result(printable(f"{folder / FILE}") + "\n")


def _print_version(wanted: bool) -> None:
    if wanted:
        from raymoe import __version__

        print_result(f"raymoe {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. After a failure the last line on stderr is one unwrapped sentence.

    Without `argv` it is the command of this process, whose signals and standard streams this function takes over.
    """
    if argv is not None:
        return _run(list(argv))
    shell.prepare()
    try:
        code = _run(sys.argv[1:])
        shell.ignore_stops()
    except shell.Interrupted as interrupted:  # while an error was reported
        shell.ignore_stops()
        return _ended(str(interrupted.stopped), interrupted.stopped.exit_code)
    return code


def _run(arguments: list[str]) -> int:
    try:
        code = _invoke(arguments)
        if code == 0:
            shell.check_stdout()
        return code
    except UsageError as error:
        return _ended(_usage(error), 2)
    except RaymoeError as error:
        for problem in getattr(error, "problems", ()):
            if str(problem) != str(error):
                print(printable(str(problem)), file=sys.stderr)
        return _ended(str(error), error.exit_code)
    except KeyboardInterrupt as interrupt:
        stopped = interrupt.stopped if isinstance(interrupt, shell.Interrupted) else Stopped(signal.SIGINT)
        return _ended(str(stopped), stopped.exit_code)
    except Exception as error:  # noqa: BLE001  (a bug: print its traceback, then the sentence)
        if _directory_is_gone():
            return _ended("the current directory has been deleted; change to one that exists", 2)
        print("\n".join(map(printable, traceback.format_exc().splitlines())), file=sys.stderr)
        return _ended(f"a bug in raymoe: {type(error).__name__}: {error}", 1)


def _directory_is_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def print_result(text: str) -> None:
    """Print a command's result on stdout, now. `shell.check_stdout` finds a write that failed."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _invoke(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        # Not app(), which prints errors in its own format, and ends an interrupt without a sentence.
        with command.make_context("raymoe", arguments) as context:
            return command.invoke(context) or 0
    except typer.Exit as error:
        return error.exit_code


def _tune() -> int:
    """Measure the transports of this machine in a run whose directory is deleted, and save the table for `auto`."""
    from tempfile import TemporaryDirectory

    from raymoe.doctor import tune
    from raymoe.report.results import Record
    from raymoe.run import Request, run

    gpus = tune.gpus_to_tune()
    print(f"measuring copies between {gpus} GPUs; this takes about half a minute", file=sys.stderr, flush=True)
    job = _load(tune.CONFIG, [f"world.ranks={gpus}"])
    with TemporaryDirectory(prefix="raymoe-tune-") as folder:
        # A local Ray, because a cluster could place the ranks on a machine other than the one that keeps the table.
        code = run(Request(tune.CONFIG, (f"world.ranks={gpus}",), address="local", out=folder, quiet=True))
        if code:
            return code
        lines = Record.read(Path(folder)).lines
    table = tune.table_of(lines, job)
    print_result(tune.report(tune.times_of(lines, job), table))
    print_result(printable(f"auto uses this table on every {table.gpu} that reads {table.save()}") + "\n")
    return 0


def _draw(records: Sequence[Record]) -> None:
    from raymoe.report.plots import write_plots

    for record in records:
        drawn = write_plots(record.path, record.lines, record.config)
        nothing = f"nothing to draw in {record.path}: no result has a time"
        print_result(printable(f"{len(drawn)} files in {drawn[0].parent}" if drawn else nothing) + "\n")


def _load(config: str, sets: list[str] | None) -> Job:
    from raymoe.config import load_job

    return load_job(config, sets or ())


def _usage(error: typer.BadParameter) -> str:
    """Print the usage, and return the sentence of a usage error."""
    command = "raymoe"
    if error.ctx is not None:
        print(error.ctx.get_usage(), file=sys.stderr)
        command = error.ctx.command_path
    return f"{error.format_message().rstrip('.')}; {command} --help tells more"


def _ended(sentence: str, exit_code: int) -> int:
    print(printable(" ".join(sentence.split())), file=sys.stderr, flush=True)
    return exit_code
