"""How much memory a job needs, and whether a machine or a GPU has it. No torch in here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from raymoe.config import Case, Job
from raymoe.config.job import kind_of_ranks
from raymoe.config.rules import OTHER_SYSTEMS
from raymoe.errors import PlacementError
from raymoe.exchange.spec import ExchangeSpec, slots_layout
from raymoe.exchange.workspace import Bounds, slot_bytes_of, workspace_layout
from raymoe.memory.layout import ITEM_BYTES, Layout, Region

if TYPE_CHECKING:
    from raymoe.config import Job


# What other systems hold of a GPU's memory, known before they start. No torch in here.

MOST_GROUPS = 15
"""all_to_all_vdev_2d takes that many groups of rows from a rank to a rank (torch 2.11)."""

SLACK_BYTES = 64 << 20
"""Of a heap: words, pads for signals, and what allocations are rounded up to."""

PROCESS_BYTES = 3 << 29
"""Of the GPU, for the process itself: its CUDA context, kernels and communicators."""


def groups_of(local: int) -> int:
    """How many groups the experts of a rank are sent to: as many as there may be, each of as many experts.

    >>> groups_of(64), groups_of(12), groups_of(17)
    (8, 12, 1)
    """
    return max(groups for groups in range(1, MOST_GROUPS + 1) if local % groups == 0)


def rows_there(spec: ExchangeSpec, ranks: int) -> int:
    """Rows that a rank receives at most, each group aligned; an empty one takes `alignment` rows.

    >>> rows_there(ExchangeSpec(tokens=4, hidden=64, experts=8, topk=2, alignment=16), ranks=2)
    80
    """
    return ranks * spec.tokens * spec.topk + groups_of(spec.local_experts(ranks)) * spec.alignment


def heap_bytes(spec: ExchangeSpec, ranks: int) -> int:
    """Of a symmetric heap: rows that leave, rows that arrive at worst, rows that come back."""
    return (2 * spec.tokens * spec.topk + rows_there(spec, ranks)) * spec.row_bytes + SLACK_BYTES


# What an exchange holds of the memory of each rank's GPU. No torch in here.

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

    >>> from raymoe.config import load_job
    >>> from raymoe.workload.memory_needed import batches_of, spec_of
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


# How much memory a job needs, and whether a machine or a GPU has it.
#
# No torch in here: for the host's memory it is asked before Ray starts, in a process that makes no CUDA context. What a
# GPU has is known where a rank has opened it, and compared there before anything is allocated.

GIB = 2**30
BATCHES, BATCHES_BYTES = 7, 256 * 2**20
ORACLE_BYTES = 320 * 2**20  # the most that a verified step was seen to hold beside its rows
BESIDE_BYTES = 3 * 2**29
"""Of a GPU, for each rank, beside what its cases hold: a CUDA context and kernels, NCCL's buffers, what bytes are drawn
and compared in, and the many slots of small messages. An estimate, on the large side."""


def spec_of(job: Job) -> ExchangeSpec:
    """The exchange that a job asks for."""
    shape, exchange = job.shape, job.exchange
    return ExchangeSpec(
        tokens=shape.tokens,
        hidden=shape.hidden,
        experts=shape.experts,
        topk=shape.topk,
        dtype=shape.dtype,
        layout=exchange.layout,
        alignment=exchange.alignment,
        padding=exchange.padding,
        capacity=exchange.capacity,
        wire=exchange.wire.model_dump(exclude_none=True),
        output=exchange.output,
        transport=exchange.transport,
    )


def batches_of(batch_bytes: int) -> int:
    """How many batches of tokens a rank makes in advance. An odd number: with an even one, the same half of a double
    buffer would always see the same tokens."""
    return BATCHES if BATCHES * batch_bytes <= BATCHES_BYTES else 3


def bytes_per_rank(job: Job) -> int:
    """Of the host's memory, what the largest case takes on a CPU rank: its heap, its rows, and what its experts hold.

    GPU ranks have all that on their GPUs. A job for `auto` counts as one on CPUs: nobody knows yet where it will run.
    """
    return 0 if kind_of_ranks(job) == "cuda" else max(_case_bytes(case.job) for case in job.cases())


def device_bytes_per_rank(job: Job) -> int:
    """Of a GPU's memory, what the largest case of a job takes on one rank, and what there is beside it."""
    return BESIDE_BYTES + max(device_bytes(case) for case in job.cases())


