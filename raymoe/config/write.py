"""A resolved job as YAML that reads back as the same job."""

from __future__ import annotations

from typing import Any

import yaml

from raymoe.config.explain import key_tree
from raymoe.config.job import Job, find
from raymoe.config.sweep import sweepable
from raymoe.config.yaml_tree import resolve


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


# The JSON Schema of a config, for editors.


def job_schema() -> dict[str, Any]:
    """What a config may hold. A parent may hold what is required, so a config with `defaults` requires nothing."""
    schema = Job.model_json_schema()
    properties = schema["properties"]
    parent = {
        "type": "string",
        "description": "A config to start from, relative to this one: maps merge, lists replace.",
    }
    swept = {key: {"type": "array", "minItems": 1, "items": _at(schema, key)} for key in sweepable(key_tree())}
    matrix = {**properties.pop("matrix"), "properties": swept, "additionalProperties": False}
    matrix.pop("default", None)
    wire = schema["$defs"]["ExchangeSection"]["properties"]["wire"]
    schema["$defs"]["ExchangeSection"]["properties"]["wire"] = {
        "description": wire.pop("description"),
        "anyOf": [{"$ref": "#/$defs/WireSection"}, _at(schema, "exchange.wire.dispatch")],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "raymoe job",
        "type": "object",
        "properties": {"defaults": parent, **properties, "matrix": matrix},
        "anyOf": [{"required": ["workload"]}, {"required": ["defaults"]}],
        "additionalProperties": False,
        "$defs": schema["$defs"],
    }


def _at(schema: dict[str, Any], key: str) -> Any:
    """The schema of one key's values."""
    *sections, leaf = key.split(".")
    home = schema
    for section in sections:
        home = schema["$defs"][f"{section.capitalize()}Section"]
    return find(home, f"properties.{leaf}")
