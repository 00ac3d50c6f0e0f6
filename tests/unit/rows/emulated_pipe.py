"""Runs the kernels of raymoe/rows on the emulator, with torch's memory on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from raymoe.cuda.launch import Shape
from raymoe.rows.row_launch import KernelCall
from tests.emulator.build import Change
from tests.emulator.machine import Emulator

_MOST_STEPS = 30_000_000
SENTINEL = 0x5A
ERRORS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}
"""Largest relative error of one rounding, and of sums in float32."""


def run_call(
    call: KernelCall, tensors: Sequence[torch.Tensor], sms: int = 2, seed: int = 0, changes: Sequence[Change] = ()
) -> None:
    """Run one launch; it may reach the storages of these tensors, its counter if it is dynamic, and nothing else."""
    if not call.tiles:
        return
    counter = torch.zeros(1, dtype=torch.int32)
    if call.dynamic:
        params: Any = call.params
        call = replace(call, params=replace(params, work=replace(params.work, taken=counter.data_ptr())))
        tensors = [*tensors, counter]
    with Emulator(1, _MOST_STEPS, changes) as emulator:
        for begin, nbytes in {(each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()) for each in tensors}:
            if nbytes:
                emulator.reach(begin, nbytes, f"a tensor of {call.source.stem}")
        shape = Shape(call.blocks(sms), call.threads, call.shared_bytes)
        emulator.launch(0, call.source, shape, call.params)
        emulator.run(seed)
    assert not counter.any(), "the counter of tiles is not 0 for the next launch"


def tensors_of(kernel: Any) -> list[torch.Tensor]:
    """The tensors among the fields of a call."""
    assert is_dataclass(kernel)
    found: list[torch.Tensor] = []
    for each in fields(kernel):
        value = getattr(kernel, each.name)
        found += [one for one in (value if isinstance(value, list | tuple) else [value]) if torch.is_tensor(one)]
    return found


@dataclass
class Strided:
    """A matrix whose rows lie `gap` elements apart from one another, between bytes that no kernel may write."""

    matrix: torch.Tensor
    whole: torch.Tensor

    @classmethod
    def empty(cls, rows: int, hidden: int, dtype: torch.dtype, gap: int = 0) -> Strided:
        item = torch.empty(0, dtype=dtype).element_size()
        whole = torch.full((max(rows, 1), (hidden + gap) * item), SENTINEL, dtype=torch.uint8)
        return cls(whole.view(dtype)[:rows, :hidden], whole)

    def check_gaps(self) -> None:
        """Raise if a byte outside the matrix has changed."""
        rows, row_bytes = self.matrix.shape[0], self.matrix.shape[1] * self.matrix.element_size()
        assert bool((self.whole[:, row_bytes:] == SENTINEL).all()), "a byte between two rows was written"
        assert bool((self.whole[rows:] == SENTINEL).all()), "a byte after the last row was written"


def filled(rows: int, hidden: int, dtype: torch.dtype, gap: int = 0, seed: int = 0) -> Strided:
    strided = Strided.empty(rows, hidden, dtype, gap)
    strided.matrix.copy_(torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)) * 3 + 0.5)
    return strided


def scales_for(rows: int, hidden: int, layout: str) -> torch.Tensor:
    blocks = -(-hidden // 128)
    scales = torch.full((blocks, rows) if layout == "column" else (rows, blocks), -1.0)
    return scales.T if layout == "column" else scales


def judge_fp8(values: torch.Tensor, scales: torch.Tensor, want: torch.Tensor) -> None:
    """Values times scales must be `want` within one rounding; scales are the blocks' largest magnitudes over 448."""
    hidden = want.shape[1]
    padded = torch.nn.functional.pad(want, (0, -hidden % 128)).view(want.shape[0], -(-hidden // 128), 128)
    largest = padded.abs().amax(2)
    assert torch.allclose(scales.double(), torch.where(largest == 0, 1.0, largest / 448), rtol=1e-5)
    got = values.double() * scales.double().repeat_interleave(128, 1)[:, :hidden]
    bound = want.abs() * 2**-4 + scales.double().repeat_interleave(128, 1)[:, :hidden] * 2**-9
    assert bool(((got - want).abs() <= bound * 1.01).all())


def close(got: torch.Tensor, want: torch.Tensor, size: float = 0.01) -> None:
    """Results must differ by one rounding, and by errors of numbers of magnitude `size` on the way."""
    error = (got.double() - want).abs()
    assert bool((error <= ERRORS[got.dtype] * (want.abs() + size) * 1.1).all()), f"error {float(error.max())}"
