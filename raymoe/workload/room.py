"""How much memory a job needs, and whether this machine has it. No torch in here: it is asked before Ray starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from raymoe.exchange.slots import slots_layout
from raymoe.exchange.spec import ExchangeSpec
from raymoe.job import Job
from raymoe.job.errors import PlacementError
from raymoe.memory.heap import ITEM_BYTES

GIB = 2**30
BATCHES, BATCHES_BYTES = 7, 256 * 2**20
ORACLE_BYTES = 320 * 2**20  # the most that a verified step was seen to hold beside its rows


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
    )


def batches_of(batch_bytes: int) -> int:
    """How many batches of tokens a rank makes in advance. An odd number: with an even one, the same half of a double
    buffer would always see the same tokens."""
    return BATCHES if BATCHES * batch_bytes <= BATCHES_BYTES else 3


def bytes_per_rank(job: Job) -> int:
    """What the largest case of a job takes on one rank: its heap, the rows it holds, and what its experts hold."""
    return max(_case_bytes(case.job) for case in job.cases())


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


def check_room(ranks: int, each: int, available: int | None = None) -> None:
    """Refuse ranks that together need more memory than this machine can give now."""
    has = available_memory() if available is None else available
    if ranks * each > has:
        raise PlacementError(
            f"asked for {ranks} ranks of {each / GIB:.1f} GiB each, and this machine has {has / GIB:.1f} GiB to give; "
            "lower shape.tokens, shape.hidden or world.ranks, or set exchange.capacity"
        )


def available_memory() -> int:
    """Bytes that this machine, or the container around us, can still give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *_container_room()])


def _container_room() -> Iterable[int]:
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (most := limit.read_text().strip()).isdigit():
        yield max(0, int(most) - int(used.read_text()))
