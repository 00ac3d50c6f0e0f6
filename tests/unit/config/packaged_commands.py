"""The `raymoe run` commands in the comments at the top of packaged configs."""

from __future__ import annotations

import shlex

from raymoe.packaged import packaged_config, packaged_names


def commands(name: str) -> list[list[str]]:
    """Return each command's words after `raymoe run`: a config, then its options."""
    path = packaged_config(name)
    assert path is not None
    comments = [line.removeprefix("#") for line in path.read_text().splitlines() if line.startswith("#")]
    joined = "\n".join(comments).replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines() if line.startswith("   raymoe run ")]
    return [shlex.split(command)[2:] for line in lines for command in line.split(" && ")]


def settings(command: list[str]) -> tuple[str, ...]:
    """Return the settings of a command; it must have no other options."""
    assert command[1::2] == ["--set"] * (len(command) // 2)
    return tuple(command[2::2])


def variants() -> list[tuple[str, tuple[str, ...]]]:
    """Return every packaged config: without settings, with those of each command in its comments, with all of them."""
    variants_of_all = []
    for name in packaged_names():
        own = [settings(command) for command in commands(name) if command[0] == name]
        variants_of_all += [(name, sets) for sets in [(), *own, sum(own, ())]]
    return list(dict.fromkeys(variants_of_all))
