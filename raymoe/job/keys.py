"""The tree of a job's keys, read off its models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raymoe.job.model import Job
from raymoe.job.sections import Section

KeyTree = dict[str, Any]  # name -> the KeyTree below it, empty for a value


def key_tree(section: type[Section] = Job) -> KeyTree:
    """Every key of a job, sections with theirs inside.

    >>> key_tree()["exchange"]["wire"]
    {'dispatch': {}, 'combine': {}}
    """
    tree: KeyTree = {}
    for name, field in section.model_fields.items():
        inner = field.annotation
        tree[name] = key_tree(inner) if isinstance(inner, type) and issubclass(inner, Section) else {}
    return tree


def leaves(tree: KeyTree, prefix: str = "") -> Iterator[str]:
    """Every dotted key that holds a value.

    >>> list(leaves({"name": {}, "wire": {"dispatch": {}}}))
    ['name', 'wire.dispatch']
    """
    for name, inner in tree.items():
        if inner:
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name
