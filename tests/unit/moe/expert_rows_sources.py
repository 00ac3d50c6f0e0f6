"""The kernels of raymoe/moe/expert_kernels.py as they are launched, without memory."""

from __future__ import annotations

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.exchange.backend import EntryPlaces
from raymoe.moe.expert_kernels import (
    ActivationForm,
    AddExpertBias,
    ExpertSums,
    GatedActivation,
    GatedActivationBackward,
    Places,
    WeighGradients,
    new_sums,
)
from raymoe.moe.kept_rows import KeptRowsCopy

ROWS, FFN, EXPERTS = 4096, 2880, 16
GPT_OSS = ActivationForm(interleaved=True, alpha=1.702, limit=7.0, up_plus=1.0)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def expert_rows_sources() -> list[KernelSource]:
    rows, wide, weights = tensor(ROWS, FFN), tensor(ROWS, 2 * FFN), tensor(ROWS, dtype=torch.float32)
    offsets, counts = tensor(EXPERTS + 1, dtype=torch.int32), tensor(EXPERTS, dtype=torch.int32)
    places = Places(offsets, counts)
    calls = []
    for form, biased, weighted in ((GPT_OSS, True, True), (ActivationForm(), True, True), (GPT_OSS, False, False)):
        bias, share = tensor(EXPERTS, 2 * FFN) if biased else None, weights if weighted else None
        calls.append(GatedActivation(form, wide, bias, share, rows, places).kernel_call())
        back = GatedActivationBackward(form, rows, wide, bias, share, wide, share, places)
        calls.append(back.kernel_call())
    for share in (weights, None):
        calls.append(AddExpertBias(rows, tensor(EXPERTS, FFN), share, rows, places).kernel_call())
        calls.append(ExpertSums(rows, share, new_sums(rows, EXPERTS), places).kernel_call())
    calls.append(WeighGradients(rows, tensor(EXPERTS, FFN), None, weights, places).kernel_call())
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        dy = tensor(ROWS, FFN, dtype=dtype)
        calls.append(WeighGradients(dy, dy, weights, weights, Places(offsets)).kernel_call())
    calls.append(WeighGradients(rows, None, weights, None, Places(offsets)).kernel_call())
    pairs = tensor(2, 128, 8, 2, dtype=torch.int32)
    entries = EntryPlaces(pairs[..., 0], tensor(2, dtype=torch.int32))
    others = tensor(128, FFN)
    for again in (False, True):
        calls.append(KeptRowsCopy(entries, 0, others, others, rows, places, 16, again).kernel_call())
    return [call.source for call in calls]
