"""Cases of a matrix: their names, their order, and matrices that are refused."""

import pytest

from raymoe.config import job_from_resolved, load_job
from tests.unit.config.configs_on_disk import problems, write


def test_cases_are_named_and_ordered_as_in_the_file(tmp_path):
    job = load_job(
        write(
            tmp_path, "workload: exchange\nmatrix: {exchange.backend: [host, collective], shape.tokens: [128, 4096]}\n"
        )
    )
    cases = job.cases()
    assert [case.name for case in cases] == [
        "backend=host,tokens=128",
        "backend=host,tokens=4096",
        "backend=collective,tokens=128",
        "backend=collective,tokens=4096",
    ]
    assert [case.index for case in cases] == [0, 1, 2, 3]
    assert (cases[1].job.exchange.backend, cases[1].job.shape.tokens, cases[1].job.matrix) == ("host", 4096, {})
    assert cases[1].job.cases()[0].job == cases[1].job


def test_a_job_without_a_matrix_has_one_case(tmp_path):
    job = load_job(write(tmp_path, "workload: layer\n"))
    (case,) = job.cases()
    assert (case.name, case.index, case.job) == ("default", 0, job)


def test_case_names_show_values_of_every_type(tmp_path):
    text = "workload: layer\nmatrix: {routing.kind: [zipf], routing.alpha: [1, 1e-1], steps.verify: [true, false]}\n"
    names = [case.name for case in load_job(write(tmp_path, text)).cases()]
    assert names[0] == "kind=zipf,alpha=1.0,verify=true"
    assert names[-1] == "kind=zipf,alpha=0.1,verify=false"


def test_case_names_use_the_last_part_of_a_nested_key(tmp_path):
    text = "workload: layer\nmatrix: {exchange.wire.dispatch: [bfloat16], exchange.wire.combine: [bfloat16]}\n"
    assert load_job(write(tmp_path, text)).cases()[0].name == "dispatch=bfloat16,combine=bfloat16"


def test_a_key_may_apply_in_some_cases_only(tmp_path):
    text = "workload: exchange\nrouting: {alpha: 2}\nmatrix: {routing.kind: [uniform, zipf]}\n"
    job = load_job(write(tmp_path, text))
    assert job.cases()[1].job.routing.alpha == 2
    assert "alpha" not in job.cases()[0].job.resolved()["routing"]
    assert job_from_resolved(job.resolved()) == job


WRONG = [
    ("world.ranks: [1, 2]", "matrix.world.ranks = [1, 2]: a matrix cannot vary world"),
    ("shape.tokens: 4", "matrix.shape.tokens = 4: a list of values is wanted"),
    ("shape.tokens: []", "matrix.shape.tokens = []: a list of values is wanted"),
    ("shape.tokens: [0]", "matrix.shape.tokens = 0: 0 is below the least value 1"),
    ("shape.tokens: [x]", "matrix.shape.tokens = x: a whole number is wanted"),
    ("shape.tokens: [[1]]", "matrix.shape.tokens = [1]: one value is wanted"),
    ("shape.tokens: [~]", "matrix.shape.tokens = ~: one value is wanted"),
    ("shape.tokens: [4, 4]", "matrix.shape.tokens = 4: the same value again"),
    ("shape.topk: [2, 40]", "matrix.shape.topk = 40: topk 40 is more than the 32 experts (case topk=40)"),
    ("shape.tokns: [4]", "no such key, did you mean 'shape.tokens'?"),
    ("tokens: [4]", "no such key, did you mean 'shape.tokens'?"),
    ("shape: [4]", "no such key"),
    ("name: [a, b]", "no such key"),
    ("p2p.bytes: [1, 2]", "it takes a list itself, list the values in p2p.bytes"),
    ("exchange.backend: [host, mpi]", "matrix.exchange.backend = mpi: not one of auto, fused, staged"),
    ("exchange.backend: [host, row_push]", "row_push is no exchange, so no layer can use it"),
    ("exchange.sms: [12, x]", "matrix.exchange.sms = x: must be auto, or a number from 1 to 1024"),
    ("routing.alpha: [1, 2]", "means nothing with routing.kind uniform, it belongs to zipf"),
    ("p2p.protocol: [put, get]", "the cases protocol=put and protocol=get are the same"),
    ("shape.tokens: [4], shape.tokens: [5]", "duplicate key"),
]


@pytest.mark.parametrize(("matrix", "expected"), WRONG, ids=[matrix for matrix, _ in WRONG])
def test_a_wrong_matrix_is_reported_at_its_line(tmp_path, matrix, expected):
    reported = problems(tmp_path, f"workload: layer\nmatrix: {{{matrix}}}\n")
    assert expected in reported[0]
    assert reported[0].startswith("x.yaml: line 2")


def test_more_than_1000_cases_are_refused(tmp_path):
    many = ", ".join(str(i) for i in range(1, 101))
    text = f"workload: layer\nmatrix: {{shape.tokens: [{many}], steps.count: [{many}], routing.seed: [{many}]}}\n"
    assert problems(tmp_path, text) == ["x.yaml: line 2, matrix: 1000000 cases, at most 1000 are run"]


def test_every_case_is_checked(tmp_path):
    text = "workload: layer\nshape: {topk: 8}\nmatrix:\n  shape.experts: [8,\n    4,\n    6]\n"
    assert problems(tmp_path, text) == [
        "x.yaml: line 5, matrix.shape.experts = 4: topk 8 is more than the 4 experts (case experts=4), at most 4",
        "x.yaml: line 6, matrix.shape.experts = 6: 6 experts do not divide among 4 ranks (case experts=6), "
        "4 or 8 would",
        "x.yaml: line 6, matrix.shape.experts = 6: topk 8 is more than the 6 experts (case experts=6), at most 6",
    ]


@pytest.mark.parametrize("setting", ["shape.tokens=4", "shape={tokens: 4}"])
def test_a_setting_on_a_key_of_the_matrix_is_refused(tmp_path, setting):
    reported = problems(tmp_path, "workload: layer\nmatrix: {shape.tokens: [1, 2]}\n", setting)
    assert reported[0].startswith(f"--set {setting}") and "the matrix already varies shape.tokens" in reported[0]


def test_a_setting_may_change_the_matrix_itself(tmp_path):
    config = write(tmp_path, "workload: layer\nmatrix: {shape.tokens: [1, 2]}\n")
    cases = load_job(config, ["matrix.shape.tokens=[8]", "matrix.steps.count=[1, 2]"]).cases()
    assert [case.name for case in cases] == ["tokens=8,count=1", "tokens=8,count=2"]
