"""Decide in how many chunks rows cross between domains."""

from __future__ import annotations

from collections.abc import Sequence

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8
from raymoe.net.rail import RAIL_BLOCKS

CHUNK_BYTES, MOST_CHUNKS = 4 << 20, 8
"""The least bytes of a rank's block of a chunk, and the most chunks, with `auto`.

Beside a rail of 45 GB/s that one H200 mirrors, 8 chunks were best for 4096 tokens of 14 KiB. With 512 tokens, two
chunks of a dispatch gained 5 % at most, and 8 lost time; chunks of a combine gained 6 % at most
(docs/evidence/domains.md).
"""

SMS_BESIDE = RAIL_BLOCKS + 1
"""SMs that a dispatch leaves free while rows cross, for NCCL's blocks and for the kernel that advances a word. The
dispatch waits for these kernels. Without a free SM they would wait for the dispatch."""


def crossing_bytes(spec: ExchangeSpec) -> int:
    """Bytes of a row of dispatch on the rail; its scales cross with its ids."""
    return spec.hidden if spec.dispatch_wire == FP8 else spec.row_bytes


def chunk_of(spec: ExchangeSpec, chunk: int | str, reasons: Sequence[str]) -> int:
    """Return the tokens of a chunk for the caller's `chunk`; 0: all rows cross at once. `reasons` say why they must.

    >>> spec = ExchangeSpec(tokens=4096, hidden=7168, experts=256, topk=8)  # 56 MiB
    >>> chunk_of(spec, "auto", ()), chunk_of(spec, "auto", ("sms",)), chunk_of(spec, 600, ()), chunk_of(spec, 4096, ())
    (512, 0, 600, 0)
    >>> from dataclasses import replace
    >>> [chunk_of(replace(spec, tokens=tokens), "auto", ()) for tokens in (585, 586, 1024)]  # from 8 MiB on
    [0, 293, 342]
    >>> chunk_of(spec, 600, ("backend staged does not wait for chunks: take fused",))
    Traceback (most recent call last):
    raymoe.errors.ConfigError: chunk is 600, and backend staged does not wait for chunks: take fused
    """
    if chunk == "auto":
        chunks = 0 if reasons else min(MOST_CHUNKS, spec.tokens * crossing_bytes(spec) // CHUNK_BYTES)
        return -(-spec.tokens // chunks) if chunks > 1 else 0
    if int(chunk) >= spec.tokens:
        return 0
    if reasons:
        raise ConfigError(f"chunk is {chunk}, and {reasons[0]}")
    return int(chunk)


def sms_beside(limit: int | None, most: int) -> int:
    """Return the SMs that a chunked dispatch may take on GPUs of `most`. `limit` is the caller's, if there is one."""
    return most - SMS_BESIDE if limit is None else limit


def too_many_sms(limit: int | None, most: int) -> str | None:
    """Return why a dispatch on `limit` of `most` SMs cannot wait for chunks, and what to do; None where it can.

    >>> too_many_sms(123, most=132), too_many_sms(None, most=132)
    (None, None)
    >>> too_many_sms(128, most=132)
    'sms is 128 of 132, but 9 stay free for NCCL in a dispatch that waits for chunks: take sms 123 or fewer'
    >>> too_many_sms(None, most=8)
    'the GPU has 8 SMs, but 9 stay free for NCCL in a dispatch that waits for chunks: leave chunk out'
    """
    free = f"{SMS_BESIDE} stay free for NCCL in a dispatch that waits for chunks"
    if most < SMS_BESIDE + 2:
        return f"the GPU has {most} SMs, but {free}: leave chunk out"
    if limit is not None and limit > most - SMS_BESIDE:
        return f"sms is {limit} of {most}, but {free}: take sms {most - SMS_BESIDE} or fewer"
    return None
