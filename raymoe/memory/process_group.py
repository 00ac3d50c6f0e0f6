"""Take from a torch.distributed process group what a world needs: its ranks, and one gather over them."""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from raymoe.errors import ConfigError, WiringError
from raymoe.memory.auto_device import VisibleGpus, device_of_group

EXPERT_DIMENSION = "ep"
"""The dimension of a device mesh for expert parallelism, as torchtitan, transformers and others name it."""


@dataclass(frozen=True)
class RankReport:
    """The message of one rank to the others: the descriptor of its memory, or the reason why it has none."""

    descriptor: dict[str, object] | None
    problem: str | None
    nonce: str


class Ranks:
    """The ranks of a process group while a world is made. All ranks call the same methods."""

    known_address: str | None = None

    def __init__(self, group: object) -> None:
        self.group = _process_group(group)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.name = str(self.group.group_name)
        bound = getattr(self.group, "bound_device_id", None)
        self._bound: int | None = bound.index if bound is not None and bound.type == "cuda" else None
        backends = _backends(self.group)
        # A backend that serves CPUs too, such as Gloo, does not say that the group is for GPUs.
        self._has_cuda = "cuda" in backends and backends["cuda"] != backends.get("cpu")

    def device(self, device: str) -> str:
        """Choose the device of this rank's world."""
        return device_of_group(device, self._bound, self._has_cuda, VisibleGpus.now())

    def gather(
        self, device: torch.device | None, descriptor: dict[str, object] | None, problem: Exception | None
    ) -> tuple[str, list[dict[str, Any]]]:
        """Gather a name for the world and the descriptors of all ranks. Where one has a problem, all ranks raise.

        `device` is the device of this rank's world, if the world is open.
        """
        own = RankReport(descriptor, None if problem is None else _sentence(problem), secrets.token_hex(4))
        reports: list[Any] = [None] * self.size
        try:
            with self._current_device(device):
                dist.all_gather_object(reports, own, group=self.group)
        except RuntimeError as error:
            raise problem or WiringError(
                f"a world of process group {self.name} was asked for on rank {self.rank} of {self.size}, and the "
                f"gather failed: {_sentence(error)}; every rank of the group calls World.of, and with NCCL each needs "
                "a GPU of its own: call torch.cuda.set_device(LOCAL_RANK) first"
            ) from error
        if problem is not None:
            raise problem
        for rank, other in enumerate(reports):
            if not isinstance(other, RankReport):
                kind = type(other).__name__
                raise WiringError(
                    f"a world of process group {self.name} was asked for on rank {self.rank} of {self.size}, and rank "
                    f"{rank} gave a {kind} instead: it is in another collective; all ranks must call in one order"
                )
            if other.problem is not None:
                raise WiringError(f"rank {rank} of process group {self.name} could not take part: {other.problem}")
        return f"{self.name}-{reports[0].nonce}", [other.descriptor for other in reports]

    def _current_device(self, device: torch.device | None) -> AbstractContextManager[object]:
        """Make this rank's GPU current: NCCL gathers on the current device, which may be the same on all ranks."""
        ordinal = device.index if self._bound is None and device is not None else self._bound
        if not self._has_cuda or ordinal is None:
            return nullcontext()
        context: AbstractContextManager[object] = torch.cuda.device(ordinal)
        return context


def _sentence(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _process_group(group: object) -> Any:
    """Return the process group of the argument `group` of World.of, after a check that this process is in it."""
    wanted = "a world of the default process group" if group is None else f"a world of a {type(group).__name__}"
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            f"{wanted} was asked for, and torch.distributed is not initialised: call "
            "torch.distributed.init_process_group first (torchrun sets what it needs), or use raymoe.join in Ray actors"
        )
    if group is None:
        return dist.group.WORLD
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        return _group_of_mesh(group)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"a world of a process group was asked for on rank {dist.get_rank()}, which is not in the group; only its "
            "members call World.of"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"{wanted} was asked for; a ProcessGroup, a DeviceMesh or nothing is needed")
    return _checked(group, wanted)


def is_known(group: Any) -> bool:
    """Whether torch.distributed knows a group: it was made by init_process_group or new_group, and not destroyed."""
    return _unknown(group) is None


def _unknown(group: Any) -> Exception | None:
    """Return torch's error for a group that it does not know."""
    try:
        dist.get_backend_config(group)
    except (RuntimeError, TypeError, ValueError) as error:
        return error
    return None


def _checked(group: Any, wanted: str) -> Any:
    """Return the group, after a check that it can be used: torch has no clear error for one that cannot."""
    if (error := _unknown(group)) is not None:
        raise ConfigError(
            f"{wanted} was asked for, and torch.distributed does not know the group: it was destroyed, or was not made "
            "by init_process_group or new_group"
        ) from error
    return group


def _group_of_mesh(mesh: Any) -> Any:
    """Return the process group of the mesh's expert dimension, after a check that this process is in it."""
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    if EXPERT_DIMENSION not in names and (names or mesh.ndim != 1):
        dimensions = f"dimensions {', '.join(names)}" if names else f"{mesh.ndim} dimensions without names"
        raise ConfigError(
            f"a world of a DeviceMesh was asked for, which has {dimensions} and none called {EXPERT_DIMENSION!r}; give "
            "the mesh such a dimension, or pass the group of another one: mesh.get_group(dimension)"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"a world of a DeviceMesh was asked for on rank {dist.get_rank()}, which is not in the mesh; only its "
            "members call World.of"
        )
    try:
        group = mesh.get_group(EXPERT_DIMENSION) if names else mesh.get_group()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"a world of a DeviceMesh was asked for, which has no process group: {_sentence(error)}"
        ) from error
    return _checked(group, "a world of a DeviceMesh")


def _backends(group: Any) -> dict[str, str]:
    """Return the backend of each kind of device, for example {'cpu': 'gloo', 'cuda': 'nccl'}."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {kind: name for kind, _, name in pairs}
