"""Drawn shapes, dtypes, blocks and interleavings of the kernels that stream rows through one GPU."""

from __future__ import annotations

import random

import pytest
import torch

from raymoe.rows import pipe_shape
from raymoe.rows.pipe_shape import Limits
from tests.unit.rows import test_pipe_backward_emulated as backward
from tests.unit.rows import test_pipe_emulated as norms
from tests.unit.rows import test_pipe_pieces_emulated as pieces

LOADINGS = ("PIPED", "PIPED", "PIPED", None, "IN_TURN", "PLAIN", "ROW")


def draw(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one drawn case of each kind of kernel."""
    draws = random.Random(seed)
    for name, values in {
        "CONSUMER_WARPS": (1, 2, 3, 4, 5),
        "WIDE_WARPS": (4,),
        "PLAIN_WARPS": (4,),
        "TILE_BYTES": (64, 700, 2048),
        "DEEPEST": (1, 2, 3),
        "PIECE": (16, 48, 96),
        "PLAIN_PIECE": (16, 64),
        "BLOCK_WARPS": (1, 2, 4),
        "FEW_ROWS": (0,),
    }.items():
        monkeypatch.setattr(pipe_shape, name, draws.choice(values))
    dtype = draws.choice([torch.bfloat16, torch.float16, torch.float32])
    hidden, rows = 8 * draws.choice([1, 2, 9, 16, 33, 65, 128, 131]), draws.choice([1, 2, 5, 11, 26])
    loading = draws.choice(LOADINGS)
    stages = draws.choice([None, None, 1, 2, 3, 4, 7])
    limits = Limits(stages=stages if loading in (None, "PIPED") else None, loading=loading)
    gap, fp8 = draws.choice([0, 8]), draws.choice(["", "row", "column"])
    registers = draws.choice([8, 16, 72])
    drawn = norms.NormCase(rows, hidden, dtype, limits, fp8, draws.random() < 0.4, gap, max(registers, 8))
    norms.run_rms_norm(drawn, monkeypatch, seed)
    norms.test_layer_norm_equals_float64(drawn, draws.random() < 0.5, monkeypatch)
    end = draws.choice([None, None, 0, rows // 2, rows])
    piece = pieces.Case(rows, hidden, dtype, limits, fp8, gap, end)
    pieces.test_swiglu_equals_float64(piece)
    pieces.judge_quantised(piece)
    pieces.judge_gradient(piece)
    pieces.judge_weighted_gradients(piece)
    monkeypatch.setattr(pipe_shape, "GRADIENT_BUDGET", draws.choice([16, 96, 256]))
    on = Limits(backward.SMS, limits.stages, limits.loading)
    case = backward.Case(rows, hidden, dtype, on, gap=gap, budget=96, add=draws.random() < 0.5)
    backward.test_gradients_equal_float64(case, draws.choice(["rms", "layer"]), monkeypatch)


@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_rows_equal_float64(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(seed, monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_drawn_rows_equal_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100, 300):
        try:
            draw(seed, monkeypatch)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
