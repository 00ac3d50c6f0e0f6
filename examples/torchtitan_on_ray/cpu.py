"""Adds what torchtitan 0.3 lacks on CPU ranks with torch 2.13. Import it before other modules of torchtitan."""

from __future__ import annotations

import types
from typing import Any

import torch
import torchtitan.tools.utils as tools
from torch import nn


class Cpu(types.ModuleType):
    """The functions of `torch.cuda` that torchtitan asks of a device, for a CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, *_: object) -> str:
        return "cpu"

    def get_device_properties(self, *_: object) -> Any:
        return types.SimpleNamespace(total_memory=1 << 34, name="cpu")

    def mem_get_info(self, *_: object) -> tuple[int, int]:
        return 1 << 33, 1 << 34

    def memory_stats(self, *_: object) -> dict[str, int]:
        return {}

    def max_memory_allocated(self, *_: object) -> int:
        return 0

    def current_device(self) -> int:
        return 0

    def set_device(self, *_: object) -> None: ...

    def empty_cache(self) -> None: ...

    def reset_peak_memory_stats(self, *_: object) -> None: ...


tools.device_type, tools.device_module = "cpu", Cpu("cpu_device")  # torchtitan takes "cuda" where there is none
if not hasattr(torch.distributed, "set_timeout"):  # newer than torch 2.13
    torch.distributed.set_timeout = lambda *_, **__: None  # type: ignore[attr-defined]

# Only now: they copy the name of the device.
from torchtitan.config import derive, override  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402


def sum_without_scale(model: nn.Module) -> None:
    """Let FSDP divide after its reductions: Gloo has no reduction that divides."""
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)


@override(target=FlexAttention.Config, description="attention that runs eagerly on CPUs")
def sdpa(cfg: Any) -> Any:
    return derive(cfg, ScaledDotProductAttention.Config)
