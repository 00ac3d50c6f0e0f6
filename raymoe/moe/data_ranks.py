"""The ranks that train the same layers: those of one world, or of several worlds with a copy of the experts each."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from raymoe.errors import ConfigError
from raymoe.memory.process_group import is_known
from raymoe.memory.world import World


class DataRanks:
    """The ranks of a process group, seen from the world of some layers. All ranks of the group make one together.

    Without a process group they are the ranks of the world alone.
    """

    def __init__(self, world: World, group: Any) -> None:
        self.world, self.group = world, group
        self.size: int = world.size if group is None else dist.get_world_size(group)
        if self.size % world.size:
            raise ConfigError(
                f"the layers' experts are spread over {world.size} ranks, and {self.size} ranks were taken as those "
                "that train them: give group=, the process group of all ranks that have a copy of these layers"
            )

    @classmethod
    def of(cls, world: World, group: Any = None) -> DataRanks:
        """Return the ranks that train the layers of a world, by default those of torch's default process group.

        That is not taken where it has fewer ranks than the world, whose ranks then met by other means.
        """
        if group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() >= world.size:
            group = dist.group.WORLD
        return cls(world, group)

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Add the numbers of all ranks, in place. Where there is no process group, the host waits."""
        if self.size == 1:
            return numbers
        if self.group is not None:
            dist.all_reduce(numbers, group=self.group)
            return numbers
        rows = self.world.swap(numbers.tolist(), "a sum over the ranks of a layer")
        return numbers.copy_(torch.tensor(rows, dtype=numbers.dtype).sum(dim=0))

    def replicas(self) -> Any:
        """Return the process group of the ranks that hold the same experts as this one; None if there is no other.

        The first call for a world and a group makes it.
        """
        if self.size == self.world.size:
            return None
        return self.world.shared(Replicas).of(self.group)


class Replicas:
    """The process groups of the ranks with the same experts as this one. The world closes them (`World.shared`)."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def of(self, group: Any) -> Any:
        """Return the group of the ranks of `group` that have this rank's place in their worlds."""
        if group not in self._groups or not is_known(self._groups[group]):
            places: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(places, (self._world.size, self._world.rank, dist.get_rank()), group=group)
            self._groups[group] = self._new(places, group)
        return self._groups[group]

    def _new(self, places: list[tuple[int, int, int]], group: Any) -> Any:
        own = self._world.size, self._world.rank
        ranks = [rank for size, place, rank in places if (size, place) == own]
        if len(ranks) != len(places) // self._world.size:
            sizes = sorted({size for size, _, _ in places})
            raise ConfigError(
                f"{len(ranks)} of {len(places)} ranks have place {own[1]} in a world of {own[0]} ranks; there are "
                f"worlds of {sizes} ranks: give group=, the process group of all ranks that have a copy of these layers"
            )
        return dist.new_group(ranks, backend=dist.get_backend_config(group), use_local_synchronization=True)

    def close(self, together: bool) -> None:  # noqa: ARG002 - the world says it to all that it closes
        """Destroy them, unless torch.distributed has gone first."""
        for made in list(self._groups.values()):
            if is_known(made):
                dist.destroy_process_group(made)
