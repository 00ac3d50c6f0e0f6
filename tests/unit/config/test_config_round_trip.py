"""A resolved job reads back as the same job. Any text is read as a config or refused, without a crash."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymoe.config import job_from_resolved, job_schema, load_job, to_yaml
from raymoe.config.explain import key_tree, leaves
from raymoe.config.yaml_tree import resolve
from raymoe.errors import ConfigError
from raymoe.packaged import packaged_config
from tests.unit.config.configs_on_disk import write
from tests.unit.config.packaged_commands import variants

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, object]:
    """Draw a valid config."""
    ranks = draw(st.sampled_from([2, 3, 4, 8]))
    experts = ranks * draw(st.integers(1, 8))
    kind = draw(st.sampled_from(["uniform", "zipf", "hot"]))
    routing: dict[str, object] = {
        "kind": kind,
        "seed": draw(st.integers(0, 2**63 - 1)),
        "masked": draw(st.floats(0, 1)),
    }
    if kind == "zipf":
        routing["alpha"] = draw(st.floats(1e-9, 100))
    if kind == "hot":
        routing["share"] = draw(st.floats(0, 1))
    job: dict[str, object] = {
        "workload": draw(st.sampled_from(["p2p", "exchange", "layer"])),
        "name": draw(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,20}\Z")),
        "world": {"ranks": ranks, "cpus": draw(st.floats(0.001, 8)), "wait_timeout_s": draw(st.floats(1e-3, 1e3))},
        "shape": {"hidden": 8 * draw(st.integers(1, 9)), "experts": experts, "topk": draw(st.integers(1, experts))},
        "routing": routing,
        "exchange": {"wire": draw(st.sampled_from([{}, "bfloat16", {"combine": "bfloat16"}, {"combine": "float32"}]))},
        "steps": {"graph": draw(st.sampled_from(["auto", False])), "verify": draw(st.booleans())},
        "p2p": {"bytes": draw(st.lists(st.sampled_from([1, "4KiB", "1.5MiB", 12345]), min_size=1))},
    }
    if job["workload"] != "p2p" and draw(st.booleans()):
        tokens = draw(st.lists(st.integers(1, 4096), min_size=1, max_size=3, unique=True))
        job["matrix"] = {"shape.tokens": tokens, "exchange.backend": ["host", "collective"]}
    return job


@QUICK
@given(jobs())
def test_a_resolved_job_reads_back_as_the_same_job(tmp_path: Path, config: dict[str, object]) -> None:
    job = load_job(write(tmp_path, to_yaml(config)))
    assert job_from_resolved(job.resolved()) == job
    assert job_from_resolved(json.loads(json.dumps(job.resolved()))) == job
    assert job_from_resolved(yaml.safe_load(yaml.safe_dump(job.resolved()))) == job
    assert load_job(write(tmp_path, to_yaml(job.resolved()), "again.yaml")) == job
    for case in job.cases():
        assert job_from_resolved(case.job.resolved()) == case.job
        assert [(inner.name, inner.job) for inner in case.job.cases()] == [("default", case.job)]


WORDS = "workload layer p2p shape tokens world ranks matrix shape.tokens defaults routing kind zipf on 4KiB x.yaml wire"
MARKS = [
    ": ",
    ":",
    " ",
    "\n",
    "\n  ",
    "- ",
    "{",
    "}",
    "[",
    "]",
    ",",
    "&a ",
    "*a",
    "<<: ",
    "? ",
    "!!str ",
    "!x ",
    "'",
    '"',
]
SCALARS = ["|\n", "#", "---\n", "~", "1", "0x1F", "-1", "1e3", "\t", "é", "%"]
PIECES = st.sampled_from([*WORDS.split(), *MARKS, *SCALARS])


@settings(QUICK, max_examples=300)
@given(st.lists(PIECES, max_size=40).map("".join))
def test_any_text_is_read_or_refused_with_a_config_error(tmp_path: Path, text: str) -> None:
    try:
        load_job(write(tmp_path, text))
    except ConfigError as error:
        assert error.problems and "\n" not in str(error)
        assert not any("\n" in str(problem) for problem in error.problems)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = [*leaves(key_tree()), *key_tree(), "matrix.shape.tokens", "matrix.exchange.backend", "exchange.wire"]


@settings(QUICK, max_examples=300)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_value_of_any_key_is_accepted_or_refused(tmp_path: Path, given_values: dict[str, object]) -> None:
    config = write(tmp_path, "workload: layer\n")
    sets = [f"{key}={json.dumps(value)}" for key, value in given_values.items()]
    try:
        job = load_job(config, sets)
    except ConfigError as error:
        assert error.problems
    else:
        assert job_from_resolved(job.resolved()) == job


@settings(QUICK, max_examples=200)
@given(st.text(max_size=12) | st.from_regex(r"\A[-+0-9eE.:_xon~]{1,6}\Z"))
def test_written_text_reads_back_as_text(tmp_path: Path, text: str) -> None:
    written = to_yaml({"workload": "layer", "routing": {"kind": "trace", "file": text}})
    assert yaml.safe_load(written)["routing"]["file"] == text
    from raymoe.config.yaml_tree import Source, compose

    root, problems = compose(written, Source("x", tmp_path, 0))
    assert root and not problems
    assert root.plain() == {"workload": "layer", "routing": {"kind": "trace", "file": text}}


def test_plain_scalars_resolve_as_pyyaml_resolves_them() -> None:
    numbers = ["12", "-3", "+4", "1_000", "0x1F", "1.5", ".5", "1.0e+3", "1.e+3", ".inf"]
    for text in [*numbers, "true", "False", "null", "~", "word"]:
        assert resolve(text) == yaml.safe_load(text)


def test_from_resolved_refuses_an_invalid_job() -> None:
    with pytest.raises(ConfigError, match=r"not a resolved job: shape\.topk: topk 64 is more than the 32 experts"):
        job_from_resolved({"name": "x", "workload": "layer", "shape": {"topk": 64}})
    with pytest.raises(ConfigError, match="workload"):
        job_from_resolved({"name": "x"})


@pytest.mark.parametrize(("name", "sets"), variants())
def test_packaged_configs_are_valid_and_fit_the_schema(name: str, sets: tuple[str, ...]) -> None:
    job = load_job(name, sets)
    assert job.name == name
    validator = jsonschema.Draft202012Validator(job_schema())
    path = packaged_config(name)
    assert path is not None
    validator.validate(yaml.safe_load(path.read_text()))
    validator.validate(job.resolved())


def test_the_schema_refuses_what_the_loader_refuses() -> None:
    schema = job_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"defaults": "base.yaml"})
    for wrong in (
        {},
        {"workload": "finetune"},
        {"workload": "layer", "wrld": {}},
        {"workload": "layer", "shape": {"tokens": 0}},
        {"workload": "layer", "exchange": {"backend": "nccl"}},
        {"workload": "layer", "exchange": {"sms": "all"}},
        {"workload": "layer", "exchange": {"wire": "float8"}},
        {"workload": "layer", "steps": {"graph": 0}},
        {"workload": "p2p", "p2p": {"bytes": ["4kib"]}},
        {"workload": "layer", "matrix": {"world.ranks": [1]}},
        {"workload": "layer", "matrix": {"shape.tokens": ["x"]}},
    ):
        assert not validator.is_valid(wrong), wrong
    assert validator.is_valid({"workload": "p2p", "p2p": {"bytes": ["4KiB", 8]}, "exchange": {"wire": "bfloat16"}})
