"""Refuse data parallelism that takes the experts of a layer over, before it changes them.

Each rank has other experts. DDP would overwrite them by those of rank 0, and FSDP2 would spread each rank's over all.
torch takes plain tensors without a word. Of DTensors it raises errors about meshes and mixed tensors.

- **DDP** registers the model as its submodule after it knows what to ignore, and before it sends anything. torch has a
  hook for registrations.
- **FSDP2** has no hook before it changes parameters. But it asks each module for its parameters in a function that has
  those to ignore as an argument, so `named_parameters` reads it in the caller's frame. With a torch whose function has
  another name, nothing is refused.

A layer whose world has one rank has all experts on it, so data parallelism may take them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FrameType

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from raymoe.errors import ConfigError

_COLLECTS = "_get_managed_states"
"""The function of FSDP2 that collects parameters."""


class OwnOfRank(nn.Module):
    """A module whose parameters each rank has others of."""

    spread = False
    """Whether it is so. A world of one rank has all of them on it."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return what every module returns, but refuse FSDP2 that would spread these parameters."""
        if self.spread:
            _refuse_in_fsdp(self, sys._getframe(1))
        return super().named_parameters(prefix, recurse, remove_duplicate)


@functools.cache
def watch_ddp() -> None:
    """Refuse such modules in DDP from now on."""
    register_module_module_registration_hook(_refuse_in_ddp)


def _refuse_in_ddp(wrapper: nn.Module, name: str, model: nn.Module | None) -> None:  # noqa: ARG001  (torch's signature)
    if not isinstance(wrapper, DistributedDataParallel) or model is None:
        return
    owners = [(path, module) for path, module in model.named_modules() if isinstance(module, OwnOfRank)]
    names = [full for path, module in owners if module.spread for full, _ in module.named_parameters(path)]
    if taken := [full for full in names if full not in wrapper.parameters_to_ignore]:
        raise ConfigError(
            f"DistributedDataParallel was given {', '.join(taken)}, and would overwrite the experts of each rank by "
            "those of rank 0: call DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, "
            "list(raymoe.moe.expert_parameters(model))) before"
        )


def _refuse_in_fsdp(module: OwnOfRank, caller: FrameType) -> None:
    """Raise if `caller` is FSDP2, which collects the parameters that it spreads, and does not ignore these."""
    if caller.f_code.co_name != _COLLECTS:
        return
    ignored = caller.f_locals.get("ignored_params") or ()
    taken = [name for name, each in module._parameters.items() if each is not None and each not in ignored]
    if taken:
        raise ConfigError(
            f"fully_shard was given {', '.join(taken)} of a layer's experts, and would spread those of each rank over "
            "all ranks: call fully_shard(model, ignored_params=set(raymoe.moe.expert_parameters(model).values()))"
        )
