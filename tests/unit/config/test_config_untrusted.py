"""An untrusted config: limits on the files it can read, the text it can repeat and the time it can take."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from raymoe import cli
from raymoe.config import job_from_resolved, load_job
from raymoe.errors import ConfigError
from raymoe.report.directory import RunDirectory
from tests.unit.config.configs_on_disk import refused, write

SECRET = "hunter2"
SHADOW = f"root:$6${SECRET}$x:19000:0:99999:7:::\ndaemon:*:19000:0:99999:7:::\n"


def told(error: ConfigError) -> str:
    return "\n".join([str(error), *map(str, error.problems)])


@pytest.fixture
def folders(short_path: Path) -> tuple[Path, Path]:
    """Make the folder of a config, and one beside it."""
    own, other = short_path / "own", short_path / "other"
    own.mkdir()
    other.mkdir()
    return own, other


# `defaults` names only what is called a config.


@pytest.mark.parametrize("name", ["shadow", "shadow.txt", "id_rsa", ".env", "yaml", ".yaml"])
def test_a_parent_has_the_name_of_a_yaml_file(folders, name):
    own, other = folders
    (other / name).write_text(SHADOW)
    error = refused(write(own, f"workload: layer\ndefaults: {other / name}\n"))
    assert f"line 2, defaults = {other / name}"[:40] in told(error)
    assert "a parent is a file .yaml or .yml" in told(error)
    assert SECRET not in told(error)


def test_a_link_with_the_name_of_a_yaml_file_leads_to_one(folders):
    own, other = folders
    (other / "shadow").write_text(SHADOW)
    (own / "base.yaml").symlink_to(other / "shadow")
    error = refused(write(own, "defaults: base.yaml\n"))
    assert "so is what a link leads to" in told(error)
    assert SECRET not in told(error)


@pytest.mark.parametrize("name", ["base.yaml", "base.yml"])
def test_a_parent_anywhere_is_read(folders, name):
    own, other = folders
    (other / name).write_text("workload: p2p\nworld: {ranks: 3}\n")
    (own / "link.yaml").symlink_to(other / name)
    for parent in (f"../other/{name}", str(other / name), "link.yaml"):
        assert load_job(write(own, f"defaults: {parent}\n")).world.ranks == 3


def test_a_fifo_as_a_parent_does_not_hang(folders):
    own, _ = folders
    os.mkfifo(own / "base.yaml")
    assert "is not a regular file" in told(refused(write(own, "defaults: base.yaml\n")))


def test_a_device_as_a_parent_is_refused(folders):
    own, _ = folders
    (own / "base.yaml").symlink_to("/dev/zero")
    assert "a parent is a file .yaml or .yml" in told(refused(write(own, "defaults: base.yaml\n")))


# No value runs code.


@pytest.mark.parametrize(
    "line",
    [
        "name: !!python/object/apply:os.mkdir [made]",
        "!!python/object/apply:os.mkdir [made]: 1",
        "shape: !!python/object/new:os.mkdir [made]",
        "matrix: {shape.tokens: !!python/object/apply:os.mkdir [made]}",
        "<<: !!python/object/apply:os.mkdir [made]",
    ],
)
def test_a_tag_runs_no_code(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    error = refused(write(tmp_path, f"workload: layer\n{line}\n"))
    assert "is not allowed" in told(error)
    assert not Path("made").exists()


# An error repeats no text of a parent in another folder.

PARENTS = {
    "lines that end with a colon": (SHADOW, "line 1: unknown key"),
    "text": (f"{SECRET}\n", "line 1: a mapping is wanted at the top"),
    "nested lines": (f"workload: layer\nworld:\n  {SECRET}/{SECRET}: 1\n", "line 3: unknown key"),
    "a list": (f"- {SECRET}\n", "line 1: a mapping is wanted at the top"),
    "an unknown key": (f"workload: layer\npassword: {SECRET}\n", "line 2, password: unknown key"),
    "a value of another type": (
        f"workload: layer\nworld: {{ranks: {SECRET}}}\n",
        "line 2, world.ranks: a whole number",
    ),
    "text for a section": (f"workload: layer\nworld: {SECRET}\n", "line 2, world: a mapping is wanted"),
    "no such choice": (f"workload: {SECRET}\n", "line 1, workload: not one of p2p"),
    "no name": (f"workload: layer\nname: ' {SECRET}'\n", "line 2, name: not a name"),
    "a size": (f"workload: p2p\np2p: {{bytes: [4{SECRET[:-1]}]}}\n", "line 2, p2p.bytes.0: not a size such as 4096"),
    "a number": ("workload: layer\nworld: {ranks: -7654321}\n", "line 2, world.ranks: the value is below"),
    "a number with a zero": ("workload: layer\nworld: {ranks: 07654321}\n", "line 2, world.ranks: a whole number"),
    "a fraction": ("workload: layer\nworld: {ranks: 7654321.0}\n", "line 2, world.ranks: a whole number"),
    "a tag": (f"workload: !{SECRET} layer\n", "line 1, workload: a tag is not allowed"),
    "an alias": (f"workload: *{SECRET}\n", "line 1: no anchor before this alias"),
    "an endless alias": (f"workload: &{SECRET} [*{SECRET}]\n", "line 1: an alias contains itself"),
    "no YAML": (f"workload: layer\nshape: {{tokens: '{SECRET}\n", "line 3: not YAML"),
    "no such directive": (f"%{SECRET}\n", "line 1: not YAML"),
    "a control character": (f"a: 1\nb: {SECRET}\x07\n", "line 2: a character is not allowed in YAML"),
    "a trace": (
        f"workload: exchange\nrouting: {{kind: trace, file: {SECRET}}}\n",
        "line 2, routing.file: no such file",
    ),
    "a parent": (f"defaults: {SECRET}.yaml\n", "line 1, defaults: that file cannot be read"),
    "a matrix": (f"workload: layer\nmatrix: {{shape.tokens: [{SECRET}]}}\n", "line 2, matrix.shape.tokens: a whole"),
    "a list of a matrix": (
        f"workload: layer\nmatrix: {{shape.tokens: {SECRET}}}\n",
        "line 2, matrix.shape.tokens: a list",
    ),
}


@pytest.mark.parametrize(("text", "says"), PARENTS.values(), ids=PARENTS)
def test_a_parent_in_another_folder_is_not_repeated(folders, text, says):
    own, other = folders
    (other / "base.yaml").write_text(text)
    error = refused(write(own, "defaults: ../other/base.yaml\n"))
    assert f"{other}/base.yaml: {says}" in told(error), "the file, the position and the key are told"
    assert SECRET not in told(error) and SECRET[:-1] not in told(error) and "7654321" not in told(error)


def test_a_link_out_of_the_folder_counts_as_another_folder(folders):
    own, other = folders
    (other / "base.yaml").write_text(f"workload: layer\npassword: {SECRET}\n")
    (own / "base.yaml").symlink_to(other / "base.yaml")
    error = refused(write(own, "defaults: base.yaml\n"))
    assert "line 2, password: unknown key" in told(error) and SECRET not in told(error)


def test_the_parent_of_a_parent_in_another_folder_is_not_repeated_either(folders):
    own, other = folders
    (other / "middle.yaml").write_text("defaults: base.yaml\n")
    (other / "base.yaml").write_text(f"workload: layer\npassword: {SECRET}\n")
    error = refused(write(own, "defaults: ../other/middle.yaml\n"))
    assert "line 2, password: unknown key" in told(error) and SECRET not in told(error)


@pytest.mark.parametrize("parent", ["base.yaml", "below/base.yaml"])
def test_mistakes_in_the_folder_of_the_config_are_shown_with_their_values(folders, parent):
    own, _ = folders
    write(own, "workload: layer\nworld: {ranks: twelve}\np2p: {bytes: [4kib]}\n", parent)
    error = refused(write(own, f"defaults: {parent}\nsteps: {{cont: 2}}\n"))
    assert "world.ranks = twelve" in told(error) and "did you mean 4KiB?" in told(error)
    assert "steps.cont = 2: unknown key, did you mean 'count'?" in told(error)


def test_a_config_that_is_a_link_is_shown_with_its_values(folders):
    own, other = folders
    (own / "x.yaml").symlink_to(write(other, "defaults: base.yaml\nworld: {ranks: twelve}\n"))
    write(own, "workload: layer\nsteps: {count: many}\n", "base.yaml")
    error = refused(str(own / "x.yaml"))
    assert "world.ranks = twelve" in told(error) and "steps.count = many" in told(error)


def test_a_value_over_a_parent_in_another_folder_is_shown(folders):
    own, other = folders
    (other / "base.yaml").write_text("workload: layer\nworld: {ranks: 2}\n")
    error = refused(write(own, "defaults: ../other/base.yaml\nworld: {ranks: twelve}\n"))
    assert "line 2, world.ranks = twelve: a whole number is wanted" in told(error)


# A job that was written into a run directory may have been changed there.


def resolved(**changes: Any) -> dict[str, Any]:
    return load_job("quickstart").resolved() | changes


BILLION = {key: list(range(1, 1001)) for key in ("shape.tokens", "shape.ffn", "routing.seed")}


def test_a_billion_cases_are_refused_at_once():
    began = time.monotonic()
    with pytest.raises(ConfigError, match="matrix: 1000000000 cases, at most 1000 are run"):
        job_from_resolved(resolved(matrix=BILLION))
    assert time.monotonic() - began < 5


def test_a_billion_cases_in_a_config_are_refused_at_once(tmp_path):
    began = time.monotonic()
    error = refused(write(tmp_path, f"workload: layer\nmatrix: {BILLION}\n"))
    assert "1000000000 cases, at most 1000 are run" in told(error)
    assert time.monotonic() - began < 10


def test_a_billion_cases_of_a_run_are_refused_before_it_goes_on(tmp_path, capsys):
    with RunDirectory.create(tmp_path / "run", "job") as directory:
        directory.write_config(resolved(matrix=BILLION))
    began = time.monotonic()
    assert cli.main(["run", "--resume", str(tmp_path / "run")]) == 2
    assert "1000000000 cases" in capsys.readouterr().err
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("key", ["name.x", "shape.tokens.y", "matrix", "shape", "p2p.bytes", "", ".", "a\x1b[31m.b"])
def test_a_key_that_no_matrix_has(key):
    with pytest.raises(ConfigError, match="no such key") as caught:
        job_from_resolved(resolved(matrix={key: [1, "x"]}))
    assert caught.value.exit_code == 2 and "\x1b" not in str(caught.value)


def test_few_of_very_many_problems_are_told():
    with pytest.raises(ConfigError, match="and 990 more") as caught:
        job_from_resolved(resolved(**{f"key{number}": 1 for number in range(1000)}))
    assert len(str(caught.value)) < 1000


def test_a_key_of_set_that_no_config_can_have(tmp_path):
    error = refused(write(tmp_path, "workload: layer\n"), "world.\udc80=1")
    assert "a key and a value are wanted" in told(error)
