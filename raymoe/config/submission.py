"""Reads a job of `jobs/`: a config or a program, and where and how a Ray cluster runs it.

The file is checked together with its config or program, and all problems are reported at once. Nothing here contacts a
cluster.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from raymoe import __version__
from raymoe.config.check import checked, job_name
from raymoe.config.explain import explained, key_tree, report
from raymoe.config.files import find_config, layered, read_config, refused, shown_path
from raymoe.config.job import Job, without
from raymoe.config.program import ProgramSection, Text, Texts, entrypoint, normal, wrong_program
from raymoe.config.sections import Section, Size
from raymoe.config.yaml_tree import Entry, Source, compose, resolve
from raymoe.errors import ConfigError, Problem, shown
from raymoe.packaged import packaged_config

# The keys of a job.

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")


def address_problem(address: str) -> tuple[str, str] | None:
    """Say what is wrong with a cluster's address, and what to write; None if nothing is.

    >>> address_problem("http://head:8265"), address_problem("head:6379"), address_problem("auto")
    (None, None, None)
    >>> address_problem("ray://head:10001")[0]
    'the Jobs API is not at a Ray Client address'
    """
    hint = "write http://HOST:8265, the address of the cluster's dashboard"
    if address.startswith("ray://"):
        return "the Jobs API is not at a Ray Client address", hint
    if re.fullmatch(r"https?://[^\s/]+(/\S*)?", address) or address == "auto" or _HOST_PORT.fullmatch(address):
        return None
    return "not the address of a cluster", hint


def _address(value: Any) -> Any:
    if isinstance(value, str) and (wrong := address_problem(value)):
        raise PydanticCustomError("address", "{why}", {"why": ", ".join(wrong)})
    return value


def _out(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value.startswith(("/", "~/")) and not _URL.match(value):
        why = "is relative, but Ray deletes the working directory of a job, write an absolute path, ~/… or a URL"
        raise PydanticCustomError("out", "{why}", {"why": why})
    if re.search("[{}]", value.replace("{run}", "")):
        raise PydanticCustomError("out", "only {run} is replaced, by the name of the run")
    return value


def _packages(value: Any) -> Any:
    listed = isinstance(value, list) and all(isinstance(package, str) for package in value)
    if listed or (isinstance(value, str) and value) or isinstance(value, dict):
        return value
    raise PydanticCustomError("packages", "a list of packages, the path of a file of them, or a mapping is wanted")


def _text_or_mapping(value: Any) -> Any:
    if isinstance(value, str | dict):
        return value
    raise PydanticCustomError("options", "text or a mapping is wanted")


_TEXT_OR_MAPPING: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}

Packages = Annotated[
    Any,
    BeforeValidator(_packages),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}, {"type": "object"}]}),
]


class RuntimeEnvSection(Section):
    """Files, packages and variables of the job's processes, as Ray's documentation explains."""

    working_dir: Text | None = Field(default=None, examples=["."])
    """Directory to upload, relative to this file, in which the job runs; or the URL of a zip file."""
    excludes: Texts = Field(default=(), examples=[["*.ckpt"]])
    """Files not to upload, besides .git, .venv, runs, and those of .gitignore and .rayignore."""
    py_modules: Texts = Field(default=(), examples=[["../my_package"]])
    """Packages to upload: directories or wheels, relative to this file, or URLs."""
    env_vars: dict[str, str] = Field(default_factory=dict, examples=[{"NCCL_DEBUG": "WARN"}])
    """Environment of the run and its ranks."""
    pip: Packages | None = Field(default=None, examples=[["numpy>=2"]])
    """Packages to install by pip. For torch an image is faster."""
    uv: Packages | None = Field(default=None, examples=["requirements.txt"])
    """Packages to install by uv."""
    conda: Packages | None = Field(default=None, examples=["raymoe-env"])
    """Conda environment: its name, file or content."""
    image_uri: Text | None = Field(default=None, examples=["registry.example/raymoe:0.1"])
    """Container image of the job."""
    py_executable: Text | None = Field(default=None, examples=["uv run"])
    """Command that starts Python for the ranks."""
    worker_process_setup_hook: Text | None = Field(default=None, examples=["my_package.setup"])
    """Function that each rank calls at its start."""
    nsight: Annotated[Any, BeforeValidator(_text_or_mapping), WithJsonSchema(_TEXT_OR_MAPPING)] = Field(
        default=None, examples=["default"]
    )
    """Options of Nsight Systems, or default."""
    config: dict[str, Any] = Field(default_factory=dict, examples=[{"setup_timeout_seconds": 600}])
    """Options of Ray for the set-up of these."""


class EntrypointSection(Section):
    """Resources of the driver. Without any it runs on the head node."""

    cpus: float = Field(default=0.0, ge=0, le=1024, examples=[1])
    """CPUs of the driver."""
    gpus: float = Field(default=0.0, ge=0, le=1024, examples=[1])
    """GPUs of the driver, which uses none."""
    memory: Size | None = Field(default=None, examples=["2GiB"])
    """Memory of the driver."""
    resources: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict, examples=[{"driver_slot": 1}])
    """Custom resources of the driver."""
    labels: dict[str, str] = Field(default_factory=dict, examples=[{"ray.io/node-group": "cpu"}])
    """Labels of the driver's node."""


