"""Checks a config's tree of entries, makes the job from it, and reports all problems together.

A job is also made again from its plain values (`job_from_resolved`), and nothing about them is taken for granted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raymoe.config.explain import explained, key_tree, report
from raymoe.config.files import Layers, find_config, layered
from raymoe.config.job import MAX_CASES, MEANINGS, Case, Job, decider_values, meaningful, size, without
from raymoe.config.rules import BrokenRule, broken_rules
from raymoe.config.sweep import absolute, read_matrix, sweepable
from raymoe.config.yaml_tree import Entry, Scalar
from raymoe.errors import ConfigError, Problem, shown


def checked(layers: Layers, name: str) -> Job:
    """Make the job from a config's layers; `name` is its name if the config gives none.

    Raises ConfigError with all problems.
    """
    check = _Check(layers)
    job = check.job(name)
    if check.problems:
        raise report(layers.file, check.problems)
    return job


class _Check:
    """Collects the problems of one config.

    A key with a wrong value takes its default and goes into `bad_keys`. Rules that read such a key report nothing.
    """

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.root = layers.root
        self.sweep = read_matrix(layers.root)
        self.problems = layers.problems + self.sweep.problems
        self.bad_keys = set(self.sweep.bad_keys)

    def job(self, name: str) -> Job:
        assert isinstance(self.root.value, dict)
        plain = {key: entry.plain() for key, entry in self.root.value.items() if key != "matrix"}
        if "workload" not in (*plain, *self.sweep.values) and self.layers.complete:
            self.bad_keys.add("workload")
            known = "one of p2p, exchange, overlap, pointwise, products or layer"
            self.problems.append(Problem(self.layers.file, None, "workload", None, "required", known))
        plain = self._typed({"name": name, "workload": "layer"}, plain)
        plain["matrix"] = self.sweep.values
        self.problems += self._without_effect(plain)
        job = Job.model_validate(meaningful(plain))
        if self.layers.complete:
            self.problems += self._broken_rules(job)
        return job

    def _typed(self, needed: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
        """Give every key of a job its checked value. A missing or wrong key takes its default."""
        try:
            job = Job.model_validate(needed | plain)
        except ValidationError as error:
            for path, problem in explained(self.root, error.errors(), key_tree()):
                self.problems.append(problem)
                self.bad_keys.add(".".join(path))
                plain = without(plain, path)
            job = Job.model_validate(needed | plain)
        typed = job.model_dump(exclude={"matrix"})
        if (file := self.root.find(("routing", "file"))) and typed["routing"]["file"]:
            typed["routing"]["file"] = absolute(file, typed["routing"]["file"])
        return typed

    def _without_effect(self, plain: dict[str, Any]) -> Iterator[Problem]:
        """Find strict keys that mean nothing in any case. A key is accepted if a later layer gave its decider."""
        for meaning in MEANINGS:
            entry, decider = self._entry(meaning.key), self._entry(meaning.decider)
            values = decider_values(plain, meaning)
            wrong = self._is_bad(meaning.key) or self._is_bad(meaning.decider)
            if not meaning.strict or entry is None or wrong or set(values) & set(meaning.values):
                continue
            if decider is None or decider.source.level <= entry.source.level:
                listed = ", ".join("left out" if value is None else str(value) for value in values)
                reason = f"means nothing with {meaning.decider} {listed}"
                yield entry.problem(meaning.key, reason, f"it belongs to {', '.join(meaning.values)}")

    def _broken_rules(self, job: Job) -> Iterator[Problem]:
        """Find the rules that any case breaks. Each rule is reported once for each value that broke it."""
        cases = job.cases()
        reported: set[tuple[str, int]] = set()
        first_case: dict[str, str] = {}  # resolved job -> the first case that has it
        for case in cases:
            for wrong in broken_rules(case.job):
                if any(map(self._is_bad, wrong.rule.keys)):
                    continue
                key, entry = self._blamed(wrong, case)
                if (wrong.rule.keys[0], id(entry)) not in reported:
                    reported.add((wrong.rule.keys[0], id(entry)))
                    yield self._problem_of(wrong, case, key, entry)
            yield from self._missing_trace(case)
            first = first_case.setdefault(repr(case.job.resolved()), case.name)
            if first != case.name and not self.bad_keys and (matrix := self.root.child("matrix")):
                yield matrix.problem("matrix", f"the cases {first} and {case.name} are the same")
                break

    def _is_bad(self, key: str) -> bool:
        """Whether a key is bad, or is inside a bad section."""
        return any(f"{key}.".startswith(f"{bad}.") for bad in self.bad_keys)

    def _blamed(self, wrong: BrokenRule, case: Case) -> tuple[str, Entry | None]:
        """Choose the key to report: of the keys that the rule reads, the one that was given last."""
        entries = [(key, self.sweep.entry(key, case.job) or self._entry(key)) for key in wrong.rule.keys]
        ranked = [
            (entry.source.level, key in self.sweep.values, -i, key, entry)
            for i, (key, entry) in enumerate(entries)
            if entry
        ]
        return max(ranked)[3:] if ranked else (wrong.rule.keys[0], None)

    def _problem_of(self, wrong: BrokenRule, case: Case, key: str, entry: Entry | None) -> Problem:
        swept = any(name in self.sweep.values for name in wrong.rule.keys)
        reason = f"{wrong.reason} (case {case.name})" if swept else wrong.reason
        if entry is None:
            return Problem(self.layers.file, None, key, None, reason, wrong.hint)
        return entry.problem(f"matrix.{key}" if key in self.sweep.values else key, reason, wrong.hint)

    def _missing_trace(self, case: Case) -> Iterator[Problem]:
        file = case.job.routing.file
        entry = self.sweep.entry("routing.file", case.job) or self.root.find(("routing", "file"))
        if file and entry and case.job.routing.kind == "trace" and not Path(file).is_file():
            yield entry.problem("routing.file", "no such file", entry.source.quoting(f"looked for {file}", ""))

    def _entry(self, key: str) -> Entry | None:
        """Find the entry that gives a key: in the matrix first, then under its own name, then as a plain value that
        stands for its section."""
        matrix, path = self.root.child("matrix"), key.split(".")
        entry = (matrix.child(key) if matrix else None) or self.root.find(path)
        if entry is None and (section := self.root.find(path[:-1])) and not isinstance(section.value, dict):
            return section
        return entry


def load_job(config: str, sets: Sequence[str] = ()) -> Job:
    """Load the job in a file, or in the packaged config of that name, and apply `a.b=c` settings.

    Raises ConfigError with all problems. A job without a name takes the name of its file.
    """
    path = find_config(config)
    try:
        layers = layered(path, sets)
    except ConfigError as error:
        raise report(error.problems[0].where, error.problems) from error
    return checked(layers, job_name(path))


def job_name(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem).strip("-._")[:64] or "job"


# A job from its plain values.

MOST_NAMED = 10  # problems that the error names


def job_from_resolved(resolved: dict[str, Any]) -> Job:
    """Make a job again from the plain values of `Job.resolved`, which may come from another process.

    Raises ConfigError with the problems of values that `Job.resolved` would not give.
    """
    try:
        job = Job.model_validate(resolved)
        problems = _matrix_problems(job.matrix)
        problems = problems or [str(wrong) for case in job.cases() for wrong in broken_rules(case.job)]
    except ValidationError as error:
        problems = [f"{shown('.'.join(map(str, wrong['loc'])))}: {wrong['msg']}" for wrong in error.errors()]
    if problems:
        more = f"; and {len(problems) - MOST_NAMED} more" if len(problems) > MOST_NAMED else ""
        raise ConfigError(f"not a resolved job: {'; '.join(problems[:MOST_NAMED])}{more}")
    return job


def _matrix_problems(matrix: Mapping[str, Sequence[Scalar]]) -> list[str]:
    """Find the problems of a matrix that `read_matrix` has not checked, before its cases are made."""
    known = sweepable(key_tree())
    problems = [f"matrix.{shown(key)}: no such key" for key in matrix if key not in known]
    if (cases := size(matrix)) > MAX_CASES:
        problems.append(f"matrix: {cases} cases, at most {MAX_CASES} are run")
    return problems
