"""Rows of a dispatch as the workload's experts read them: from either layout, with their scales."""

from __future__ import annotations

import pytest
import torch

from raymoe.exchange.backend import Dispatched
from raymoe.workload.exchange.received import received

ROWS, HIDDEN = 5, 320


def dispatched(x: torch.Tensor, **more: torch.Tensor) -> Dispatched:
    nothing = torch.zeros(0)
    fields = {"x": x, "weights": nothing, "expert_offsets": nothing, "expert_counts": nothing, "index": None}
    return Dispatched(**{**fields, **more}, tokens=0, _saved=None, _owner=None)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales; the scales of all rows for a block are contiguous, as GEMMs need them."""
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % 128)).view(len(x), -1, 128)
    scales = blocks.abs().amax(dim=-1) / 448
    values = (blocks / scales[..., None]).to(torch.float8_e4m3fn).view(len(x), -1)[:, : x.shape[1]]
    return values.contiguous(), scales.T.contiguous().T


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_received_rows_with_scales_are_dequantised(layout: str) -> None:
    x = torch.rand(ROWS, HIDDEN, generator=torch.Generator().manual_seed(0)) - 0.5
    values, scales = quantised(x)
    assert scales.stride() == (1, ROWS)
    index = torch.tensor([4, 0, 3, 2, 1]) if layout == "rank" else None
    got = dispatched(values, scales=scales, **({} if index is None else {"index": index}))
    want = x[1:4] if index is None else x[index[1:4]]
    rows = received(got, slice(1, 4))
    assert rows.dtype == torch.float32
    assert float((rows - want).abs().max()) <= 0.5 / 28


def test_received_rows_without_scales_are_unchanged() -> None:
    x = torch.arange(10.0).view(5, 2)
    assert received(dispatched(x), slice(2, 4)).tolist() == x[2:4].tolist()
    index = torch.tensor([3, 3, 0])
    assert received(dispatched(x, index=index), slice(1, 3)).tolist() == x[[3, 0]].tolist()
