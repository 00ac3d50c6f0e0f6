"""Routing: the properties of each kind's ids, and that every draw can be repeated."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

from raymoe.errors import ConfigError, DataRefused
from raymoe.workload.inputs import Routing

KINDS = ("uniform", "zipf", "hot")


def make(kind: str = "uniform", **changes: object) -> Routing:
    given = {"seed": 7, "ranks": 4, "tokens": 512, "experts": 16, "topk": 4} | changes
    return Routing(kind, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_distinct_and_in_range_and_weights_sum_to_one(kind: str) -> None:
    draw = make(kind).draw(1, 3)
    assert draw.ids.shape == draw.weights.shape == (512, 4)
    assert draw.ids.dtype == torch.int64 and draw.weights.dtype == torch.float32
    assert int(draw.ids.min()) >= 0 and int(draw.ids.max()) < 16
    ordered = draw.ids.sort(dim=-1).values
    assert bool((ordered[:, 1:] > ordered[:, :-1]).all())
    torch.testing.assert_close(draw.weights.sum(dim=-1), torch.ones(512))
    assert bool((draw.weights > 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_depends_only_on_seed_rank_and_step(kind: str) -> None:
    first = make(kind).draw(1, 3)
    torch.rand(5)  # the process-wide generator has no effect
    again = make(kind).draw(1, 3)
    assert torch.equal(first.ids, again.ids) and torch.equal(first.weights, again.weights)
    others = (make(kind).draw(2, 3), make(kind).draw(1, 4), make(kind, seed=8).draw(1, 3))
    assert all(not torch.equal(first.ids, other.ids) for other in others)


def test_topk_of_all_experts_names_each_once() -> None:
    ids = make(topk=16).draw(0, 0).ids
    assert torch.equal(ids.sort(dim=-1).values, torch.arange(16).expand(512, 16))


def test_uniform_names_every_expert_equally_often() -> None:
    counts = torch.bincount(make(tokens=8192).draw(0, 0).ids.flatten(), minlength=16)
    assert float(counts.float().std() / counts.float().mean()) < 0.05


def test_zipf_popularity_follows_alpha() -> None:
    counts = torch.bincount(make("zipf", tokens=20000, topk=1, alpha=1.0).draw(0, 0).ids.flatten(), minlength=16)
    found = counts.sort(descending=True).values.float() / counts.sum()
    want = 1 / torch.arange(1, 17)
    torch.testing.assert_close(found, want / want.sum(), atol=0.01, rtol=0.0)


def test_zipf_permutes_by_the_seed_and_agrees_between_ranks() -> None:
    def favourite(seed: int, rank: int) -> int:
        ids = make("zipf", seed=seed, topk=1, alpha=2.0).draw(rank, 0).ids
        return int(torch.bincount(ids.flatten()).argmax())

    assert {favourite(7, rank) for rank in range(4)} == {favourite(7, 0)}
    assert len({favourite(seed, 0) for seed in range(8)}) > 2


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_hot_gives_its_share_of_tokens_the_hot_expert_first(share: float) -> None:
    routing = make("hot", share=share, experts=256)
    first = routing.draw(2, 0).ids[:, 0] == routing.hot_expert
    assert int(first.sum()) == pytest.approx(share * 512, abs=8)


def test_hot_with_one_choice_sends_all_tokens_to_one_expert() -> None:
    routing = make("hot", share=1.0, topk=1)
    assert bool((routing.draw(0, 0).ids == routing.hot_expert).all())


def test_masked_masks_its_share_of_ids_and_keeps_the_weights() -> None:
    plain, masked = make(tokens=4096).draw(0, 0), make(tokens=4096, masked=0.3).draw(0, 0)
    gone = masked.ids == -1
    assert float(gone.float().mean()) == pytest.approx(0.3, abs=0.02)
    assert torch.equal(masked.ids[~gone], plain.ids[~gone])
    assert torch.equal(masked.weights, plain.weights)
    assert bool((make(masked=1.0).draw(0, 0).ids == -1).all())


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ragged_has_an_empty_rank_and_a_full_one(ranks: int) -> None:
    routing = make(ranks=ranks, ragged=True)
    counts = [routing.tokens_of(rank) for rank in range(ranks)]
    assert 0 in counts and 512 in counts and all(0 <= count <= 512 for count in counts)
    assert [routing.draw(rank, 0).ids.shape for rank in range(ranks)] == [(count, 4) for count in counts]
    assert make(ranks=1, ragged=True).tokens_of(0) > 0


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    path = tmp_path / "ids.npy"
    numpy.save(path, numpy.arange(3 * 8 * 2, dtype=numpy.int32).reshape(3, 8, 2) % 16)
    return path


def trace(path: Path, **changes: object) -> Routing:
    return make("trace", **({"file": str(path), "tokens": 2, "topk": 2} | changes))


def test_trace_gives_each_rank_its_rows_and_wraps_over_steps(traced: Path) -> None:
    table = torch.from_numpy(numpy.load(traced)).long()
    assert torch.equal(trace(traced).draw(1, 0).ids, table[0, 2:4])
    assert torch.equal(trace(traced).draw(3, 4).ids, table[1, 6:8])
    assert torch.equal(trace(traced, tokens=8).draw(3, 2).ids, table[2])
    assert trace(traced).recorded == 3 and make("zipf").recorded == 0


def test_trace_of_one_step_repeats(tmp_path: Path) -> None:
    numpy.save(tmp_path / "one.npy", numpy.array([[0, 1], [-1, 2]]))
    routing = trace(tmp_path / "one.npy")
    assert torch.equal(routing.draw(0, 0).ids, routing.draw(3, 9).ids)


@pytest.mark.parametrize("bad", [16, -2])
def test_trace_with_an_id_out_of_range_is_refused_with_numbers(tmp_path: Path, bad: int) -> None:
    numpy.save(tmp_path / "bad.npy", numpy.array([[0, 1], [3, bad]]))
    with pytest.raises(DataRefused, match=f"{bad}.*16 experts"):
        trace(tmp_path / "bad.npy").draw(0, 0)


def test_impossible_traces_are_config_errors(tmp_path: Path, traced: Path) -> None:
    numpy.save(tmp_path / "floats.npy", numpy.zeros((2, 2)))
    numpy.save(tmp_path / "flat.npy", numpy.zeros(4, dtype=numpy.int64))
    numpy.save(tmp_path / "none.npy", numpy.zeros((0, 2, 2), dtype=numpy.int64))
    (tmp_path / "text.npy").write_text("0 1 2 3")
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("floats.npy", "flat.npy", "none.npy", "text.npy", "empty.npy", "missing.npy", "."):
        with pytest.raises(ConfigError, match="npy" if name != "." else "trace"):
            trace(tmp_path / name).draw(0, 0)
    with pytest.raises(ConfigError, match=r"\[3 or 12, 2\].*\[3, 8, 2\]"):
        trace(traced, tokens=3).draw(0, 0)
    with pytest.raises(ConfigError, match=r"routing\.file"):
        trace(traced, file=None).draw(0, 0)