class Submission(Section):
    config: Text | None = Field(default=None, examples=["quickstart"])
    """A packaged config, or a file in runtime_env.working_dir, relative to this file. Required without a program."""
    program: ProgramSection = ProgramSection()
    set: dict[str, Any] = Field(default_factory=dict, examples=[{"world.ranks": 8, "matrix.shape.tokens": [128, 512]}])
    """Keys of the config to change, before `raymoe submit --set` does."""
    address: Annotated[str | None, BeforeValidator(_address)] = Field(default=None, examples=["http://head:8265"])
    """http://HOST:8265 (the dashboard), HOST:6379, or auto. Default: RAY_API_SERVER_ADDRESS, else RAY_ADDRESS."""
    runtime_env: RuntimeEnvSection = RuntimeEnvSection()
    entrypoint: EntrypointSection = EntrypointSection()
    metadata: dict[str, str] = Field(default_factory=dict, examples=[{"team": "mine"}])
    """Texts that Ray's dashboard shows with the job."""
    out: Annotated[str | None, BeforeValidator(_out)] = Field(default=None, examples=["/shared/results/{run}"])
    """Run directory on the cluster: an absolute path, ~/… or, for a config, a URL such as s3://bucket/{run}. {run}
    becomes the run's name. Default: ~/raymoe_runs/{run} on the driver's node."""


def submission_schema() -> dict[str, Any]:
    """Make the JSON Schema of a job, for editors."""
    schema = Submission.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "raymoe submission",
        "type": "object",
        "properties": schema["properties"],
        "oneOf": [{"required": ["config"]}, {"required": ["program"]}],
        "dependentRequired": {"set": ["config"]},
        "additionalProperties": False,
        "$defs": schema["$defs"],
    }


# From a file to the request that a cluster gets.

ALWAYS_EXCLUDED = ("/.git", "/.venv", "/runs")
STOP_WAIT_S = "10"
"""Seconds from SIGTERM to SIGKILL when Ray stops a job. In Ray's own 3 s a run may not have written its summary."""

DEFAULT_OUT = "~/raymoe_runs/{run}"


@dataclass(frozen=True)
class JobRequest:
    """A job, as Ray's Jobs API takes it. Paths of this machine are absolute."""

    entrypoint: tuple[str, ...]
    runtime_env: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    resources: EntrypointSection = field(default_factory=EntrypointSection)
    address: str | None = None
    """Address of the cluster; None if the file names none."""
    name: str = "job"
    """The name that the ID of the job begins with."""


