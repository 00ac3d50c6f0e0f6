"""The parameters of the kernels around the rail of an exchange between domains.

They are in kernels/domains/. A dispatch runs publish_tokens.cu, enter_domain.cu and join_experts.cu, a combine
publish_statuses.cu and sum_domains.cu, in this order. Where rows cross in chunks, advance_chunk.cu follows each chunk.
None waits for another GPU, and all run from compute capability 8.0 on.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import ROW_TYPES, U32, U64, Address, Params


@dataclass(frozen=True)
class PublishTokensParams(Params):
    """Twin of the struct in kernels/domains/publish_tokens.cu, which describes the fields."""

    topk_idx: Address = 0
    topk_weights: Address = 0
    num_tokens: Address = 0
    ids: Address = 0
    weights: Address = 0
    x_rows: U32 = 0
    tokens: U32 = 0
    topk: U32 = 0
    wide_topk_idx: U32 = 0


@dataclass(frozen=True)
class EnterDomainParams(Params):
    """Twin of the struct in kernels/domains/enter_domain.cu, which describes the fields."""

    published: Address = 0
    ids: Address = 0
    weights: Address = 0
    dispatches: Address = 0
    number: Address = 0
    published_bytes: U64 = 0
    domains: U32 = 0
    tokens: U32 = 0
    chunk: U32 = 0
    topk: U32 = 0
    first: U32 = 0
    here: U32 = 0
    experts: U32 = 0
    unused: U32 = 0


@dataclass(frozen=True)
class ChunkParams(Params):
    """Twin of the struct in kernels/domains/advance_chunk.cu, which describes the fields."""

    words: Address = 0
    aborted: Address = 0
    chunk: U32 = 0
    unused: U32 = 0


@dataclass(frozen=True)
class JoinExpertsParams(Params):
    """Twin of the struct in kernels/domains/join_experts.cu, which describes the fields."""

    offsets_inside: Address = 0
    counts_inside: Address = 0
    expert_offsets: Address = 0
    expert_counts: Address = 0
    local: U32 = 0
    domains: U32 = 0


@dataclass(frozen=True)
class PublishStatusesParams(Params):
    """Twin of the struct in kernels/domains/publish_statuses.cu, which describes the fields."""

    record: Address = 0
    number: Address = 0
    outgoing: Address = 0
    statuses: Address = 0
    domains: U32 = 0
    per_domain: U32 = 0
    index: U32 = 0
    weighted: U32 = 0
    site: U32 = 0
    carries: U32 = 0


@dataclass(frozen=True)
class SumDomainsParams(Params):
    """Twin of the struct in kernels/domains/sum_domains.cu, which describes the fields."""

    outgoing: Address = 0
    returned: Address = 0
    statuses: Address = 0
    outgoing_entries: Address = 0
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
    first: U32 = 0
    end: U32 = 0
    row_bytes: U32 = 0
    wire_row_bytes: U32 = 0
    pieces: U32 = 0
    unused: U32 = 0


PUBLISH_TOKENS = KernelSource("domains/publish_tokens", (PublishTokensParams,))
ENTER_DOMAIN = KernelSource("domains/enter_domain", (EnterDomainParams,))
ADVANCE_CHUNK = KernelSource("domains/advance_chunk", (ChunkParams,))
"""The kernel that announces a chunk of rows. Its block has 32 threads."""
JOIN_EXPERTS = KernelSource("domains/join_experts", (JoinExpertsParams,))
PUBLISH_STATUSES = KernelSource("domains/publish_statuses", (PublishStatusesParams,))


def sum_source(dtype: str, wire: str) -> KernelSource:
    """Return the kernel that adds the domains' sums, which cross as `wire`."""
    types = (("ROW_TYPE", ROW_TYPES[dtype]), ("WIRE_TYPE", ROW_TYPES[wire]))
    return KernelSource("domains/sum_domains", (SumDomainsParams,), types)
