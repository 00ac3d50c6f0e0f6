"""Writes docs/configuration.md: every key of configs and of jobs, from the JSON Schemas that editors read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from raymoe.config.job import MEANINGS, Meaning
from raymoe.config.sections import SIZE_PATTERN
from raymoe.config.submission import submission_schema
from raymoe.config.write import job_schema

Schema = Mapping[str, Any]

_TOP = """\
# Configuration

This page has every key of a config, and then every key of a job. A config says what to run (`raymoe run CONFIG`). A
job of `jobs/` names a config or a program, and says where and how a cluster runs it (`raymoe submit JOB`).

`raymoe schema --markdown` writes this page from the declarations of the keys in `raymoe/config/`, and a test compares
both. The same declarations give the JSON Schemas for editors:

```
raymoe schema > raymoe.schema.json
raymoe schema --job > raymoe-job.schema.json
```

## How a config is read

* Only `workload` is required. Every other key has a default; `raymoe show CONFIG` prints a config with all of them.
* `--set a.b=c` changes a key by its dotted name, as in `--set shape.tokens=128`. It may be repeated.
* A path that exists is a file. Any other name is a packaged config (`configs/`) or a packaged job (`jobs/`).
* Unknown or duplicate keys, wrong types and impossible values are errors. `raymoe validate CONFIG...` reports all of
  them at once, with file, line, key and the nearest right name. It also compares the shapes and ids
  of traces.
* `on`, `yes` and `010` are text, and `1e-3` is a number. YAML 1.1 reads all of these in another way.
* A size is a number of bytes, or a number with one of the units B, KiB, MiB, GiB, TiB, kB, MB and GB.
* Some values fit only together: `world.ranks` must divide `shape.experts`, for instance. The error says what would fit.
"""

_JOBS = """\
## Jobs

`raymoe submit JOB` reads these keys, in a file or in a packaged job of `jobs/`. It checks the config of the job too.
[submit.md](submit.md) says what a job does with them.
"""


def reference() -> str:
    """Write the page, in Markdown."""
    config, job = job_schema(), submission_schema()
    parts = [_TOP, "## Top level\n", _table(config, config["properties"])]
    for name, section in _sections(config, config["properties"]):
        parts += [f"## {name}\n", _opening(section, _of_workload(name)), _table(config, section["properties"], name)]
    parts += [_JOBS, _table(job, job["properties"])]
    for name, section in _sections(job, job["properties"]):
        parts += [f"### {name}\n", _opening(section), _table(job, section["properties"], name)]
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
    ('Only workload `p2p` reads this section; others ignore it.', '')
    """
    for meaning in MEANINGS:
        if (meaning.key, meaning.decider) == (name, "workload"):
            only = f"Only workload {_listed(meaning.values)} reads"
            read = f"Workloads {_listed(meaning.values, 'and')} read" if len(meaning.values) > 1 else only
            return f"{read} this section; others ignore it."
    return ""


def _table(schema: Schema, properties: Schema, prefix: str = "") -> str:
    rows = ["| key | type | default | example | meaning |", "| --- | --- | --- | --- | --- |"]
    rows += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in _rows(schema, properties, prefix)]
    return "\n".join(rows) + "\n"


def _rows(schema: Schema, properties: Schema, prefix: str) -> Iterator[tuple[str, ...]]:
    for name, value in properties.items():
        dotted = f"{prefix}.{name}" if prefix else name
        section = _section(schema, value)
        if section is not None and not prefix:
            continue  # it has a table of its own
        kind, default = _type(value), "required" if dotted in REQUIRED else _default(value)
        yield f"`{dotted}`", kind, default, _example(name, value), _meaning(dotted, value)
        if section is not None:
            yield from _rows(schema, section["properties"], dotted)


REQUIRED = ("workload",)


def _cell(text: str) -> str:
    """Write text so that it stays in one cell of a table.

    >>> _cell("a | b\\n  c")
    'a \\\\| b c'
    """
    return " ".join(text.split()).replace("|", "\\|")


def _meaning(dotted: str, value: Schema) -> str:
    meaning = str(value.get("description", ""))
    conditions = [meaning for meaning in MEANINGS if meaning.key == dotted]
    return f"{meaning} {_conditions(conditions)}" if conditions else meaning


def _conditions(meanings: Sequence[Meaning]) -> str:
    """Say when a key means something.

    >>> _conditions([Meaning("routing.alpha", "routing.kind", ("zipf",), strict=True)])
    'Only with `routing.kind: zipf`; otherwise it is an error.'
    """
    only = [f"`{meaning.decider}: {meaning.values[0]}`" for meaning in meanings]
    more = ["".join(f" or `{value}`" for value in meaning.values[1:]) for meaning in meanings]
    otherwise = "it is an error" if any(meaning.strict for meaning in meanings) else "it is ignored"
    return f"Only with {' and '.join(map(''.join, zip(only, more, strict=True)))}; otherwise {otherwise}."


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
    ('whole number 1 to 2^20', '`auto`, `true` or `false`')
    >>> _type({"anyOf": [{"type": "integer"}, {"const": "auto"}]})
    '`auto` or whole number'
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


_KINDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true` or `false`"}


def _listed(values: Sequence[object], word: str = "or") -> str:
    words = [f"`{flow(value)}`" for value in values]
    return f" {word} ".join(filter(None, (", ".join(words[:-1]), words[-1])))


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