def load_submission(name: str, sets: Sequence[str] = ()) -> tuple[Job | None, JobRequest]:
    """Load the job in a file, or the packaged job of that name. Return the request for Ray, and the job of its config.

    That is None if it runs a program. `sets` change keys of the config. Raises ConfigError with all problems.
    """
    path = find_config(name, folder="jobs")
    source = Source(shown_path(path), path.absolute().parent, 0)
    root, problems = compose(read_config(path, source.name), source)
    if root is None or root.value is None:
        raise refused(Problem(source.name, None, "", None, "is empty, a job needs at least a config or a program"))
    if not isinstance(root.value, dict):
        raise refused(root.problem("", "a mapping is wanted at the top"))
    check = _Check(root, source, problems)
    submission = check.submission()
    if check.runs_program:
        config = None
        check.program(submission, sets)
    else:
        config = check.config(submission, sets)
    check.paths(submission.runtime_env, config)
    if check.problems:
        raise report(source.name, check.problems)
    if config is None:
        return None, _program_request(submission, source.folder)
    return config.job, _request(submission, config, source.folder)


@dataclass(frozen=True)
class _Config:
    """The config of a submission, and the files that must be uploaded for it. The cluster has the packaged configs."""

    job: Job
    name: str
    path: Path
    sets: tuple[str, ...]
    files: tuple[Path, ...] = ()