def device_bytes(case: Case) -> int:
    """What a case holds of the GPU of each rank; every workload with GPU ranks is counted here."""
    job = case.job
    if job.workload == "p2p":
        return _p2p_device_bytes(job)
    if job.workload == "exchange":
        spec = spec_of(job)
        return exchange_device_bytes(job, spec, batches_of(spec.tokens * spec.row_bytes))
    if job.workload == "overlap":
        spec, asked = spec_of(job), job.overlap
        product = (asked.rows + asked.columns) * spec.hidden + 2 * asked.rows * asked.columns
        held = exchange_device_bytes(job, spec, batches_of(spec.tokens * spec.row_bytes))
        return held + product * ITEM_BYTES[spec.dtype]
    return 0


def _p2p_device_bytes(job: Job) -> int:
    """Slots are freed after each size. Sources and landings are torch's, which keeps what it once had of every size.

    Bytes that are put land in the slot, bytes that are fetched lie ready in it; NCCL needs both a source and a landing.
    """
    asked = job.p2p
    peers = job.world.ranks - 1 if asked.pattern == "all_to_all" else 1
    kept = 2 if "collective" in asked.transports else 1
    return peers * (max(asked.bytes) + kept * sum(asked.bytes))


def _case_bytes(job: Job) -> int:
    ranks = job.world.ranks
    if job.workload == "p2p":
        peers = ranks - 1 if job.p2p.pattern == "all_to_all" else 1
        return (3 * peers + 1) * max(job.p2p.bytes)  # for each peer a source, a slot and a destination; one to check by
    spec = spec_of(job)
    batch = spec.tokens * spec.row_bytes
    rows = 3 * spec.rows(ranks) * spec.row_bytes  # what dispatch gives, what the experts make of it, what is sent home
    held = slots_layout(spec, ranks).nbytes + rows + (batches_of(batch) + 2) * batch
    if job.steps.verify:
        held += ORACLE_BYTES
    if job.workload == "layer":
        # In float32 at worst: a processor that does not multiply the dtype itself has its weights so.
        held += spec.local_experts(ranks) * 3 * spec.hidden * job.shape.ffn * ITEM_BYTES["float32"]
    return held


def check_memory(ranks: int, each: int, available: int | None = None) -> None:
    """Refuse ranks that together need more memory than this machine can give now."""
    has = available_memory() if available is None else available
    if ranks * each > has:
        raise PlacementError(
            f"asked for {ranks} ranks of {each / GIB:.1f} GiB each, and this machine has {has / GIB:.1f} GiB to give; "
            "lower shape.tokens, shape.hidden, p2p.bytes or world.ranks, or set exchange.capacity"
        )


def check_device_memory(sharers: int, each: int, gpu: str, has: int) -> None:
    """Refuse a rank whose GPU has less memory in all than it and those that share the GPU need.

    What others hold of it now may be given back meanwhile, as by a generation that has just died; so it does not count.
    """
    if sharers * each > has:
        asked = f"a rank of {each / GIB:.1f} GiB" if sharers == 1 else f"{sharers} ranks of {each / GIB:.1f} GiB each"
        raise PlacementError(
            f"asked for {asked} on one GPU, and {gpu} has {has / GIB:.1f} GiB; lower p2p.bytes, shape.tokens, "
            "shape.hidden or world.ranks, or set exchange.capacity"
        )


def available_memory() -> int:
    """Bytes that this machine, or the container around us, can still give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *_container_free()])


def _container_free() -> Iterable[int]:
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (most := limit.read_text().strip()).isdigit():
        yield max(0, int(most) - int(used.read_text()))
