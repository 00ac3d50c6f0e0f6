"""`defaults:` and `--set`."""

import pytest

from raymoe.config import load_job
from tests.unit.config.configs_on_disk import problems, refused, write


def test_maps_merge_and_lists_replace(tmp_path):
    write(tmp_path, "workload: p2p\nworld: {ranks: 2, cpus: 1}\np2p: {bytes: [1, 2, 3]}\n", "parents/base.yaml")
    child = write(tmp_path, "defaults: parents/base.yaml\nworld: {cpus: 0.25}\np2p: {bytes: [8]}\n")
    job = load_job(child)
    assert (job.workload, job.world.ranks, job.world.cpus, job.p2p.bytes) == ("p2p", 2, 0.25, (8,))
    assert job.name == "x"


def test_a_problem_in_a_parent_names_the_parent_file(tmp_path):
    write(tmp_path, "workload: layer\n\nworld: {rnks: 2}\nshape:\n  topk: 99\n", "base.yaml")
    assert problems(tmp_path, "defaults: base.yaml\nsteps: {cont: 2}\n") == [
        "x.yaml: line 2, steps.cont = 2: unknown key, did you mean 'count'?",
        "base.yaml: line 3, world.rnks = 2: unknown key, did you mean 'ranks'?",
        "base.yaml: line 5, shape.topk = 99: topk 99 is more than the 32 experts, at most 32",
    ]


@pytest.mark.parametrize("text", ["defaults: x.yaml\n", "defaults: base.yaml\n", "defaults: ./far/../base.yaml\n"])
def test_a_cycle_of_parents_is_refused(tmp_path, text):
    write(tmp_path, "defaults: middle.yaml\n", "base.yaml")
    write(tmp_path, "defaults: x.yaml\n", "middle.yaml")
    (tmp_path / "far").mkdir()
    reported = problems(tmp_path, text)
    assert len(reported) == 1 and "a cycle: " in reported[0] and "x.yaml -> " in reported[0]


def test_a_cycle_through_a_link_is_refused(tmp_path):
    (tmp_path / "link.yaml").symlink_to(tmp_path / "x.yaml")
    assert "a cycle" in problems(tmp_path, "defaults: link.yaml\n")[0]


def test_more_than_16_parents_are_refused(tmp_path):
    for i in range(40):
        write(tmp_path, f"defaults: {i + 1}.yaml\n", f"{i}.yaml")
    assert "more than 16 parents" in problems(tmp_path, "defaults: 0.yaml\n")[0]


@pytest.mark.parametrize(
    ("parent", "expected"),
    [
        ("nope.yaml", "nope.yaml cannot be read: No such file or directory"),
        ("folder.yaml", "is a directory, not a config"),
        (".", "a parent is a file .yaml or .yml"),
        ("[a, b]", "the path of one parent is wanted"),
        ("12", "the path of one parent is wanted"),
        ("broken.yaml", "not YAML"),
    ],
)
def test_an_unreadable_parent_hides_no_other_problem(tmp_path, parent, expected):
    write(tmp_path, "a: [\n", "broken.yaml")
    (tmp_path / "folder.yaml").mkdir()
    reported = problems(tmp_path, f"defaults: {parent}\nshape: {{hiden: 2}}\n")
    assert len(reported) == 2
    assert any(expected in line for line in reported) and any("did you mean 'hidden'?" in line for line in reported)


def test_settings_override_the_file_in_order(tmp_path):
    config = write(tmp_path, "workload: layer\nworld: {ranks: 4}\nsteps: {count: 9}\n")
    job = load_job(config, ["world.ranks=1", "world.ranks=2", "steps={warmup: 0}", "routing.ragged=true"])
    assert (job.world.ranks, job.steps.count, job.steps.warmup, job.routing.ragged) == (2, 9, 0, True)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("world.rank=2", "--set world.rank=2: unknown key, did you mean 'ranks'?"),
        ("wrld.ranks=2", "--set wrld.ranks=2: wrld: unknown key, did you mean 'world'?"),
        ("world.ranks=two", "--set world.ranks=two: a whole number is wanted, found text"),
        ("world.ranks=", "--set world.ranks=: a whole number is wanted, found nothing"),
        ("world.ranks", "--set world.ranks: a key and a value are wanted, as in --set world.ranks=2"),
        ("=2", "--set =2: a key and a value are wanted"),
        ("world..ranks=2", "a key and a value are wanted"),
        ("a.b.c.d.e=2", "a key and a value are wanted"),
        ("workload.x=1", "workload"),
        ("defaults=base.yaml", "only a config file can name a parent"),
        ("world.ranks=[", "not YAML"),
        ("world.ranks=\x07", "is not allowed in YAML"),
        ("shape.topk=40", "--set shape.topk=40: topk 40 is more than the 32 experts"),
        ("shape={topk: 40, x: 1}", "shape.x = 1: unknown key"),
    ],
)
def test_a_problem_of_a_setting_names_the_setting(tmp_path, setting, expected):
    error = refused(write(tmp_path, "workload: layer\n"), setting)
    assert all(problem.where.startswith("--set ") for problem in error.problems)
    assert any(expected in str(problem) for problem in error.problems)
    assert "--set" in str(error)