@dataclass
class _Check:
    """Collects the problems of one job and of its config."""

    root: Entry
    source: Source
    problems: list[Problem]
    bad_keys: set[str] = field(default_factory=set)

    def submission(self) -> Submission:
        """Check the keys of the job. A missing or wrong key takes its default."""
        assert isinstance(self.root.value, dict)
        plain: dict[str, Any] = {key: entry.plain() for key, entry in self.root.value.items()}
        if "config" not in plain and "program" not in plain:
            self._wrong("config", "required", "the name of a packaged config, or a file; a program takes its place")
        if "config" in plain and "program" in plain:
            self._wrong("program", "a job has a config or a program, and this one has both", "leave one of them out")
        try:
            submission = Submission.model_validate(plain)
        except ValidationError as error:
            for path, problem in explained(self.root, error.errors(), key_tree(Submission)):
                self.problems.append(problem)
                self.bad_keys.add(path[0])
                plain = without(plain, path)
            submission = Submission.model_validate(plain)
        for key in submission.metadata:
            if key.startswith("raymoe_"):
                self._wrong(f"metadata.{key}", "raymoe sets the keys that begin with raymoe_", "use another name")
        return submission

    @property
    def runs_program(self) -> bool:
        """Whether the job names a program, and no config."""
        assert isinstance(self.root.value, dict)
        return "program" in self.root.value and "config" not in self.root.value

    def program(self, submission: Submission, sets: Sequence[str]) -> None:
        """Check the program, and that no key is there which only a config has."""
        if "set" in submission.model_fields_set:
            self._wrong("set", "changes keys of a config, and this job runs a program", "use program.arguments")
        reason = "changes keys of a config, and this job runs a program"
        self.problems += [Problem(f"--set {shown(text)}", None, "", None, reason) for text in sets]
        if submission.out is not None and _URL.match(submission.out):
            self._wrong("out", "is a URL, and a program writes into a directory", "write an absolute path or ~/…")
        if self.bad_keys & {"program", "runtime_env"}:
            return
        folder, env = self.source.folder, submission.runtime_env
        modules = [normal(folder / module) for module in env.py_modules if not _URL.match(module)]
        for key, why, hint in wrong_program(submission.program, folder, working_dir(env, folder), modules):
            self._wrong(key, why, hint)

    def config(self, submission: Submission, sets: Sequence[str]) -> _Config | None:
        """Load the config with the settings of the job, then those of the command line."""
        folder, name = self.source.folder, submission.config
        if "config" in self.bad_keys or name is None:
            return None
        try:
            path = find_config(name, beside=folder)
        except ConfigError as error:
            self._wrong("config", error.problems[0].reason, error.problems[0].hint)
            return None
        own = {} if "set" in self.bad_keys else dict(self._own_sets())
        every = (*own, *sets)
        try:
            # A job may be somebody else's: errors repeat text of configs in its folder and in those beside it only.
            layers = layered(path, every, folder.absolute().parent)
            job = checked(layers, job_name(path))
        except ConfigError as error:
            by_name = {f"--set {shown(text)}": key for text, key in own.items()}
            self.problems += [self._moved(problem, by_name) for problem in error.problems]
            return None
        files = () if path == packaged_config(name) else layers.paths
        traces = sorted({Path(file) for case in job.cases() if (file := case.job.routing.file)})
        return _Config(job, name, path, every, (*files, *traces))

    def paths(self, env: RuntimeEnvSection, config: _Config | None) -> None:
        """Check that what is uploaded is there, and that it holds every file that the config needs."""
        if "runtime_env" in self.bad_keys:
            return
        for index, module in enumerate(env.py_modules):
            if not _URL.match(module) and not (self.source.folder / module).exists():
                self._wrong(f"runtime_env.py_modules.{index}", "no such file or directory")
        needed = config.files if config else ()
        directory = working_dir(env, self.source.folder)
        if directory is None and needed:
            why = "is a URL" if env.working_dir else "is not given"
            reason = f"the cluster has no {shown_path(needed[0])}, since runtime_env.working_dir {why}"
            self._wrong("config", reason, "set runtime_env.working_dir to a directory that holds it")
        elif directory is not None and not directory.is_dir():
            self._wrong("runtime_env.working_dir", "no such directory", f"looked for {shown_path(directory)}")
        elif directory is not None:
            for file in needed:
                if not normal(file).is_relative_to(directory):
                    reason = f"does not hold {shown_path(file)}, which the config needs"
                    self._wrong("runtime_env.working_dir", reason, "name a directory above both")

    def _own_sets(self) -> Iterator[tuple[str, str]]:
        """Yield the job's settings of the config as `--set` takes them, each with its key in the job."""
        entry = self.root.child("set")
        for path, value in entry.leaves() if entry else ():
            dotted = ".".join(path)
            yield f"{dotted}={self._written(dotted, value)}", f"set.{dotted}"

    def _written(self, key: str, entry: Entry) -> str:
        """Write the value of a setting. A trace's path is relative to the job; `--set` takes it as relative to here."""
        value = entry.plain()
        moved = _with_traces(key, value, lambda file: str(self.source.folder / file))
        if moved != value:
            return _as_yaml(moved)
        return entry.text if entry.text is not None and not isinstance(value, str) else _as_yaml(value)

    def _moved(self, problem: Problem, by_name: dict[str, str]) -> Problem:
        """Give a problem of a setting the place of the setting in the job."""
        if (key := by_name.get(problem.where)) is None:
            return problem
        entry = self._entry(key)
        # `matrix.shape.tokens` is one key of a config, and so is not found below `set` part by part.
        return Problem(
            self.source.name, entry.line if entry else None, key, problem.value, problem.reason, problem.hint
        )

    def _entry(self, key: str) -> Entry | None:
        section, _, rest = key.partition(".")
        entry = self.root.child(section)
        for candidate, leaf in entry.leaves() if entry else ():
            if ".".join(candidate) == rest:
                return leaf
        return self.root.find(key.split("."))

    def _wrong(self, key: str, reason: str, hint: str | None = None) -> None:
        entry = self._entry(key)
        self.bad_keys.add(key.partition(".")[0])
        wrong = entry.problem(key, reason, hint) if entry else Problem(self.source.name, None, key, None, reason, hint)
        self.problems.append(wrong)


_PLAIN = re.compile(r"[A-Za-z0-9_./+-]+")


def working_dir(env: RuntimeEnvSection, folder: Path) -> Path | None:
    """Return the directory to upload; None if there is none, or a URL."""
    if env.working_dir is None or _URL.match(env.working_dir):
        return None
    return normal(folder / env.working_dir)


