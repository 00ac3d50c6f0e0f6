"""From a transport's name to the thing that moves bytes. What GPU ranks need is imported for them alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raymoe.memory.world import World
from raymoe.transport.mover import Mover
from raymoe.transport.spec import ChannelSpec

if TYPE_CHECKING:
    from raymoe.transport.nccl_group import NcclGroup


def open_mover(world: World, spec: ChannelSpec, transport: str, group: NcclGroup | None) -> Mover:
    """The mover of this rank; all ranks open theirs together, by the same name."""
    if transport == "host":
        from raymoe.transport.host_copy import HostMover

        return HostMover(world, spec)
    if transport == "tma":
        from raymoe.transport.tma import TmaMover

        return TmaMover(world, spec)
    if transport == "copy_engine":
        from raymoe.transport.copy_engine import CopyEngineMover

        return CopyEngineMover(world, spec)
    from raymoe.transport.nccl import NcclMover

    return NcclMover(world, spec, group)
