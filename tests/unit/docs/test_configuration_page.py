"""docs/configuration.md is what `raymoe schema --markdown` writes; its defaults, bounds and examples are true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from raymoe import cli
from raymoe.config import load_job
from raymoe.config.explain import key_tree, leaves
from raymoe.config.job import MAX_CASES, MEANINGS, Job, find, put
from raymoe.config.reference import Key, keys, reference
from raymoe.config.submission import Submission, load_submission, submission_schema
from raymoe.config.write import job_schema
from tests.python_path import REPOSITORY

PAGE = REPOSITORY / "docs" / "configuration.md"
MAPPINGS = ("exchange.wire", "exchange.net", "layer.router")
"""Keys that hold a mapping inside a section. They have an item beside those of their keys."""
CONFIGS, JOBS = reference().split("\n## Jobs\n")
CONFIG_KEYS = {key.name: key for key in keys(job_schema())}
JOB_KEYS = {key.name: key for key in keys(submission_schema())}


def items(part: str) -> dict[str, str]:
    """Return the items of the page's lists by key, each on one line."""
    found = re.findall(r"^\* `([\w.]+)` (\(.*?)(?=^\*|^#|^$|\Z)", part, re.MULTILINE | re.DOTALL)
    return {key: " ".join(text.split()) for key, text in found}


def test_the_page_is_the_output_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema", "--markdown"]) == 0
    written = capsys.readouterr().out
    assert written == PAGE.read_text(), "run `raymoe schema --markdown > docs/configuration.md`"
    assert cli.main(["schema", "--markdown", "--job"]) == 2


def test_every_key_has_an_item_with_type_example_and_meaning() -> None:
    assert set(leaves(key_tree())) | {"defaults", *MAPPINGS} == set(CONFIG_KEYS)
    assert set(leaves(key_tree(Submission))) == set(JOB_KEYS)
    for part, of_part in ((CONFIGS, CONFIG_KEYS), (JOBS, JOB_KEYS)):
        shown = items(part)
        assert set(shown) == set(of_part)
        for name, text in shown.items():
            key, meaning = of_part[name], " ".join(of_part[name].meaning.split())
            assert key.kind and key.example and text.startswith(f"({key.kind}")
            assert (f", default {key.default}): " in text) == (key.default not in ("", "required"))
            assert f"): {meaning}" in text and text.endswith(f"Example: {key.example}.") == key.needs_example
            assert meaning.endswith((".", ")")) and len(meaning) > 15, f"{name}: {meaning}"


def example(key: Key) -> Any:
    """Return the value of a key's example, which also names the key."""
    [(name, value)] = yaml.safe_load(key.example.strip("`")).items()
    assert name == key.name.rpartition(".")[2]
    return value


def defaults() -> Iterator[tuple[str, Any]]:
    job = Job(name="x", workload="layer").model_dump(mode="json")
    for name, key in CONFIG_KEYS.items():
        if key.default != "required" and name not in ("defaults", "name", "matrix", *MAPPINGS):
            yield name, (find(job, name), yaml.safe_load(key.default.strip("`")) if key.default else None)


def test_the_defaults_are_those_of_a_job() -> None:
    wrong = {key: pair for key, pair in defaults() if pair[0] != pair[1]}
    assert wrong == {}


