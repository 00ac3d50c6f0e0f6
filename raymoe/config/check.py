"""From a tree of entries to a job: every check there is, all problems together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raymoe.config.explain import explained, key_tree, report
from raymoe.config.files import Layers, find_config, layered
from raymoe.config.job import MEANINGS, Case, Job, deciding, meaningful, without
from raymoe.config.rules import Broken, broken
from raymoe.config.sweep import absolute, read_matrix
from raymoe.config.yaml_tree import Entry
from raymoe.errors import ConfigError, Problem


def checked(layers: Layers, name: str) -> Job:
    """The job that a tree says, called `name` unless it says so itself; ConfigError with all problems of it."""
    check = _Check(layers)
    job = check.job(name)
    if check.problems:
        raise report(layers.file, check.problems)
    return job


class _Check:
    """A key with a problem of its own goes on as if it had not been given, and into `bad`: no rule looks at it."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.root = layers.root
        self.sweep = read_matrix(layers.root)
        self.problems = layers.problems + self.sweep.problems
        self.bad = set(self.sweep.bad)

    def job(self, name: str) -> Job:
        assert isinstance(self.root.value, dict)
        plain = {key: entry.plain() for key, entry in self.root.value.items() if key != "matrix"}
        if "workload" not in (*plain, *self.sweep.values) and self.layers.whole:
            self.bad.add("workload")
            known = "one of p2p, exchange, overlap or layer"
            self.problems.append(Problem(self.layers.file, None, "workload", None, "required", known))
        plain = self._typed({"name": name, "workload": "layer"}, plain)
        plain["matrix"] = self.sweep.values
        self.problems += self._meaningless(plain)
        job = Job.model_validate(meaningful(plain))
        if self.layers.whole:
            self.problems += self._impossible(job)
        return job

    def _typed(self, needed: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
        """All keys of a job with their values, those that were given wrong or not at all with their defaults."""
        try:
            job = Job.model_validate(needed | plain)
        except ValidationError as error:
            for path, problem in explained(self.root, error.errors(), key_tree()):
                self.problems.append(problem)
                self.bad.add(".".join(path))
                plain = without(plain, path)
            job = Job.model_validate(needed | plain)
        typed = job.model_dump(exclude={"matrix"})
        if (file := self.root.find(("routing", "file"))) and typed["routing"]["file"]:
            typed["routing"]["file"] = absolute(file, typed["routing"]["file"])
        return typed

    def _meaningless(self, plain: dict[str, Any]) -> Iterator[Problem]:
        """Keys given where they mean nothing; not those of a parent whose meaning a later layer took away."""
        for meaning in MEANINGS:
            entry, decider = self._entry(meaning.key), self._entry(meaning.decider)
            values = deciding(plain, meaning)
            in_doubt = {meaning.key, meaning.decider} & self.bad
            if not meaning.strict or entry is None or in_doubt or set(values) & set(meaning.values):
                continue
            if decider is None or decider.source.level <= entry.source.level:
                found = ", ".join("left out" if value is None else str(value) for value in values)
                reason = f"means nothing with {meaning.decider} {found}"
                yield entry.problem(meaning.key, reason, f"it belongs to {', '.join(meaning.values)}")

    def _impossible(self, job: Job) -> Iterator[Problem]:
        """Rules broken between keys, over all cases, each once for the value that it is put down to."""
        cases = job.cases()
        told: set[tuple[str, int]] = set()
        same: dict[str, str] = {}
        for case in cases:
            for wrong in broken(case.job):
                key, entry = self._blamed(wrong, case)
                if not self._in_doubt(wrong) and (wrong.rule.keys[0], id(entry)) not in told:
                    told.add((wrong.rule.keys[0], id(entry)))
                    yield self._told(wrong, case, key, entry)
            yield from self._no_trace(case)
            first = same.setdefault(repr(case.job.resolved()), case.name)
            if first != case.name and not self.bad and (matrix := self.root.child("matrix")):
                yield matrix.problem("matrix", f"the cases {first} and {case.name} are the same")
                break

    def _in_doubt(self, wrong: Broken) -> bool:
        """Whether a key that the rule reads, or a section around it, has a problem of its own."""
        return any(f"{key}.".startswith(f"{bad}.") for key in wrong.rule.keys for bad in self.bad)

    def _blamed(self, wrong: Broken, case: Case) -> tuple[str, Entry | None]:
        """The key that was given last of those that a rule reads: it is the one that made the job impossible."""
        given = [(key, self.sweep.place(key, case.job) or self._entry(key)) for key in wrong.rule.keys]
        ranked = [
            (entry.source.level, key in self.sweep.values, -i, key, entry)
            for i, (key, entry) in enumerate(given)
            if entry
        ]
        return max(ranked)[3:] if ranked else (wrong.rule.keys[0], None)

    def _told(self, wrong: Broken, case: Case, key: str, entry: Entry | None) -> Problem:
        swept = any(read in self.sweep.values for read in wrong.rule.keys)
        reason = f"{wrong.reason} (case {case.name})" if swept else wrong.reason
        if entry is None:
            return Problem(self.layers.file, None, key, None, reason, wrong.hint)
        return entry.problem(f"matrix.{key}" if key in self.sweep.values else key, reason, wrong.hint)

    def _no_trace(self, case: Case) -> Iterator[Problem]:
        file = case.job.routing.file
        entry = self.sweep.place("routing.file", case.job) or self.root.find(("routing", "file"))
        if file and entry and case.job.routing.kind == "trace" and not Path(file).is_file():
            yield entry.problem("routing.file", "no such file", f"looked for {file}")

    def _entry(self, key: str) -> Entry | None:
        """Where a key was given: in the matrix, which wins, by itself, or as a value that stands for its section."""
        matrix, path = self.root.child("matrix"), key.split(".")
        entry = (matrix.child(key) if matrix else None) or self.root.find(path)
        if entry is None and (whole := self.root.find(path[:-1])) and not isinstance(whole.value, dict):
            return whole
        return entry


# A job from a config and settings.


def load_job(config: str, sets: Sequence[str] = ()) -> Job:
    """The job in a file, or in a packaged config of that name, with `a.b=c` settings over it.

    ConfigError tells every problem at once. A job is called after its file unless it has a name.
    """
    path = find_config(config)
    try:
        layers = layered(path, sets)
    except ConfigError as error:
        raise report(error.problems[0].where, error.problems) from error
    return checked(layers, _name(path))


def _name(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem).strip("-._")[:64] or "job"
