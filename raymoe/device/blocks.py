"""The kernels around the copies of a dispatch by the copy engine, which take the parameters of a dispatch."""

from __future__ import annotations

from raymoe.device.dispatch import DispatchParams, stamps
from raymoe.device.jit import KernelSource
from raymoe.device.peer import Peers
from raymoe.device.sync import STRUCTS

ANNOUNCE = KernelSource("announce", (DispatchParams, Peers, *STRUCTS))
ANNOUNCE_THREADS = 32
"""As BLOCK_WARPS in kernels/announce.cu says."""


def pack_source(stamped: bool = False) -> KernelSource:
    """The kernel that puts rows where the copy engine takes them from."""
    return KernelSource("pack", (DispatchParams, Peers, *STRUCTS), stamps(stamped))
