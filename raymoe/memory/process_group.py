"""What a world needs of a torch.distributed process group: who is in it, and one gather of all ranks."""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from raymoe.errors import ConfigError, WiringError
from raymoe.memory.auto_device import Sight, device_of_group

if TYPE_CHECKING:
    from raymoe.memory.world import World

EXPERTS = "ep"
"""The dimension of a device mesh that expert parallelism has, in torchtitan, transformers and others."""


@dataclass(frozen=True)
class Told:
    """What one rank tells the others: how to reach its memory, or why it has none."""

    descriptor: dict[str, object] | None
    problem: str | None
    nonce: str


class Ranks:
    """The ranks of a process group, for as long as a world is being made. All of them call the same methods."""

    def __init__(self, group: object) -> None:
        self._group = _process_group(group)
        self.rank, self.size = self._group.rank(), self._group.size()
        self.name = str(self._group.group_name)
        bound = getattr(self._group, "bound_device_id", None)
        self._bound: int | None = bound.index if bound is not None and bound.type == "cuda" else None
        backends = _backends(self._group)
        # A backend that CPUs have too, Gloo for one, does not say which of both is meant.
        self._has_cuda = "cuda" in backends and backends["cuda"] != backends.get("cpu")

    def device(self, asked: str) -> str:
        """The device that this rank's world is to be on."""
        return device_of_group(asked, self._bound, self._has_cuda, Sight.now())

    def gather(
        self, world: World | None, descriptor: dict[str, object] | None, problem: Exception | None
    ) -> tuple[str, list[dict[str, Any]]]:
        """A name for the world, and the descriptors of all ranks. Where one has a problem, all ranks raise."""
        mine = Told(descriptor, None if problem is None else _sentence(problem), secrets.token_hex(4))
        told: list[Any] = [None] * self.size
        try:
            with self._current_device(world):
                dist.all_gather_object(told, mine, group=self._group)
        except RuntimeError as error:
            raise problem or WiringError(
                f"a world of process group {self.name} asked for on rank {self.rank} of {self.size}, and the group did "
                f"not gather: {_sentence(error)}; every rank of it calls World.of, with NCCL each on a GPU of its own: "
                "call torch.cuda.set_device(LOCAL_RANK) first"
            ) from error
        if problem is not None:
            raise problem
        for rank, other in enumerate(told):
            if not isinstance(other, Told):
                kind = type(other).__name__
                raise WiringError(
                    f"a world of process group {self.name} asked for on rank {self.rank} of {self.size}, and rank "
                    f"{rank} gave a {kind} instead: it is in another collective; all ranks keep one order"
                )
            if other.problem is not None:
                raise WiringError(f"rank {rank} of process group {self.name} could not take part: {other.problem}")
        return f"{self.name}-{told[0].nonce}", [other.descriptor for other in told]

    def _current_device(self, world: World | None) -> AbstractContextManager[object]:
        """NCCL gathers objects on the current device, which may be the same one on all ranks."""
        ordinal = world.device.index if self._bound is None and world is not None else self._bound
        if not self._has_cuda or ordinal is None:
            return nullcontext()
        device: AbstractContextManager[object] = torch.cuda.device(ordinal)
        return device


def _sentence(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _process_group(given: object) -> Any:
    """The process group that is meant, after making sure that this process is in it."""
    asked = "a world of the default process group" if given is None else f"a world of a {type(given).__name__}"
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            f"{asked} asked for, and torch.distributed is not initialised: call "
            "torch.distributed.init_process_group first (torchrun sets what it needs), or use raymoe.join in Ray actors"
        )
    if given is None:
        return dist.group.WORLD
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(given, DeviceMesh):
        return _of_mesh(given)
    if given == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"a world of a process group asked for on rank {dist.get_rank()}, which is not in the group; only its "
            "members call World.of"
        )
    if not isinstance(given, dist.ProcessGroup):
        raise ConfigError(f"{asked} asked for; a ProcessGroup, a DeviceMesh or nothing is needed")
    return _known(given, asked)


def _known(group: Any, asked: str) -> Any:
    """The group, after making sure that it can be used: torch itself has no clear word for one that cannot."""
    try:
        dist.get_backend_config(group)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{asked} asked for, and torch.distributed does not know the group: it was destroyed, or is none of "
            "init_process_group and new_group"
        ) from error
    return group


def _of_mesh(mesh: Any) -> Any:
    """The group of a mesh's expert dimension, that this process is in."""
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    if EXPERTS not in names and (names or mesh.ndim != 1):
        there = f"dimensions {', '.join(names)}" if names else f"{mesh.ndim} dimensions without names"
        raise ConfigError(
            f"a world of a DeviceMesh asked for, which has {there} and none called {EXPERTS!r}; give the mesh such a "
            "dimension, or pass the group of another one: mesh.get_group(dimension)"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"a world of a DeviceMesh asked for on rank {dist.get_rank()}, which is not in the mesh; only its members "
            "call World.of"
        )
    try:
        group = mesh.get_group(EXPERTS) if names else mesh.get_group()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"a world of a DeviceMesh asked for, which has no process group: {_sentence(error)}"
        ) from error
    return _known(group, "a world of a DeviceMesh")


def _backends(group: Any) -> dict[str, str]:
    """The backend of each kind of device, for example {'cpu': 'gloo', 'cuda': 'nccl'}."""
    pairs = (each.partition(":") for each in dist.get_backend_config(group).split(","))
    return {kind: name for kind, _, name in pairs}
