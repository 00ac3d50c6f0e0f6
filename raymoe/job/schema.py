"""The JSON Schema of a config, for editors."""

from typing import Any

from raymoe.job.keys import key_tree
from raymoe.job.meaning import find
from raymoe.job.model import Job
from raymoe.job.sweep import sweepable


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
    wire = schema["$defs"]["Exchange"]["properties"]["wire"]
    schema["$defs"]["Exchange"]["properties"]["wire"] = {
        "description": wire.pop("description"),
        "anyOf": [{"$ref": "#/$defs/Wire"}, _at(schema, "exchange.wire.dispatch")],
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
        home = schema["$defs"][section.capitalize()]
    return find(home, f"properties.{leaf}")
