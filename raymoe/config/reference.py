"""Writes docs/configuration.md: every key of configs and of jobs, from the JSON Schemas that editors read."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from raymoe.config.job import MEANINGS, Meaning
from raymoe.config.sections import SIZE_PATTERN
from raymoe.config.submission import submission_schema
from raymoe.config.write import job_schema

Schema = Mapping[str, Any]

_TOP = """\
# Configuration

A config says what to run (`raymoe run CONFIG`). A job says where and how a cluster runs a config or a program
(`raymoe submit JOB`). `raymoe schema --markdown` writes this page. Editors read the JSON Schemas:

```
raymoe schema > raymoe.schema.json
raymoe schema --job > raymoe-job.schema.json
```

## How a config is read

* Only `workload` is required. `raymoe show CONFIG` prints all defaults.
* `--set shape.tokens=128` changes a key. It may be repeated.
* A path that exists is a file. Any other name is a packaged config (`configs/`) or job (`jobs/`).
* Unknown or duplicate keys, wrong types, and values that are impossible or do not fit together are errors.
  `raymoe validate CONFIG...` reports all at once, with file, line, key and the nearest right name.
* `on`, `yes` and `010` are text, and `1e-3` is a number, unlike in YAML 1.1.
* A size is in bytes, or has a unit: B, KiB, MiB, GiB, TiB, kB, MB or GB.
* A section or key *for* other workloads is ignored. A key *only with* another one is an error without it.
"""

_JOBS = """\
## Jobs

The keys of a file for `raymoe submit JOB`, which [submit.md](submit.md) explains.
"""


def reference() -> str:
    """Write the page, in Markdown."""
    config, job = job_schema(), submission_schema()
    parts = [_TOP, "## Top level\n", _list(config, config["properties"])]
    for name, section in _sections(config, config["properties"]):
        parts += [f"## {name}\n", _opening(section, _of_workload(name)), _list(config, section["properties"], name)]
    parts += [_JOBS, _list(job, job["properties"])]
    for name, section in _sections(job, job["properties"]):
        parts += [f"### {name}\n", _opening(section), _list(job, section["properties"], name)]
    return "\n".join(parts)


def _sections(schema: Schema, properties: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the keys that hold sections, with the schema of each section."""
    for name, value in properties.items():
        if section := _section(schema, value):
            yield name, section


def _section(schema: Schema, value: Schema) -> Schema | None:
    """Return the schema of the section that a key holds; None if it holds a value."""
    for choice in (value, *value.get("anyOf", ())):
        if "$ref" in choice:
            section: Schema = schema["$defs"][choice["$ref"].rpartition("/")[2]]
            return section
    return None


def _opening(section: Schema, workloads: str = "") -> str:
    return " ".join(filter(None, (section.get("description", ""), workloads))) + "\n"


def _of_workload(name: str) -> str:
    """Say which workloads read a section.

    >>> _of_workload("p2p"), _of_workload("world")
    ('For workload `p2p`.', '')
    """
    for meaning in MEANINGS:
        if (meaning.key, meaning.decider) == (name, "workload"):
            return f"For workload {_listed(meaning.values)}."
    return ""


def _list(schema: Schema, properties: Schema, prefix: str = "") -> str:
    return "".join(f"{_item(key)}\n" for key in _keys(schema, properties, prefix))


def _item(key: Key) -> str:
    """Write a key as an item of a list.

    >>> print(_item(Key("world.ranks", "integer", "`4`", "`ranks: 8`", "The number of ranks.")))
    * `world.ranks` (integer, default `4`): The number of ranks.
    """
    kind = f"{key.kind}, {key.default}" if key.default == "required" else key.kind
    if key.default and key.default != "required":
        kind += f", default {key.default}"
    example = f" Example: {key.example}." if key.needs_example else ""
    text = f"* `{key.name}` ({kind}): {' '.join(key.meaning.split())}{example}"
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


WIDTH = 120


@dataclass(frozen=True)
class Key:
    """A key of a config or of a job, as the page shows it. `example` is YAML between backticks."""

    name: str
    kind: str
    default: str
    example: str
    meaning: str

    @property
    def needs_example(self) -> bool:
        """Whether the type alone leaves open how a value is written."""
        return any(word in self.kind for word in ("list", "mapping"))


def keys(schema: Schema) -> Iterator[Key]:
    """Yield every key of the schema of configs or jobs."""
    yield from _keys(schema, schema["properties"])
    for name, section in _sections(schema, schema["properties"]):
        yield from _keys(schema, section["properties"], name)


