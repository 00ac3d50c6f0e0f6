"""What an exchange holds of the memory of each rank's GPU. No torch in here; `room.py` adds it all up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.workspace import Bounds, slot_bytes_of, workspace_layout
from raymoe.job.rules import OTHER_SYSTEMS
from raymoe.memory.heap import ITEM_BYTES, Layout, Region
from raymoe.workload.other_heap import PROCESS_BYTES, heap_bytes

if TYPE_CHECKING:
    from raymoe.job import Job

FLUSH_BYTES = 256 << 20
"""Of the buffer that is written to empty the L2 cache: more than twice that of any GPU so far."""

PIECE_BYTES = 64 << 20
"""A large result is checked in pieces of about so many bytes of float64."""

_PIECES, _DRAWN = 8, 6
"""What the oracle holds of such pieces at a time, and copies of the tokens of a rank while fresh ones are drawn in
float32 and compared."""

ENTRY_BYTES = 24
"""Of an entry (token, k), what a dispatch leaves for its combine: place, weight, index, and what is rounded up."""


def push_layout(ranks: int, tokens: int, row_bytes: int) -> Layout:
    """The heap of the yardstick row_push, whose words kernels/row_push.cu describes."""
    return Layout.of([Region.words("arrived", ranks), Region("slots", (ranks, tokens, row_bytes), "uint8")])


def exchange_device_bytes(job: Job, spec: ExchangeSpec, batches: int) -> int:
    """The heap of a case, its batches of tokens, and the rows that go into experts and come out of them.

    Of the backends, those of NCCL have no heap; what they hold instead is no larger.

    >>> from raymoe.job import load_job
    >>> from raymoe.workload.room import batches_of, spec_of
    >>> job = load_job("host_exchange", ["shape.hidden=7168", "shape.experts=256", "shape.topk=8", "shape.tokens=4096"])
    >>> round(exchange_device_bytes(job, spec_of(job), batches=3) / 2**30, 1)
    7.9
    """
    ranks = job.world.ranks
    tokens = spec.tokens * spec.row_bytes
    if job.exchange.backend == "row_push":
        row_bytes = slot_bytes_of(spec, stamped=False)
        pushed = spec.tokens * row_bytes
        return push_layout(ranks, spec.tokens, row_bytes).nbytes + pushed + batches * tokens + FLUSH_BYTES
    if job.exchange.backend in OTHER_SYSTEMS:
        return heap_bytes(spec, ranks) + PROCESS_BYTES + (batches + 3) * tokens + FLUSH_BYTES
    # Rows as dispatch gives them: values and scales take less than rows of the dtype.
    rows = 2 * spec.rows(ranks) * spec.row_bytes
    held = workspace_layout(Bounds.of(spec), ranks).nbytes + rows + (batches + 3) * tokens + FLUSH_BYTES
    held += 2 * ranks * spec.tokens * spec.topk * ENTRY_BYTES
    if job.steps.verify:
        # An expert with all tokens of all ranks, in float64, twice; and what the oracle makes of this rank's tokens.
        expert = ranks * spec.tokens * spec.hidden * 8
        drawn = _DRAWN * spec.tokens * spec.hidden * ITEM_BYTES["float32"]
        held += 2 * expert + _PIECES * PIECE_BYTES + drawn
    return held
