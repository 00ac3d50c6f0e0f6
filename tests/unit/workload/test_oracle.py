"""The oracle accepts correct results and detects every injected error in rows and weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from raymoe.moe.experts import GPT_OSS, SWIGLU, Experts, ModelWeights
from raymoe.moe.weights import ExpertShape, expert_biases, expert_weights
from raymoe.workload import oracle
from raymoe.workload.inputs import Batch, Draw, Routing
from raymoe.workload.oracle import BOUNDS, LAYER_SLACK, AffineExperts, LayerExperts, error_of, want

T, H, E, K, R = 48, 32, 8, 3, 4
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUTING = Routing("uniform", seed=3, ranks=R, tokens=T, experts=E, topk=K, masked=0.1)
Rows = Callable[[int, torch.Tensor], torch.Tensor]


def simulated_exchange(x: torch.Tensor, draw: Draw, rows: Rows, fault: str = "") -> torch.Tensor:
    """Compute an exchange in float32, rounded once on each rank and once at the source; `fault` breaks one thing."""
    sums = torch.zeros(R, *x.shape)
    for token in range(T):
        for choice, expert in enumerate(draw.ids[token].tolist()):
            broken = token == T // 2 and choice == 1 and draw.ids[token].min() >= 0
            if expert < 0 or (broken and fault == "missing row"):
                continue
            row, weight = rows(expert, x[token : token + 1])[0], draw.weights[token, choice]
            if broken and fault == "wrong row":
                row = rows(expert, x[token - 1 : token])[0]
            if broken and fault == "dropped weight":
                weight = torch.tensor(1.0)
            if broken and fault == "neighbour's weight":
                weight = draw.weights[token, 0]
            if broken and fault == "row twice":
                weight = 2 * weight
            if broken and fault == "shifted columns":
                row = row.roll(1)
            if fault == "swapped experts" and expert in (4, 5):
                row = rows(9 - expert, x[token : token + 1])[0]
            sums[expert // (E // R), token] += weight * row.float()
    return sums.to(x.dtype).float().sum(0).to(x.dtype)


def affine(dtype: torch.dtype) -> tuple[torch.Tensor, Draw, AffineExperts]:
    x = (2 * torch.rand(T, H, generator=torch.Generator().manual_seed(1)) - 1).to(dtype)
    return x, ROUTING.draw(1, 0), AffineExperts(H, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_correct_result_is_within_the_bound(dtype: torch.dtype) -> None:
    x, draw, rows = affine(dtype)
    error = want(x, draw.ids, draw.weights, rows).error_of(simulated_exchange(x, draw, rows))
    assert 0 < error <= BOUNDS[dtype]


FAULTS = ("wrong row", "missing row", "row twice", "dropped weight", "neighbour's weight", "swapped experts")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [*FAULTS, "shifted columns"])
def test_an_injected_error_exceeds_the_bound(dtype: torch.dtype, fault: str) -> None:
    x, draw, rows = affine(dtype)
    assert want(x, draw.ids, draw.weights, rows).error_of(simulated_exchange(x, draw, rows, fault)) > 2 * BOUNDS[dtype]


def test_nan_a_wrong_shape_and_output_for_a_masked_token_are_infinite_errors() -> None:
    x, draw, rows = affine(torch.float32)
    ids = draw.ids.clone()
    ids[5] = -1
    wanted = want(x, ids, draw.weights, rows)
    assert bool((wanted.y[5] == 0).all())
    right = simulated_exchange(x, Draw(ids, draw.weights), rows)
    assert wanted.error_of(right) <= BOUNDS[torch.float32]
    assert wanted.error_of(right[:-1]) == torch.inf
    for token, value in ((5, 1e-30), (5, torch.nan), (6, torch.nan), (6, torch.inf)):
        wrong = right.clone()
        wrong[token, 3] = value
        assert wanted.error_of(wrong) == torch.inf


def test_batches_without_tokens_and_with_only_masked_tokens_are_judged() -> None:
    x, draw, rows = affine(torch.float32)
    assert want(x[:0], draw.ids[:0], draw.weights[:0], rows).error_of(x[:0]) == 0
    nothing = want(x, torch.full_like(draw.ids, -1), draw.weights, rows)
    assert nothing.error_of(torch.zeros(T, H)) == 0 and nothing.error_of(x) == torch.inf


def test_a_result_checked_in_pieces_has_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    x, draw, rows = affine(torch.float32)
    batch, found = Batch(x, draw.ids, draw.weights), simulated_exchange(x, draw, rows)
    in_one_piece = error_of(found, batch, rows)
    monkeypatch.setattr(oracle, "PIECE_BYTES", 5 * 8 * H)
    assert error_of(found, batch, rows) == in_one_piece > 0
    for token in (0, 4, 5, T - 1):
        wrong = found.clone()
        wrong[token] += 1
        assert error_of(wrong, batch, rows) > 0.1
    assert error_of(found[:-1], batch, rows) == torch.inf
    assert error_of(found[:0], Batch(x[:0], draw.ids[:0], draw.weights[:0]), rows) == 0


def test_an_expert_named_twice_by_one_token_counts_twice() -> None:
    rows = AffineExperts(H, torch.float32)
    x = torch.ones(1, H)
    twice = want(x, torch.tensor([[2, 2]]), torch.tensor([[0.25, 0.5]]), rows)
    torch.testing.assert_close(twice.y, 0.75 * rows(2, x))


def test_affine_experts_differ_and_are_never_near_zero() -> None:
    rows = AffineExperts(64, torch.float32)
    x = torch.linspace(-1, 1, 64).expand(2, 64)
    made = torch.stack([rows(expert, x)[0] for expert in range(256)])
    assert float(made.abs().min()) >= 0.5 and float(made.abs().max()) <= 4.0
    distances = torch.cdist(made, made, p=torch.inf) + 9 * torch.eye(256)
    assert float(distances.min()) > 1.0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["swiglu", "gpt_oss"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "ffn"), [(8, 4), (32, 8), (256, 64)])
def test_experts_stay_within_the_layer_bound(dtype: torch.dtype, hidden: int, ffn: int, kind: str) -> None:
    shape = ExpertShape(hidden, ffn, dtype)
    # A fault is in one row. Of another draw that row may have a weight that hides it.
    x, draw = torch.randn(T, hidden, generator=torch.Generator().manual_seed(4)).to(dtype), ROUTING.draw(0, 4)
    made = [expert_weights] if kind == "swiglu" else [expert_weights, expert_biases]
    drawn = [[draw_one(shape, 5, expert) for expert in range(E)] for draw_one in made]
    weights = (torch.stack([getattr(one, name) for one in each]) for each in drawn for name in ("gate_up", "down"))
    experts = Experts(ModelWeights(*weights), SWIGLU if kind == "swiglu" else GPT_OSS)
    exact = LayerExperts(shape, seed=5, kind=kind)

    def rows(expert: int, x: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(E, dtype=torch.int32)
        counts[expert] = len(x)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)))
        return experts(x.to(dtype), offsets, counts).detach()

    wanted = want(x, draw.ids, draw.weights, exact, by_row=True)
    bound = LAYER_SLACK * BOUNDS[dtype]
    assert wanted.error_of(simulated_exchange(x, draw, rows)) <= bound
    for fault in FAULTS:
        assert wanted.error_of(simulated_exchange(x, draw, rows, fault)) > bound, fault
