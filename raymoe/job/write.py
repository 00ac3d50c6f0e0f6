"""A resolved job as YAML that reads back as the same job."""

from typing import Any

import yaml

from raymoe.job.scalars import resolve


def to_yaml(resolved: dict[str, Any]) -> str:
    """One section a line, text in quotes where it would read as something else.

    >>> print(to_yaml({"name": "1e3", "world": {"ranks": 2, "cpus": 0.5}}), end="")
    name: '1e3'
    world: {ranks: 2, cpus: 0.5}
    """
    return yaml.dump(resolved, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


class _Dumper(yaml.SafeDumper):
    """PyYAML quotes what YAML 1.1 reads as something else; `1e3` is only in YAML 1.2 a number, and here."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, None if resolve(text) == text else "'")


_Dumper.add_representer(str, _text)
