"""The kernels of raymoe/moe/expert_rows_launches.py as they are launched, without memory."""

from __future__ import annotations

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.moe.expert_rows_launches import (
    AddExpertBias,
    ExpertSums,
    Gate,
    GatedActivation,
    GatedActivationBackward,
    Places,
    WeighGradients,
    add_expert_bias_call,
    expert_sums_call,
    gated_activation_backward_call,
    gated_activation_call,
    new_sums,
    weigh_gradients_call,
)

ROWS, FFN, EXPERTS = 4096, 2880, 16
GPT_OSS = Gate(interleaved=True, alpha=1.702, limit=7.0, up_plus=1.0)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def expert_rows_sources() -> list[KernelSource]:
    rows, wide, weights = tensor(ROWS, FFN), tensor(ROWS, 2 * FFN), tensor(ROWS, dtype=torch.float32)
    offsets, counts = tensor(EXPERTS + 1, dtype=torch.int32), tensor(EXPERTS, dtype=torch.int32)
    places = Places(offsets, counts)
    calls = []
    for gate, biased, weighted in ((GPT_OSS, True, True), (Gate(), True, True), (GPT_OSS, False, False)):
        bias, share = tensor(EXPERTS, 2 * FFN) if biased else None, weights if weighted else None
        calls.append(gated_activation_call(GatedActivation(gate, wide, bias, share, rows, places)))
        back = GatedActivationBackward(gate, rows, wide, bias, share, wide, share, places)
        calls.append(gated_activation_backward_call(back))
    for share in (weights, None):
        calls.append(add_expert_bias_call(AddExpertBias(rows, tensor(EXPERTS, FFN), share, rows, places)))
        calls.append(expert_sums_call(ExpertSums(rows, share, new_sums(rows, EXPERTS), places)))
    calls.append(weigh_gradients_call(WeighGradients(rows, tensor(EXPERTS, FFN), None, weights, places)))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        dy = tensor(ROWS, FFN, dtype=dtype)
        calls.append(weigh_gradients_call(WeighGradients(dy, dy, weights, weights, Places(offsets))))
    calls.append(weigh_gradients_call(WeighGradients(rows, None, weights, None, Places(offsets))))
    return [call.source for call in calls]