def _program_request(submission: Submission, folder: Path) -> JobRequest:
    program, env = submission.program, submission.runtime_env
    name = job_name(Path(f"{program.module}.py" if program.file is None else program.file))
    words = entrypoint(program, folder, working_dir(env, folder))
    return _submitted(submission, words, {"raymoe_program": program.called}, folder, name)


def _request(submission: Submission, config: _Config, folder: Path) -> JobRequest:
    directory = working_dir(submission.runtime_env, folder)
    file = config.name if config.path not in config.files else os.path.relpath(normal(config.path), directory)
    words = ["python", "-m", "raymoe", "run", file]
    for text in config.sets:
        words += ["--set", _on_the_cluster(text, directory)]
    words += ["--out", submission.out] if submission.out else []
    return _submitted(submission, tuple(words), {"raymoe_config": config.name}, folder, config.job.name)


def _submitted(
    submission: Submission, words: tuple[str, ...], what: dict[str, str], folder: Path, name: str
) -> JobRequest:
    """Make the request of a command. `what` is the key of its metadata that tells a config from a program."""
    own = {"raymoe_version": __version__, **what}
    own |= {"raymoe_out": submission.out} if submission.out else {}
    metadata = {"job_name": name} | submission.metadata | own
    env = _runtime_env(submission.runtime_env, folder)
    return JobRequest(words, env, metadata, submission.entrypoint, submission.address, name)


def _on_the_cluster(text: str, directory: Path | None) -> str:
    """Make the path of a trace in a setting relative to the directory that is uploaded."""
    key, _, written = text.partition("=")
    read, _ = compose(written, Source("--set", Path.cwd(), 0))
    if read is None or directory is None:
        return text
    value = read.plain()
    moved = _with_traces(key, value, lambda file: os.path.relpath(normal(Path(file)), directory))
    return text if moved == value else f"{key}={_as_yaml(moved)}"


def _with_traces(key: str, value: object, change: Callable[[str], str]) -> object:
    """Change the paths of traces in the value of a setting, which may be a whole section.

    >>> _with_traces("routing", {"kind": "trace", "file": "a.npy"}, str.upper)
    {'kind': 'trace', 'file': 'A.NPY'}
    >>> _with_traces("matrix.routing.file", ["a.npy", "b.npy"], str.upper), _with_traces("name", "a.npy", str.upper)
    (['A.NPY', 'B.NPY'], 'a.npy')
    """
    if isinstance(value, dict):
        return {name: _with_traces(f"{key}.{name}", item, change) for name, item in value.items()}
    if key.removeprefix("matrix.") != "routing.file":
        return value
    if isinstance(value, list):
        return [change(item) if isinstance(item, str) else item for item in value]
    return change(value) if isinstance(value, str) else value


def _as_yaml(value: object) -> str:
    """Write a value on one line, text without quotes where YAML reads it as this very text."""
    if isinstance(value, str) and resolve(value) == value and _PLAIN.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def _runtime_env(env: RuntimeEnvSection, folder: Path) -> dict[str, Any]:
    """Return the section as Ray takes it: paths are absolute, and what is never uploaded is excluded."""
    plain = env.model_dump(mode="json", exclude_defaults=True)
    directory = working_dir(env, folder)
    if directory is not None:
        plain["working_dir"] = str(directory)
        plain["excludes"] = list(dict.fromkeys((*ALWAYS_EXCLUDED, *env.excludes)))
    if env.py_modules:
        plain["py_modules"] = [
            module if _URL.match(module) else str(normal(folder / module)) for module in env.py_modules
        ]
    for key in ("pip", "uv", "conda"):
        value = plain.get(key)
        if isinstance(value, str) and (folder / value).is_file():
            plain[key] = str(normal(folder / value))
    plain["env_vars"] = {"RAY_JOB_STOP_WAIT_TIME_S": STOP_WAIT_S, **env.env_vars}
    return plain
