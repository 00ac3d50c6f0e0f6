"""Refuse data parallelism that takes the experts of a layer over, before it changes them.

Each rank has other experts. DDP would overwrite them by those of rank 0, and FSDP2 would spread each rank's over all.
torch says so in no case: of DTensors it raises errors about meshes and mixed tensors, and plain tensors it just takes.

- **DDP** registers the model as its submodule after it knows what to ignore, and before it sends anything. torch has a
  hook for registrations.
- **FSDP2** has no hook before it changes parameters. But it asks each module for its parameters in a function that has
  those to ignore as an argument, so `Experts.named_parameters` reads it in the caller's frame. With a torch whose
  function has another name, nothing is refused.

A layer whose world has one rank has all experts on it, so data parallelism may take them.
"""

from __future__ import annotations

import functools
from types import FrameType
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from raymoe.errors import ConfigError

if TYPE_CHECKING:
    from raymoe.moe.experts import Experts

_COLLECTS = "_get_managed_states"
"""The function of FSDP2 that collects parameters."""


@functools.cache
def watch_ddp() -> None:
    """Refuse experts in DDP from now on."""
    register_module_module_registration_hook(_refuse_in_ddp)


def _refuse_in_ddp(wrapper: nn.Module, name: str, model: nn.Module | None) -> None:  # noqa: ARG001  (torch's signature)
    from raymoe.moe.experts import Experts

    if not isinstance(wrapper, DistributedDataParallel) or model is None:
        return
    ignored = wrapper.parameters_to_ignore
    for path, module in model.named_modules():
        if isinstance(module, Experts) and module.spread:
            taken = [full for full, _ in module.named_parameters(path) if full not in ignored]
            if taken:
                raise ConfigError(
                    f"DistributedDataParallel was given {', '.join(taken)}, and would overwrite the experts of each "
                    "rank by those of rank 0: call DistributedDataParallel._set_params_and_buffers_to_ignore_for_model("
                    "model, list(raymoe.moe.expert_parameters(model))) before"
                )


def refuse_in_fsdp(experts: Experts, caller: FrameType) -> None:
    """Raise if `caller` is FSDP2, which collects the parameters that it spreads, and does not ignore these."""
    if not experts.spread or caller.f_code.co_name != _COLLECTS:
        return
    ignored = caller.f_locals.get("ignored_params") or ()
    taken = [name for name, each in experts._parameters.items() if each is not None and each not in ignored]
    if taken:
        raise ConfigError(
            f"fully_shard was given {', '.join(taken)} of a layer's experts, and would spread those of each rank over "
            "all ranks: call fully_shard(model, ignored_params=set(raymoe.moe.expert_parameters(model).values()))"
        )