@pytest.mark.parametrize("key", [key for key in CONFIG_KEYS if key != "defaults"])
def test_the_example_of_a_key_is_a_valid_config(key: str, tmp_path: Path) -> None:
    """A config with the example, and with what gives the key a meaning, has no problem; and the key is used."""
    plain: dict[str, Any] = {"workload": "p2p" if key.startswith("p2p.") else "exchange"}
    for meaning in MEANINGS:
        if meaning.key in (key, key.partition(".")[0]):
            which = 0 if meaning.decider == "workload" else -1
            plain = put(plain, meaning.decider, meaning.values[which])
    needed: dict[str, dict[str, Any]] = {
        "world.share_gpu": {"world.device": "cuda"},
        "world.domain": {"world.ranks": 8},
        "exchange.transport": {"exchange.backend": "staged"},
        "exchange.net": {"world.device": "cuda", "world.domain": 2},
        "exchange.net.chunk": {"world.device": "cuda", "world.domain": 2},
        "p2p.sms": {"p2p.transports": ["tma"]},
        "layer.recompute": {"layer.backward": True},
        "layer.microbatches": {"layer.router.kind": "sigmoid"},
        "layer.router.topk_groups": {"layer.router.groups": 8},
    }
    for other, value in needed.get(key, {}).items():
        plain = put(plain, other, value)
    plain = put(plain, key, example(CONFIG_KEYS[key]))
    (tmp_path / "ids.npy").touch()
    file = tmp_path / "example.yaml"
    file.write_text(yaml.safe_dump(plain))
    found = find(load_job(str(file)).model_dump(mode="json"), key)
    default = Job(name="x", workload="layer").model_dump(mode="json")
    assert found != find(default, key) or key == "workload", "the example is the default"


def test_the_examples_of_a_job_are_a_valid_job(tmp_path: Path) -> None:
    plain: dict[str, Any] = {}
    for name, key in JOB_KEYS.items():
        if name not in ("runtime_env.uv", "runtime_env.conda"):  # one of pip, uv and conda
            plain = put(plain, name, example(key))
    for folder in ("jobs", "my_package"):
        (tmp_path / folder).mkdir()
    file, program = tmp_path / "jobs" / "job.yaml", plain.pop("program")
    file.write_text(yaml.safe_dump(plain))
    job, request = load_submission(str(file))
    assert request.address == plain["address"] and job is not None
    assert job.world.ranks == plain["set"]["world.ranks"]

    # The same job with the program in place of the config, by its file and by its module.
    for name in ("jobs/train.py", "my_package/train.py"):
        (tmp_path / name).touch()
    plain = {key: value for key, value in plain.items() if key not in ("config", "set")}
    for other, words in (("module", ("train.py",)), ("file", ("-m", "my_package.train"))):
        one = {key: value for key, value in program.items() if key != other}
        file.write_text(yaml.safe_dump({**plain, "program": one}))
        entrypoint = load_submission(str(file))[1].entrypoint
        assert entrypoint == ("python", "-m", "raymoe.program", *words, *program["arguments"])
    for tool in ("uv", "conda"):
        value = example(JOB_KEYS[f"runtime_env.{tool}"])
        assert Submission.model_validate({"config": "quickstart", "runtime_env": {tool: value}})


def number(text: str) -> float:
    base, _, rest = text.partition("^")
    power, _, less = rest.partition(" - ")
    return float(text) if not rest else int(base) ** int(power) - int(less or 0)


@pytest.mark.parametrize(
    "key", [name for name, key in CONFIG_KEYS.items() if re.search(r"(integer|number) [^ ]+ to ", key.kind)]
)
def test_the_bounds_of_a_key_are_those_that_a_config_is_held_to(key: str) -> None:
    found = re.search(r"(integer|number) ([^ ]+) to ([0-9^]+(?: - 1)?)", CONFIG_KEYS[key].kind)
    assert found
    convert, step = (int, 1) if found[1] == "integer" else (float, 1e-6)
    least, most = convert(number(found[2])), convert(number(found[3]))
    for inside in (least, most):
        assert find(job_with(key, inside).model_dump(), key) == inside
    for outside in (least - step, most + step):
        with pytest.raises(ValidationError):
            job_with(key, outside)


def job_with(key: str, value: object) -> Job:
    return Job.model_validate(put({"name": "x", "workload": "layer"}, key, value))


def test_numbers_in_the_text_are_those_of_the_code() -> None:
    assert f"at most {MAX_CASES}." in CONFIG_KEYS["matrix"].meaning
