"""What keys ask of one another."""

import pytest

from raymoe.job import load_job
from tests.unit.configs_on_disk import problems, write

IMPOSSIBLE = [
    ("layer", "world.ranks=3", "32 experts do not divide among 3 ranks, 30 or 33 would"),
    ("layer", "shape.experts=30", "30 experts do not divide among 4 ranks, 28 or 32 would"),
    ("exchange", "shape.topk=33", "topk 33 is more than the 32 experts"),
    ("exchange", "shape.hidden=1023", "a row of 1023 bfloat16 has 2046 bytes, not a multiple of 16, hidden 1024 would"),
    ("exchange", "exchange.wire=float16", "rows of bfloat16 cannot cross as float16"),
    ("exchange", "exchange.wire.combine=float32", "rows of bfloat16 cannot cross as float32"),
    ("exchange", "exchange.capacity=100", "some rank receives at least 2048, at least 2048, or worst"),
    ("exchange", "routing.kind=trace", "kind trace without a file"),
    ("exchange", "routing.alpha=2", "means nothing with routing.kind uniform, it belongs to zipf"),
    ("exchange", "routing.share=0.2", "means nothing with routing.kind uniform, it belongs to hot"),
    ("exchange", "routing.file=x.npy", "means nothing with routing.kind uniform, it belongs to trace"),
    ("p2p", "world.ranks=1", "one rank has no peer to send to"),
    ("layer", "world.device=cuda", "workload layer has no GPU ranks yet"),
    ("layer", "steps.graph=true", "CUDA graphs need GPU ranks and these are CPU ranks"),
    ("p2p", "world.share_gpu=true", "a GPU is to be shared and device is auto"),
]


@pytest.mark.parametrize(("workload", "setting", "told"), IMPOSSIBLE, ids=[setting for _, setting, _ in IMPOSSIBLE])
def test_impossible_combinations_are_put_down_to_what_was_given_last(tmp_path, workload, setting, told):
    found = problems(tmp_path, f"workload: {workload}\n", setting)
    assert len(found) == 1
    assert found[0].startswith("--set ") and told in found[0]


def test_rows_that_offsets_cannot_count(tmp_path):
    (found,) = problems(tmp_path, "workload: layer\nshape: {tokens: 16777216, topk: 64, experts: 64}\n")
    assert "line 2, shape.tokens = 16777216: up to 4294967536 rows on a rank, offsets count to 2147483647" in found


@pytest.mark.parametrize(
    "settings",
    [
        ["workload=p2p", "world.ranks=3"],
        ["world.ranks=1", "shape.tokens=1"],
        ["shape.hidden=4", "shape.dtype=float32"],
        ["exchange.wire=bfloat16"],
        ["exchange.wire={dispatch: bfloat16, combine: bfloat16}"],
        ["exchange.capacity=2048"],
        ["exchange.capacity=1", "routing.masked=1"],
        ["exchange.capacity=1", "routing.ragged=true"],
        ["routing.kind=zipf", "routing.alpha=1e-1"],
        ["routing.kind=hot", "routing.share=1"],
        ["steps.graph=false"],
    ],
    ids=str,
)
def test_possible_combinations(tmp_path, settings):
    load_job(write(tmp_path, "workload: layer\n"), settings)


def test_a_trace_is_found_beside_its_config(tmp_path):
    config = write(tmp_path, "workload: layer\nrouting: {kind: trace, file: ids.npy}\n", "jobs/x.yaml")
    (tmp_path / "jobs/ids.npy").touch()
    assert load_job(config).routing.file == str(tmp_path / "jobs/ids.npy")


def test_a_trace_that_is_not_there(tmp_path):
    (found,) = problems(tmp_path, "workload: layer\nrouting:\n  kind: trace\n  file: ids.npy\n")
    assert found == "x.yaml: line 4, routing.file = ids.npy: no such file, looked for ids.npy"


def test_sections_of_other_workloads_are_typed_and_left_out(tmp_path):
    job = load_job(write(tmp_path, "workload: layer\np2p: {bytes: [4KiB]}\n"))
    assert "p2p" not in job.resolved()
    assert "p2p.bytes" in problems(tmp_path, "workload: layer\np2p: {bytes: [4Kb]}\n")[0]


def test_a_later_layer_takes_the_meaning_of_an_inherited_key_away(tmp_path):
    config = write(tmp_path, "workload: layer\nrouting: {kind: zipf, alpha: 2}\n")
    assert load_job(config, ["routing.kind=uniform"]).resolved()["routing"].get("alpha") is None
    assert load_job(config).routing.alpha == 2
