"""Files that are no configs are refused quickly, with one sentence."""

import os
import re
import time
from pathlib import Path

import pytest

from raymoe.config import load_job
from raymoe.errors import ConfigError
from tests.unit.config.configs_on_disk import refused, write

LAUGH = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{above}: &{above} [{', '.join(['*' + below] * 9)}]\n" for below, above in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = (
    "x: &x {" + ", ".join(f"k{i}: 1" for i in range(2000)) + "}\n" + "".join(f"y{i}: {{<<: *x}}\n" for i in range(2000))
)
STATIC = {
    "empty": (b"", "is empty"),
    "comment": (b"# nothing\n---\n", "is empty"),
    "binary": (b"\x7fELF\0\1\2", "is binary, not YAML"),
    "utf-16": ("workload: layer".encode("utf-16"), "is binary, not YAML"),
    "latin-1": ("workload: layer\nname: ä\n".encode("latin-1"), "line 2: not UTF-8: the byte 0xe4"),
    "control": (b"workload: layer\nname: a\x07\n", "line 2: the character '\\x07' is not allowed in YAML"),
    "text": (b"hello\n", "line 1: a mapping is wanted at the top"),
    "list": (b"# one\n- a\n", "line 2: a mapping is wanted at the top"),
    "syntax": (b"workload: layer\nshape: {tokens: 1\nname: x\n", "line 3: not YAML"),
    "tab": (b"workload:\n\tlayer\n", "line 2: not YAML"),
    "two documents": (b"workload: layer\n---\nworkload: layer\n", "line 2: a second document"),
    "unknown alias": (b"workload: *x\n", "line 1: no anchor &x before this alias"),
    "endless alias": (b"workload: &a [*a]\n", "line 1: the alias *a contains itself"),
    "laugh": (LAUGH.encode(), "line 5: more than 20000 values with aliases expanded"),
    "merges": (MERGES.encode(), "more than 20000 values with aliases expanded"),
    "deep flow list": (b"[" * 60_000, "line 1: nested more than 20 deep"),
    "deep flow map": (b"{a: " * 15_000, "line 1: nested more than 20 deep"),
    "deep block list": (b"- " * 30_000, "line 1: nested more than 20 deep"),
    "deep block map": ("".join(" " * i + "a:\n" for i in range(300)).encode(), "line 21: nested more than 20 deep"),
    "deep keys": (b"? " * 30_000, "line 1: nested more than 20 deep"),
}


@pytest.mark.parametrize("case", STATIC)
def test_content_that_is_no_config_is_refused_within_2_s(tmp_path, case):
    content, expected = STATIC[case]
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    began = time.monotonic()
    error = refused(str(path))
    assert time.monotonic() - began < 2
    assert expected in str(error) and str(path) in str(error)


def test_a_file_of_100_mib_is_refused_unread(tmp_path):
    path = tmp_path / "x.yaml"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    began = time.monotonic()
    assert "has 104857600 bytes, a config has at most 65536" in str(refused(str(path)))
    assert time.monotonic() - began < 0.5


def test_a_file_of_unknown_size_is_read_only_up_to_the_limit():
    assert "more than 65536 bytes" in str(refused("/proc/kallsyms"))


def test_a_directory_is_refused(tmp_path):
    assert str(refused(str(tmp_path))) == f"{tmp_path}: is a directory, not a config"


def test_a_fifo_is_refused_without_a_hang(tmp_path):
    os.mkfifo(tmp_path / "x.yaml")
    assert "is not a regular file" in str(refused(str(tmp_path / "x.yaml")))


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_a_device_file_is_refused(device):
    assert "is not a regular file" in str(refused(device))


def test_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "x.yaml").symlink_to(tmp_path / "x.yaml")
    assert "Too many levels of symbolic links" in str(refused(str(tmp_path / "x.yaml")))


def test_a_file_without_read_permission_is_refused(tmp_path, monkeypatch):
    config = write(tmp_path, "workload: layer\n")

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("raymoe.config.files.os.open", denied)  # root, as which tests may run, can read every file
    assert str(refused(config)) == f"{config}: cannot be read: Permission denied"


@pytest.mark.parametrize("config", ["nope", "nope.yaml", "no/such/config.yaml", "", "a\nb", "a\0b", "x" * 5000])
def test_a_config_that_does_not_exist_is_refused_in_one_short_sentence(config):
    assert len(str(refused(config))) < 420


def test_a_misspelt_packaged_config_gets_a_suggestion():
    assert "did you mean 'quickstart'?" in str(refused("quikstart"))


def test_an_existing_file_goes_before_a_packaged_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text("workload: p2p\n")
    assert load_job("quickstart").workload == "p2p"
    Path("quickstart").unlink()
    assert load_job("quickstart").workload == "layer"


def test_a_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbfworkload: layer\n")
    assert load_job(str(path)).workload == "layer"


def test_anchors_and_merge_keys_are_read(tmp_path):
    text = "workload: layer\nshape: {<<: &few {tokens: 4, topk: 2}, topk: 1}\nsteps: {count: &n 3, warmup: *n}\n"
    job = load_job(write(tmp_path, text))
    assert (job.shape.tokens, job.shape.topk, job.steps.count, job.steps.warmup) == (4, 1, 3, 3)


def test_a_job_is_named_after_its_file(tmp_path):
    for name, called in (("a b.yaml", "a-b"), ("1e3.yaml", "1e3"), ("ä.yaml", "job"), ("x" * 90 + ".yaml", "x" * 64)):
        assert load_job(write(tmp_path, "workload: layer\n", name)).name == called


def test_a_config_error_is_also_a_value_error():
    with pytest.raises(ValueError, match="neither a file nor a packaged config") as caught:
        load_job("nope")
    assert isinstance(caught.value, ConfigError) and caught.value.exit_code == 2


@pytest.mark.parametrize(("asked", "meant"), [("mine.yml", "mine.yaml"), ("mien.yaml", "mine.yaml")])
def test_a_file_of_nearly_that_name_is_offered(asked, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / meant).write_text("workload: exchange\n")
    told = f"{asked}: neither a file nor a packaged config, did you mean '{meant}'?"
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_job(asked)
