"""The parameters of the kernels around the rail of an exchange between domains.

A combine runs kernels/tell_statuses.cu before it and sum_domains.cu behind it. Neither waits for another GPU, and both
run from compute capability 8.0 on.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymoe.device.dispatch import ROW_TYPES
from raymoe.device.jit import KernelSource
from raymoe.device.params import U32, Address, Params


@dataclass(frozen=True)
class TellStatusesParams(Params):
    """Twin of the struct in kernels/tell_statuses.cu, which describes the fields."""

    record: Address = 0
    number: Address = 0
    leaving: Address = 0
    statuses: Address = 0
    domains: U32 = 0
    per_domain: U32 = 0
    index: U32 = 0
    weighted: U32 = 0


@dataclass(frozen=True)
class SumDomainsParams(Params):
    """Twin of the struct in kernels/sum_domains.cu, which describes the fields."""

    leaving: Address = 0
    returned: Address = 0
    statuses: Address = 0
    leaving_entries: Address = 0
    returned_entries: Address = 0
    y: Address = 0
    out_entries: Address = 0
    refused: Address = 0
    domains: U32 = 0
    ranks: U32 = 0
    index: U32 = 0
    tokens: U32 = 0
    chunk: U32 = 0
    topk: U32 = 0
    given: U32 = 0
    row_bytes: U32 = 0
    wire_row_bytes: U32 = 0
    pieces: U32 = 0


TELL_STATUSES = KernelSource("tell_statuses", (TellStatusesParams,))


def sum_source(dtype: str, wire: str) -> KernelSource:
    """Return the kernel that adds the domains' sums, which cross as `wire`."""
    types = (("ROW_TYPE", ROW_TYPES[dtype]), ("WIRE_TYPE", ROW_TYPES[wire]))
    return KernelSource("sum_domains", (SumDomainsParams,), types)
