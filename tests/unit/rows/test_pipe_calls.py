"""The calls of raymoe/rows: blocks of a launch, and tensors that kernels cannot take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.rows.elementwise_kernels import Swiglu
from raymoe.rows.norm_kernels import LayerNorm, RmsNorm, RmsNormBackward
from raymoe.rows.pipe_shape import MOST_HIDDEN, SHARED_BYTES, Limits, RowWork, piece_shape, row_shape
from raymoe.rows.row_launch import KernelCall

BF16 = torch.bfloat16
ROWS = RmsNorm(torch.zeros(9, 64), torch.zeros(64), torch.zeros(9, 64))


def big(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


REFUSED = {
    "multiples of 8": replace(ROWS, x=torch.zeros(9, 60), out=torch.zeros(9, 60), weight=torch.zeros(60)),
    "up to 32768": RmsNorm(big(9, 40960), big(40960), big(9, 40960)),
    "has the shape \\(8, 64\\)": replace(ROWS, out=torch.zeros(8, 64)),
    "a weight or bias has the shape": replace(ROWS, weight=torch.zeros(32)),
    "must have one dtype": replace(ROWS, out=torch.zeros(9, 64, dtype=BF16)),
    "a tensor of float64": replace(ROWS, x=torch.zeros(9, 64).double(), out=torch.zeros(9, 64).double()),
    "make it contiguous": replace(ROWS, x=torch.zeros(64, 9).T),
    "both must be multiples of 16": replace(ROWS, x=torch.zeros(9, 66)[:, :64]),
    "needs both the residual and": replace(ROWS, residual=torch.zeros(9, 64)),
    "scales are": replace(ROWS, out=torch.zeros(9, 64).to(torch.float8_e4m3fn), scales=torch.zeros(9, 2)),
    "float8_e4m3fn .* is needed": replace(ROWS, scales=torch.zeros(9, 1)),
}


@pytest.mark.parametrize("says", REFUSED)
def test_tensors_that_a_norm_cannot_take_are_refused(says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        REFUSED[says].kernel_call(Limits())


def test_a_weight_and_a_bias_have_one_dtype() -> None:
    call = LayerNorm(ROWS.x, ROWS.weight, torch.zeros(64, dtype=BF16), ROWS.out)
    with pytest.raises(ConfigError, match="must have one dtype"):
        call.kernel_call(Limits())


@pytest.mark.parametrize("field", ["sms", "stages"])
def test_limits_are_at_least_one(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is 0; it is at least 1"):
        Limits(**{field: 0})


def rms_norm_of(rows: int, limits: Limits) -> tuple[KernelCall, str]:
    call = RmsNorm(big(rows, 7168), big(7168), big(rows, 7168)).kernel_call(limits)
    return call, dict(call.source.defines)["PIPE_LOADING"]


def test_a_pipeline_has_as_many_blocks_as_its_turns_need_and_no_more_than_tiles() -> None:
    call, loading = rms_norm_of(1024, Limits())
    assert (loading, call.blocks(132), call.blocks(48), call.blocks(64)) == ("PIPED", 132, 47, 64)  # 8, 22, 16 turns
    assert rms_norm_of(40, Limits(loading="PIPED"))[0].blocks(132) == 40
    gate_up, out = big(4096, 4096), big(4096, 2048)
    counted = Swiglu(gate_up, out, torch.zeros(9, dtype=torch.int32, device="meta"))
    assert counted.kernel_call(Limits(47)).blocks(47) == 47, "how many tiles there will be is not known"


@pytest.mark.parametrize("rows", [400, 16384])
def test_few_and_many_rows_go_without_a_pipeline_in_a_block_each(rows: int) -> None:
    call, loading = rms_norm_of(rows, Limits())
    assert (loading, call.blocks(132)) == ("ROW", rows)
    assert rms_norm_of(rows, Limits(48))[1] == "PIPED"


def backward_of(
    rows: int, limits: Limits, *, hidden: int = 7168, dtype: torch.dtype = BF16, add: bool = False
) -> tuple[str, str, int, int]:
    """Loading, warps, blocks and rows of partial sums."""
    x, vector = big(rows, hidden, dtype=dtype), big(hidden, dtype=dtype)
    calls = RmsNormBackward(x, x, vector, x, vector, d_total=x if add else None).kernel_calls(limits)
    defines = dict(calls.gradients.source.defines)
    blocks = calls.gradients.blocks(limits.sms or 0)
    return defines["PIPE_LOADING"], defines["PIPE_WARPS"], blocks, calls.partials.shape[1]


def test_gradients_of_no_more_rows_than_sms_have_a_block_for_each_row() -> None:
    assert backward_of(128, Limits(132)) == ("ROW", "7", 128, 128)
    assert backward_of(128, Limits(132), add=True) == ("ROW", "14", 128, 128)
    assert backward_of(132, Limits(132), hidden=4104) == ("ROW", "5", 132, 132)
    assert backward_of(1, Limits(1), hidden=4096, dtype=torch.float32) == ("ROW", "8", 1, 1)
    for add in (False, True):
        assert backward_of(48, Limits(48), hidden=8192, add=add)[0] == "ROW"


def test_gradients_of_more_or_longer_rows_and_those_with_stages_use_the_pipeline() -> None:
    assert backward_of(133, Limits(132)) == ("PIPED", "4", 132, 132)
    assert backward_of(128, Limits(127)) == ("PIPED", "4", 127, 127)
    assert backward_of(128, Limits(132), hidden=8200)[0] == "PIPED", "threads do not hold rows of more than 16 KiB"
    assert backward_of(128, Limits(132), dtype=torch.float32)[0] == "PIPED"
    assert backward_of(128, Limits(132, stages=2))[0] == "PIPED"


def test_blocks_of_few_rows_with_a_bias_need_not_share_an_sm() -> None:
    def resident(rows: int, bias: torch.Tensor | None) -> str:
        x, weight = big(rows, 7168), big(7168)
        return dict(LayerNorm(x, weight, bias, x).kernel_call(Limits()).source.defines)["PIPE_RESIDENT"]

    found = [resident(rows, bias) for rows in (132, 133) for bias in (big(7168), None)]
    assert found == ["224", "896", "896", "896"]


def test_rows_that_a_count_bounds_take_blocks_for_the_gpu_and_not_for_the_rows() -> None:
    gate_up, out = big(1_000_000, 4096), big(1_000_000, 2048)
    counted = Swiglu(gate_up, out, torch.zeros(9, dtype=torch.int32, device="meta")).kernel_call(Limits())
    assert counted.blocks(132) == 132 * 12
    assert Swiglu(gate_up, out).kernel_call(Limits()).blocks(132) == 2_000_000


def test_the_memory_of_a_backward_has_a_row_for_each_group() -> None:
    x, vector = big(4096, 7168), big(7168)
    calls = RmsNormBackward(x, x, vector, x, vector).kernel_calls(Limits(48))
    groups = int(dict(calls.gradients.source.defines)["PIPE_GROUPS"])
    assert tuple(calls.partials.shape) == (1, calls.gradients.blocks(48) * groups, 7168)
    with pytest.raises(ConfigError, match="number of SMs"):
        RmsNormBackward(x, x, vector, x, vector).kernel_calls(Limits())


@pytest.mark.parametrize("inputs", [1, 2, 3])
@pytest.mark.parametrize("item", [2, 4])
def test_every_shape_fits_into_an_sm(item: int, inputs: int) -> None:
    for hidden in (8, 64, 72, 520, 2048, 4096, 7168, 8192, 12288, 16384, 24576, MOST_HIDDEN):
        for rows in (1, 7, 1000, 5000):
            for stages in (None, 1, 2, 3, 4, 8, 100):
                for loading in (None, "PIPED", "IN_TURN", "PLAIN", "ROW"):
                    limits = Limits(stages=stages, loading=loading)
                    work = RowWork(rows, hidden, 8 * item * inputs, inputs, 4 * item * inputs)
                    for shape in (row_shape(work, limits), piece_shape(work, limits)):
                        assert shape.shared_bytes <= SHARED_BYTES
                        assert shape.threads <= 512
                        assert shape.stages % shape.groups == 0
                        assert shape.loading != "PIPED" or 1 <= shape.stages <= max(stages or 1000, 1)
