"""The kernel of kernels/alltoallv.cu: what it takes."""

from __future__ import annotations

from dataclasses import dataclass

from raymoe.device.dispatch import DispatchParams, stamps
from raymoe.device.jit import KernelSource
from raymoe.device.params import U32, Params
from raymoe.device.peer import Peers
from raymoe.device.sync import STRUCTS


@dataclass(frozen=True)
class AlltoallvParams(Params):
    """Twin of the struct in kernels/alltoallv.cu."""

    dispatch: DispatchParams
    rows_moved: U32 = 0
    unused: U32 = 0


def alltoallv_source(stamped: bool = False) -> KernelSource:
    """The kernel for rows that cross as they are."""
    return KernelSource("alltoallv", (AlltoallvParams, DispatchParams, Peers, *STRUCTS), stamps(stamped))
