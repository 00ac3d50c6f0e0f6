"""The kernel of kernels/alltoallv.cu, which takes the parameters of a dispatch."""

from __future__ import annotations

from raymoe.device.dispatch import DispatchParams, stamps
from raymoe.device.jit import KernelSource
from raymoe.device.peer import Peers
from raymoe.device.sync import STRUCTS


def alltoallv_source(stamped: bool = False) -> KernelSource:
    """The kernel for rows that cross as they are."""
    return KernelSource("alltoallv", (DispatchParams, Peers, *STRUCTS), stamps(stamped))
