"""Whether rows may travel between the GPUs of a world in lines that say themselves that they are whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raymoe.device.nvml import nvlinked

if TYPE_CHECKING:
    from raymoe.memory.world import World


class Links:
    """Of a world of GPU ranks, found out once by all of them (`World.shared`).

    A line of 128 bytes, data and epoch in one, arrives whole over NVLink. Over PCIe it may arrive in parts, so that the
    epoch is there before the data.
    """

    def __init__(self, world: World) -> None:
        gpus = world.swap(world.gpu.uuid, "links: GPUs")
        linked = all(nvlinked(world.gpu.uuid, str(peer)) for peer in gpus)
        self.lines = all(world.swap(linked, "links: NVLink"))
        """Whether NVLink is between every two GPUs of the world. Where NVML does not know, flags follow the rows."""

    def close(self, together: bool) -> None:
        """Nothing is held."""