def _keys(schema: Schema, properties: Schema, prefix: str = "") -> Iterator[Key]:
    for name, value in properties.items():
        dotted = f"{prefix}.{name}" if prefix else name
        section = _section(schema, value)
        if section is not None and not prefix:
            continue  # it has a list of its own
        default = "required" if dotted in REQUIRED else "" if section else _default(value)
        yield Key(dotted, _type(value), default, _example(name, value), _meaning(dotted, value))
        if section is not None:
            yield from _keys(schema, section["properties"], dotted)


REQUIRED = ("workload",)


def _meaning(dotted: str, value: Schema) -> str:
    meaning = str(value.get("description", ""))
    conditions = [meaning for meaning in MEANINGS if meaning.key == dotted]
    return f"{meaning} {_conditions(conditions)}" if conditions else meaning


def _conditions(meanings: Sequence[Meaning]) -> str:
    """Say when a key means something.

    >>> _conditions([Meaning("routing.alpha", "routing.kind", ("zipf",), strict=True)])
    'Only with `routing.kind: zipf`.'
    >>> _conditions([Meaning("shape.experts", "workload", ("layer", "train"))])
    'For `workload: layer`, `train`.'
    """
    only = [f"`{meaning.decider}: {meaning.values[0]}`" for meaning in meanings]
    more = ["".join(f", `{value}`" for value in meaning.values[1:]) for meaning in meanings]
    word = "Only with" if any(meaning.strict for meaning in meanings) else "For"
    return f"{word} {' and '.join(map(''.join, zip(only, more, strict=True)))}."


def _default(value: Schema) -> str:
    default = value.get("default")
    return "" if default in (None, [], {}) else f"`{flow(default)}`"


def _example(name: str, value: Schema) -> str:
    return "".join(f"`{flow({name: example})[1:-1]}`" for example in value.get("examples", ())[:1])


def flow(value: object) -> str:
    """Write a value as YAML on one line.

    >>> flow({"tokens": [128, 512]}), flow(60.0), flow(True), flow("auto")
    ('{tokens: [128, 512]}', '60', 'true', 'auto')
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    written = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return written.removesuffix("\n").removesuffix("\n...")


def _type(value: Schema) -> str:
    """Name the values that a schema takes, with their bounds.

    >>> _type({"type": "integer", "minimum": 1, "maximum": 2**20}), _type({"enum": ["auto", True, False]})
    ('integer 1 to 2^20', '`auto`, `true`, `false`')
    >>> _type({"anyOf": [{"type": "integer"}, {"const": "auto"}]})
    '`auto` or integer'
    """
    if "anyOf" in value:
        choices = [choice for choice in value["anyOf"] if choice.get("type") != "null"]
        if any(choice.get("pattern") == SIZE_PATTERN for choice in choices):
            return f"size{_bounds(choices[0])} bytes"
        return " or ".join(map(_type, sorted(choices, key=lambda choice: not {"const", "$ref"} & set(choice))))
    if "const" in value or "enum" in value:
        return _listed(value.get("enum") or [value["const"]])
    kind = value.get("type")
    if "prefixItems" in value:
        return f"[{', '.join(map(_type, value['prefixItems']))}]"
    if kind == "array":
        return f"list of {_type(value['items'])}"
    values = value.get("additionalProperties")
    if kind == "object" and isinstance(values, Mapping) and "type" in values:
        return f"mapping to {_type(values)}"
    return _KINDS.get(str(kind), "mapping") + _bounds(value)


_KINDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "boolean"}


def _listed(values: Sequence[object]) -> str:
    return ", ".join(f"`{flow(value)}`" for value in values)


def _bounds(value: Schema) -> str:
    """Name the bounds of a number.

    >>> _bounds({"minimum": 0, "exclusiveMaximum": 2**63}), _bounds({"exclusiveMinimum": 0, "maximum": 100.0})
    (' 0 to 2^63 - 1', ' above 0, at most 100')
    """
    most = value.get("maximum", value.get("exclusiveMaximum", 0) - 1)
    if "minimum" in value and most >= 0:
        return f" {_number(value['minimum'])} to {_number(most)}"
    if "exclusiveMinimum" in value:
        return f" above {_number(value['exclusiveMinimum'])}, at most {_number(most)}"
    return f" from {_number(value['minimum'])}" if "minimum" in value else ""


def _number(value: float) -> str:
    """Write a number; large powers of two, and the numbers one below them, as such.

    >>> _number(1024.0), _number(0.001), _number(2**24), _number(2**31 - 1)
    ('1024', '0.001', '2^24', '2^31 - 1')
    """
    if value != int(value):
        return str(value)
    whole = int(value)
    if whole >= 2**16 and whole & (whole - 1) == 0:
        return f"2^{whole.bit_length() - 1}"
    if whole >= 2**16 and whole & (whole + 1) == 0:
        return f"2^{whole.bit_length()} - 1"
    return str(whole)
