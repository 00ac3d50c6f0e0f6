"""Reads the matrix of a config: looks up its keys, and checks each value as the key itself would be checked."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from raymoe.config.explain import KeyTree, explained, key_tree, leaves, nearest
from raymoe.config.files import SET_LEVEL
from raymoe.config.job import MAX_CASES, Job, find, size
from raymoe.config.yaml_tree import Entry, Scalar
from raymoe.errors import Problem


def absolute(entry: Entry, file: str) -> str:
    """Make a trace's path absolute; in the config it is relative to the file that names it.

    >>> from pathlib import Path
    >>> from raymoe.config.yaml_tree import Source
    >>> absolute(Entry("ids.npy", Source("x.yaml", Path("/jobs"), 0)), "ids.npy")
    '/jobs/ids.npy'
    """
    return os.path.normpath(entry.source.folder / file)


LISTS = ("p2p.transports", "p2p.bytes", "p2p.pairs")
"""Keys whose value is a list already."""


@dataclass
class Sweep:
    """The matrix: `values` has its valid values, `entries` where these were written, `bad_keys` the keys in error."""

    values: dict[str, list[Scalar]] = field(default_factory=dict)
    entries: dict[str, list[Entry]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    bad_keys: set[str] = field(default_factory=set)

    def entry(self, key: str, job: Job) -> Entry | None:
        """Find the entry that gave a case's job its value for a key of the matrix."""
        if key not in self.values:
            return None
        value = find(job.model_dump(), key)
        return self.entries[key][self.values[key].index(value)] if value in self.values[key] else None


def read_matrix(root: Entry) -> Sweep:
    """Read the matrix of a config's tree, with all its problems."""
    sweep = Sweep()
    entry = root.child("matrix")
    if entry is None:
        return sweep
    if not isinstance(entry.value, dict):
        sweep.problems.append(entry.problem("matrix", "a mapping is wanted, from keys to lists of their values"))
        return sweep
    for key, values in entry.value.items():
        before = len(sweep.problems)
        if wrong := _key_problem(key, values):
            sweep.problems.append(wrong)
        else:
            _read_values(sweep, key, values)
            sweep.problems += _set_twice(root, key)
        if len(sweep.problems) > before:
            sweep.bad_keys.add(key)
    if (cases := size(sweep.values)) > MAX_CASES:
        sweep.problems.append(entry.problem("matrix", f"{cases} cases, at most {MAX_CASES} are run"))
        sweep.bad_keys |= set(sweep.values)
        sweep.values.clear()
    return sweep


def _key_problem(key: str, values: Entry) -> Problem | None:
    def wrong(reason: str, hint: str) -> Problem:
        return values.problem(f"matrix.{key}", reason, hint)

    if key.partition(".")[0] == "world":
        return wrong("a matrix cannot vary world, since its cases run in one gang", "start a run for each value")
    if key in LISTS:
        return wrong("a matrix cannot vary this key, since it takes a list itself", f"list the values in {key}")
    if key not in (choices := sweepable(key_tree())):
        by_leaf = {choice.rpartition(".")[2]: choice for choice in choices}
        leaf = nearest(key.rpartition(".")[2], by_leaf)
        near = by_leaf[leaf] if leaf else nearest(key, choices)
        return wrong(
            "no such key", f"did you mean '{near}'?" if near else "a dotted key such as shape.tokens is wanted"
        )
    if not isinstance(values.value, list) or not values.value:
        return wrong("a list of values is wanted", f"as in {key}: [first, second]")
    return None


def sweepable(tree: KeyTree) -> list[str]:
    """List the keys that a matrix may vary: those with one value, without world, which all cases share."""
    return [key for key in leaves(tree) if key not in (*LISTS, "name", "matrix") and not key.startswith("world.")]


def _read_values(sweep: Sweep, key: str, values: Entry) -> None:
    assert isinstance(values.value, list)
    first: dict[str, tuple[Scalar, Entry]] = {}
    for item in values.value:
        if isinstance(item.value, dict | list) or item.value is None:
            sweep.problems.append(item.problem(f"matrix.{key}", "one value is wanted"))
            continue
        value, wrong = _typed(key, item)
        sweep.problems += wrong
        if value is not None and repr(value) in first:
            sweep.problems.append(item.problem(f"matrix.{key}", "the same value again"))
        elif value is not None:
            first[repr(value)] = value, item
    if first:
        sweep.values[key] = [value for value, _ in first.values()]
        sweep.entries[key] = [item for _, item in first.values()]


def _typed(key: str, item: Entry) -> tuple[Scalar | None, list[Problem]]:
    """Check an item of the matrix as a value of its key, and convert it."""
    tree = item
    for part in reversed(key.split(".")):
        tree = Entry({part: tree}, item.source)
    plain = tree.plain()
    assert isinstance(plain, dict)
    try:
        job = Job.model_validate({"name": "matrix", "workload": "layer", **plain})
    except ValidationError as error:
        problems = explained(tree, error.errors(), key_tree())
        return None, [replace(problem, key=f"matrix.{key}") for _, problem in problems]
    value: Any = find(job.model_dump(), key)
    return absolute(item, value) if key == "routing.file" else value, []


def _set_twice(root: Entry, key: str) -> list[Problem]:
    """Find each --set on a key of the matrix: it would have no effect."""
    path = tuple(key.split("."))
    return [
        entry.problem(key, f"the matrix already varies {key}", f"use --set matrix.{key}=[...] instead")
        for leaf, entry in root.leaves()
        if entry.source.level == SET_LEVEL and leaf[: len(path)] == path[: len(leaf)]
    ]
