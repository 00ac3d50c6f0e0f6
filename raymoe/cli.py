"""The commands, and how they end. Each imports what it needs when it runs: a mistake in a config is told at once."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from raymoe.errors import CannotWrite, RaymoeError, Stopped

if TYPE_CHECKING:
    from raymoe.config import Job

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A file, or the name of a packaged config.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a key; may be repeated.")]

# Typer has click inside or beside it, depending on its version; found this way it is the right one.
UsageError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])

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
    address: Annotated[str | None, typer.Option(help="HOST:PORT of a Ray head, or auto; else RAY_ADDRESS.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run directory; else one below runs/.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no table.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with the run in DIR.")] = None,
) -> int:
    """Run a config on a Ray cluster, or on a Ray of its own where none is named."""
    from raymoe.run import Request
    from raymoe.run import run as execute

    return execute(Request(config, tuple(sets or ()), address, out, quiet, resume))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    plots: Annotated[bool, typer.Option("--plots", help="Also draw copies, into plots/ of each run.")] = False,
) -> None:
    """Print how runs ended, and one table of their results."""
    import shutil

    from raymoe.report.tables import overview

    width = shutil.get_terminal_size((100, 24)).columns
    say(overview(runs, terminal=sys.stdout.isatty(), width=width))
    if plots:
        _draw(runs)


@app.command()
def doctor(
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure the transports between these GPUs, for auto to choose by.")
    ] = False,
) -> int:
    """Tell what this machine can do, check by check, and why not; fails where quickstart cannot run."""
    if tune:
        return _tune()
    from contextlib import closing

    from raymoe.doctor.examine import examine

    with closing(examine()) as lines:
        for line in lines:
            say(f"{line}\n")
    return 0


@app.command()
def validate(config: Config, sets: Sets = None) -> None:
    """Check a config, and tell everything that is wrong with it."""
    job = _load(config, sets)
    cases = len(job.cases())
    say(f"{config} is valid: {job.workload} on {job.world.ranks} ranks, {cases} case{'s' * (cases > 1)}\n")


@app.command()
def show(config: Config, sets: Sets = None) -> None:
    """Print a config resolved: parents, settings and defaults filled in."""
    from raymoe.config import to_yaml

    say(to_yaml(_load(config, sets).resolved()))


@app.command()
def schema() -> None:
    """Print the JSON Schema of configs, for editors."""
    import json

    from raymoe.config import job_schema

    say(json.dumps(job_schema(), indent=2) + "\n")


def _say_version(asked: bool) -> None:
    if asked:
        from raymoe import __version__

        say(f"raymoe {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Say the version.", is_eager=True, callback=_say_version)
    ] = False,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and give its exit code. The last line on stderr of a failure is one sentence, unwrapped."""
    try:
        return _invoke(sys.argv[1:] if argv is None else list(argv))
    except UsageError as error:
        return _ended(_usage(error), 2)
    except RaymoeError as error:
        for problem in getattr(error, "problems", ()):
            if str(problem) != str(error):
                print(problem, file=sys.stderr)
        return _ended(str(error), error.exit_code)
    except KeyboardInterrupt:
        stopped = Stopped(signal.SIGINT)
        return _ended(str(stopped), stopped.exit_code)
    except Exception as error:  # noqa: BLE001  (a bug: its traceback is wanted, and the one sentence after it)
        traceback.print_exc()
        return _ended(f"a bug in raymoe: {type(error).__name__}: {error}", 1)


def say(text: str) -> None:
    """Print a command's result."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What could not be written is still buffered: without this, Python would try again at exit and fail anew.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # whoever closed the pipe had enough
            raise CannotWrite(f"the output cannot be written: {error.strerror}") from error


def _invoke(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        # Not app(): that would print errors in its own way, and turn an interrupt into an exit code without a line.
        with command.make_context("raymoe", arguments) as context:
            return command.invoke(context) or 0
    except typer.Exit as error:
        return error.exit_code


def _tune() -> int:
    """An ordinary run into a directory that is thrown away; its lines become the table of this machine."""
    from tempfile import TemporaryDirectory

    from raymoe.doctor import tune
    from raymoe.report.results import Record
    from raymoe.run import Request, run

    gpus = tune.gpus_to_tune()
    print(f"measuring copies between {gpus} GPUs; this takes about half a minute", file=sys.stderr, flush=True)
    job = _load(tune.CONFIG, [f"world.ranks={gpus}"])
    with TemporaryDirectory(prefix="raymoe-tune-") as folder:
        # A Ray of its own: a cluster might place the ranks on another machine than the one that keeps the table.
        code = run(Request(tune.CONFIG, (f"world.ranks={gpus}",), address="local", out=Path(folder), quiet=True))
        if code:
            return code
        lines = Record.read(Path(folder)).lines
    table = tune.table_of(lines, job)
    say(tune.report(tune.times_of(lines, job), table))
    say(f"auto goes by this on every {table.gpu} that reads {table.save()}\n")
    return 0


def _draw(runs: Sequence[Path]) -> None:
    from raymoe.report.plots import write_plots
    from raymoe.report.results import Record

    for run in runs:
        drawn = write_plots(run, Record.read(run).lines)
        found = f"{len(drawn)} files in {drawn[0].parent}" if drawn else f"nothing to draw in {run}: it has no copies"
        say(f"{found}\n")


def _load(config: str, sets: list[str] | None) -> Job:
    from raymoe.config import load_job

    return load_job(config, sets or ())


def _usage(error: typer.BadParameter) -> str:
    """A usage error's sentence, after the usage itself."""
    command = "raymoe"
    if error.ctx is not None:
        print(error.ctx.get_usage(), file=sys.stderr)
        command = error.ctx.command_path
    return f"{error.format_message().rstrip('.')}; {command} --help tells more"


def _ended(sentence: str, exit_code: int) -> int:
    print(" ".join(sentence.split()), file=sys.stderr, flush=True)
    return exit_code
