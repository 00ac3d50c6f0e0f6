"""Writes a resolved job as YAML that reads back as the same job, and the JSON Schema of a config."""

from __future__ import annotations

from typing import Any

import yaml

from raymoe.config.explain import key_tree
from raymoe.config.job import Job, find
from raymoe.config.sweep import sweepable
from raymoe.config.yaml_tree import resolve


def to_yaml(resolved: dict[str, Any]) -> str:
    """Write a resolved job as YAML, one section a line. Text is quoted if it would read as another type.

    >>> print(to_yaml({"name": "1e3", "world": {"ranks": 2, "cpus": 0.5}}), end="")
    name: '1e3'
    world: {ranks: 2, cpus: 0.5}
    """
    return yaml.dump(resolved, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes as PyYAML does, and also text such as `1e3`: a number for `resolve` and YAML 1.2, but not for YAML 1.1."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, None if resolve(text) == text else "'")


_Dumper.add_representer(str, _text)


def job_schema() -> dict[str, Any]:
    """Make the JSON Schema of a config, for editors.

    A config with `defaults` needs no `workload`: its parent may have one.
    """
    schema = Job.model_json_schema()
    properties = schema["properties"]
    parent = {
        "type": "string",
        "description": "Parent config, relative to this one. Maps merge, lists replace those of the parent.",
        "examples": ["base.yaml"],
    }
    swept = {key: {"type": "array", "minItems": 1, "items": _at(schema, key)} for key in sweepable(key_tree())}
    matrix = {**properties.pop("matrix"), "properties": swept, "additionalProperties": False}
    matrix.pop("default", None)
    wire = schema["$defs"]["ExchangeSection"]["properties"]["wire"]
    schema["$defs"]["ExchangeSection"]["properties"]["wire"] = {
        "description": wire["description"],
        "examples": wire["examples"],
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
    """Return the schema of one key's values."""
    *sections, leaf = key.split(".")
    holder = schema
    for section in sections:
        holder = schema["$defs"][f"{section.capitalize()}Section"]
    return find(holder, f"properties.{leaf}")
