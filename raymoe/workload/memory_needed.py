"""Count the memory that a job needs, and refuse a job that a machine or a GPU has no memory for.

The host's memory is counted before Ray starts, in a process that makes no CUDA context, so this module loads no torch.
A rank compares the memory of its GPU after it has opened the GPU and before it allocates anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raymoe.config import Case, Job
from raymoe.config.job import kind_of_ranks
from raymoe.config.sections import OTHER_SYSTEMS
from raymoe.errors import PlacementError
from raymoe.exchange.peer.workspace import Bounds, slot_bytes_of, workspace_layout
from raymoe.exchange.refusal import Refusal
from raymoe.exchange.spec import ExchangeSpec, slots_layout
from raymoe.fp8 import FP8
from raymoe.memory.layout import ITEM_BYTES, Layout, Region

if TYPE_CHECKING:
    from raymoe.config import Job


# GPU memory of other systems, counted before they start.

MOST_GROUPS = 15
"""The most groups of rows that all_to_all_vdev_2d takes from a rank to a rank (torch 2.11)."""

SLACK_BYTES = 64 << 20
"""Part of a symmetric heap: words, pads for signals, and the rounding of allocations."""

PROCESS_BYTES = 3 << 29
"""GPU memory of the process itself: its CUDA context, kernels and communicators."""


def groups_of(local: int) -> int:
    """Return how many groups the experts of a rank form: as many as allowed, all of the same size.

    >>> groups_of(64), groups_of(12), groups_of(17)
    (8, 12, 1)
    """
    return max(groups for groups in range(1, MOST_GROUPS + 1) if local % groups == 0)


def most_rows_received(spec: ExchangeSpec, ranks: int) -> int:
    """Return the most rows that a rank receives, each group aligned; an empty group takes `alignment` rows.

    >>> most_rows_received(ExchangeSpec(tokens=4, hidden=64, experts=8, topk=2, alignment=16), ranks=2)
    80
    """
    return ranks * spec.tokens * spec.topk + groups_of(spec.local_experts(ranks)) * spec.alignment


def heap_bytes(spec: ExchangeSpec, ranks: int) -> int:
    """Return the size of a symmetric heap: rows that leave, the most rows that arrive, rows that come back."""
    return (2 * spec.tokens * spec.topk + most_rows_received(spec, ranks)) * spec.row_bytes + SLACK_BYTES


# GPU memory of an exchange on each rank.

SMALL_TOKENS = 128
"""Up to so many tokens a rank, a sample of a CUDA graph is the mean of MANY_RUNS runs."""
MANY_RUNS = 20

FLUSH_BYTES = 256 << 20
"""Size of the buffer that is written to flush the L2 cache: more than twice the L2 of any GPU so far."""

MOST_MESSAGE = 64 << 20
"""The largest message by which an exchange's case measures the limit of the links."""

PIECE_BYTES = 64 << 20
"""A large result is verified in pieces of about this many bytes of float64."""

_PIECES, _DRAWN = 8, 6
"""Pieces that the oracle holds at a time; copies of a rank's tokens while fresh ones are drawn in float32 and
compared."""

ENTRY_BYTES = 24
"""Bytes that a dispatch leaves for its combine for each entry (token, k): place, weight, index, and rounding."""


def push_layout(ranks: int, tokens: int, row_bytes: int) -> Layout:
    """Return the heap of the baseline row_push; kernels/peer/row_push.cu describes its words."""
    return Layout.of([Region.words("arrived", ranks), Region("slots", (ranks, tokens, row_bytes), "uint8")])


def exchange_device_bytes(job: Job, spec: ExchangeSpec, batches: int) -> int:
    """Count the heap of a case, its batches of tokens, and the rows that go into experts and come out of them.

    The backends over NCCL have no heap; the buffers that they hold instead are not larger.

    >>> from raymoe.config import load_job
    >>> from raymoe.workload.memory_needed import batches_of, spec_of
    >>> job = load_job("host_exchange", ["shape.hidden=7168", "shape.experts=256", "shape.topk=8", "shape.tokens=4096"])
    >>> round(exchange_device_bytes(job, spec_of(job), batches=3) / 2**30, 1)
    7.9
    """
    ranks = job.world.ranks
    spec, tokens = spec.over_slots(ranks), spec.tokens * spec.row_bytes
    if job.exchange.backend == "row_push":
        row_bytes = slot_bytes_of(spec, stamped=False)
        pushed = spec.tokens * row_bytes
        return push_layout(ranks, spec.tokens, row_bytes).nbytes + pushed + batches * tokens + FLUSH_BYTES
    if job.exchange.backend in OTHER_SYSTEMS:
        return heap_bytes(spec, ranks) + PROCESS_BYTES + (batches + 3) * tokens + FLUSH_BYTES
    # Rows of the dtype: values and scales, if dispatch gives those, take less.
    rows, domains = 2 * spec.rows(ranks) * spec.row_bytes, job.world.domains
    parts = spec.parts(ranks)
    slots = workspace_layout(Bounds.of(*parts), ranks).nbytes
    if domains > 1:
        slots = sum(_rail_bytes(part, ranks, domains) for part in parts)
    held = slots + rows + (batches + 3) * tokens + FLUSH_BYTES
    held += 2 * ranks * spec.tokens * spec.topk * ENTRY_BYTES
    if job.steps.verify:
        # An expert with all tokens of all ranks, in float64, twice; and the oracle's work on this rank's tokens.
        expert = ranks * spec.tokens * spec.hidden * 8
        drawn = _DRAWN * spec.tokens * spec.hidden * ITEM_BYTES["float32"]
        held += 2 * expert + _PIECES * PIECE_BYTES + drawn
    return held


_QUANTISING = 3
"""Copies of a rank's tokens in float32 that it holds while it quantises them. An estimate, on the large side."""


def _rail_bytes(spec: ExchangeSpec, ranks: int, domains: int) -> int:
    """Count the heap inside a domain, for the tokens of a whole rail, and the tensors of `HierarchicalGpu`.

    >>> spec = ExchangeSpec(tokens=512, hidden=1024, experts=32, topk=4)
    >>> [_rail_bytes(spec, 8, domains) >> 20 for domains in (2, 4)]
    [75, 81]
    """
    inside, per_domain = spec.inside(domains), ranks // domains
    return workspace_layout(Bounds.of(inside), per_domain).nbytes + rail_buffers(spec, ranks, domains)


def rail_buffers(spec: ExchangeSpec, ranks: int, domains: int) -> int:
    """Count the rail's rows, its entries, and what leaves and comes back: sums, statuses, gradients of weights."""
    tokens = domains * spec.tokens
    held = tokens * spec.row_bytes + tokens * spec.topk * ENTRY_BYTES
    held += 2 * (tokens * spec.combine_row_bytes + ranks * Refusal.NBYTES)
    if spec.combine_row_bytes != spec.row_bytes:
        held += tokens * spec.row_bytes  # the sums inside, before they are converted
    held += 2 * tokens * spec.topk * ITEM_BYTES["float32"]
    if spec.dispatch_wire == FP8:
        held += tokens * (spec.wire_row_bytes - spec.row_bytes)  # the rail's rows are narrower
        held += _QUANTISING * spec.tokens * spec.hidden * ITEM_BYTES["float32"]
    return held


# Memory of an operation over rows.

_HELD, _FLOATS = 4, 6
"""Copies of the rows that workload pointwise holds: in their dtype, and in float32 where torch computes eagerly. An
estimate, on the large side."""

_MOST_ROWS_A_TOKEN = 4
"""Rows of swiglu_experts for each token."""


def rows_bytes(job: Job) -> int:
    """Count the tensors of workload pointwise, of the most that any system holds.

    >>> from raymoe.config import load_job
    >>> round(rows_bytes(load_job("norm").cases()[-1].job) / 2**30, 1)
    8.5
    """
    shape, op = job.shape, job.pointwise.op
    elements = shape.tokens * (2 * shape.ffn if op.startswith("swiglu") else shape.hidden)
    elements *= _MOST_ROWS_A_TOKEN if op == "swiglu_experts" else 1
    held = elements * (_HELD * ITEM_BYTES[shape.dtype] + _FLOATS * ITEM_BYTES["float32"])
    return held + (_PIECES * PIECE_BYTES if job.steps.verify else 0)


# Memory of the products of experts.

_RESULTS = 17
"""Results that workload products holds: one for the graph of each system, and those of the last eager calls."""
_GAP = 128
"""Rows up to which DeepGEMM pads an expert."""


def products_bytes(job: Job) -> int:
    """Count the weights, the rows and the results of workload products, for the operation that takes the most.

    >>> from raymoe.config import load_job
    >>> [round(products_bytes(case.job) / 2**30) for case in load_job("bench_products").cases()[-4:]]
    [28, 29, 38, 70]
    """
    shape, section = job.shape, job.products
    experts, item = shape.experts // job.world.ranks, ITEM_BYTES[section.dtype]
    rows = section.rows if section.kind == "hot" else section.rows * experts
    rows += _GAP * experts
    held = []
    for columns, products in ((shape.hidden, 2 * shape.ffn), (shape.ffn, shape.hidden)):
        copied = experts * products * columns * item  # the copy has as many bytes as the weights
        quantised = (experts * products + rows) * columns if section.dtype == "bfloat16" else 0
        exact = 3 * products * columns * ITEM_BYTES["float32"] * 2 if job.steps.verify else 0
        held.append(2 * copied + quantised + rows * (3 * columns + _RESULTS * products) * item + exact)
    gradients = experts * 2 * shape.ffn * shape.hidden  # by two systems, one more before it is added, and the copy
    kept = gradients * (4 * item + ITEM_BYTES["float32"]) + gradients * (1 + item)  # the last are to verify
    held.append(kept + 2 * rows * (shape.hidden + 2 * shape.ffn) * item)
    return max(held)


# Memory of a job, and whether a machine or a GPU has it.

GIB = 2**30
BATCHES, BATCHES_BYTES = 7, 256 * 2**20
ORACLE_BYTES = 320 * 2**20  # the most that a verified step was measured to hold beside its rows
BESIDE_BYTES = 3 * 2**29
"""GPU memory of a rank beside its cases: a CUDA context and kernels, NCCL's buffers, buffers to draw and compare bytes,
and the many slots of small messages. An estimate, on the large side."""


def spec_of(job: Job) -> ExchangeSpec:
    """Return the spec of the exchange that a job asks for, with a number of rows where its capacity is a factor."""
    shape, exchange = job.shape, job.exchange
    spec = ExchangeSpec(
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
        slots=exchange.slots,
    )
    return spec.counted(job.world.ranks)


def batches_of(batch_bytes: int) -> int:
    """Return how many batches of tokens a rank makes in advance.

    The number is odd: with an even one, each parity of a double buffer would always get the same tokens.
    """
    return BATCHES if BATCHES * batch_bytes <= BATCHES_BYTES else 3


def bytes_per_rank(job: Job, domains: int | None = None) -> int:
    """Return the host memory that the largest case takes on a CPU rank: its heap, its rows and its experts' weights.

    GPU ranks hold all of these on their GPUs. A job for `auto` counts as one on CPUs: it may run there. `domains` is
    how many the ranks form, by default as many as the job asks for.
    """
    spans = job.world.domains if domains is None else domains
    return 0 if kind_of_ranks(job) == "cuda" else max(_case_bytes(case.job, spans) for case in job.cases())


def device_bytes_per_rank(job: Job) -> int:
    """Return the GPU memory that the largest case of a job takes on one rank, BESIDE_BYTES included."""
    return BESIDE_BYTES + max(device_bytes(case) for case in job.cases())


def device_bytes(case: Case) -> int:
    """Return the memory that a case holds on the GPU of each rank, for each workload with GPU ranks."""
    job = case.job
    if job.workload == "p2p":
        return _p2p_device_bytes(job)
    if job.workload == "exchange":
        spec = spec_of(job)
        return exchange_device_bytes(job, spec, batches_of(spec.tokens * spec.row_bytes))
    if job.workload == "pointwise":
        return rows_bytes(job) + FLUSH_BYTES
    if job.workload == "products":
        return products_bytes(job) + FLUSH_BYTES
    if job.workload == "layer":
        return _layer_device_bytes(job)
    if job.workload == "train":
        spec = spec_of(job)
        return exchange_device_bytes(job, spec, 1) + train_bytes(job, spec)
    spec, asked = spec_of(job), job.overlap
    product = (asked.rows + asked.columns) * spec.hidden + 2 * asked.rows * asked.columns
    held = exchange_device_bytes(job, spec, batches_of(spec.tokens * spec.row_bytes))
    return held + product * ITEM_BYTES[spec.dtype]


_ROWS_OF_EXPERTS = 2
"""Buffers of rows H wide, and of rows 2F wide, that the experts of a layer hold in a pass at once. An estimate."""


def _layer_device_bytes(job: Job) -> int:
    """Count the exchange, the weights, and for each graph rows and, with a backward pass, gradients of the weights.

    >>> from raymoe.config import load_job
    >>> job = load_job("quickstart", ["world.device=cuda", "world.ranks=2", "shape.hidden=7168", "shape.ffn=2048",
    ...                               "shape.experts=256", "shape.topk=8", "shape.tokens=4096",
    ...                               "layer.router.kind=given"])
    >>> round(_layer_device_bytes(job) / 2**30, 1)
    18.3
    >>> job = load_job("layer_deepseek_v3", ["layer.backward=true"]).cases()[1].job
    >>> job.shape.tokens, round(_layer_device_bytes(job) / 2**30)
    (128, 44)
    """
    spec, ranks, ffn = spec_of(job), job.world.ranks, job.shape.ffn
    item = ITEM_BYTES[spec.dtype]
    of_experts = item if job.layer.experts_dtype is None else 1  # the scales take a few thousandths more
    weights = 3 * spec.hidden * (spec.local_experts(ranks) * ffn + job.layer.shared) * of_experts
    weights += spec.experts * spec.hidden * item
    # gpt-oss adds biases, and GPUs older than Hopper compute its activation by torch's operations.
    buffers = _ROWS_OF_EXPERTS if job.layer.experts == "swiglu" else 2 * _ROWS_OF_EXPERTS
    rows = spec.rows(ranks) * buffers * (spec.hidden + 2 * ffn) * item
    batches = batches_of(spec.tokens * spec.row_bytes)
    held = exchange_device_bytes(job, spec, batches) + weights + link_bytes(spec, ranks)
    return held + _graphs_of_layer(job) * (rows + (weights if job.layer.backward else 0))


def train_bytes(job: Job, spec: ExchangeSpec) -> int:
    """Count weights, gradients and momentum of training, those of the unsharded model too, and the rows of all layers.

    >>> from raymoe.config import load_job
    >>> job = load_job("train")
    >>> train_bytes(job, spec_of(job)) >> 20
    12
    """
    wide, ranks, layers = ITEM_BYTES["float32"], job.world.ranks, job.train.layers
    one = 3 * spec.hidden * job.shape.ffn
    weights = layers * one * (spec.local_experts(ranks) + (spec.experts if job.steps.verify else 0))
    weights += 2 * (2 * 256 + layers * spec.experts) * spec.hidden  # the tables of bytes and the routers, of both
    width = spec.hidden + 3 * job.shape.ffn
    rows = layers * width * (spec.rows(ranks) + (ranks * spec.tokens * spec.topk if job.steps.verify else 0))
    return 3 * weights * wide + 2 * rows * wide


def link_bytes(spec: ExchangeSpec, ranks: int) -> int:
    """Count the sources and slots of the messages that measure the limit of the links, in the worst case.

    A layer still holds its exchange then. Workload exchange has freed more than that.

    >>> link_bytes(ExchangeSpec(tokens=512, hidden=1024, experts=32, topk=4), ranks=4) >> 20
    6
    """
    return 2 * (ranks - 1) * min(MOST_MESSAGE, spec.tokens * max(spec.wire_row_bytes, spec.combine_row_bytes))


def _graphs_of_layer(job: Job) -> int:
    """Return how many times a layer's case holds the memory of its passes: once for each graph, or once without.

    A graph keeps the memory of its work. One times the step, or two where it is timed in many calls, cold and warm. One
    more has the parts.
    """
    if job.steps.graph is False:
        return 1
    return (2 if job.shape.tokens <= SMALL_TOKENS else 1) + (job.layer.router.kind != "given")


def _p2p_device_bytes(job: Job) -> int:
    """Count slots of the largest size, and sources and landings of all sizes.

    Slots are freed after each size. Sources and landings are torch's, which keeps freed memory of every size. With put
    the slot is the landing, with get it is the source; NCCL needs both a source and a landing.
    """
    section = job.p2p
    peers = job.world.ranks - 1 if section.pattern == "all_to_all" else 1
    per_size = 2 if "collective" in section.transports else 1
    return peers * (max(section.bytes) + per_size * sum(section.bytes))


def _case_bytes(job: Job, domains: int) -> int:
    ranks = job.world.ranks
    if job.workload == "p2p":
        peers = ranks - 1 if job.p2p.pattern == "all_to_all" else 1
        return (3 * peers + 1) * max(job.p2p.bytes)  # for each peer a source, a slot and a landing; one to verify by
    if job.workload == "pointwise":
        return rows_bytes(job)
    if job.workload == "products":
        return products_bytes(job)
    spec = spec_of(job)
    batch = spec.tokens * spec.row_bytes
    rows = 3 * spec.rows(ranks) * spec.row_bytes  # from dispatch, from the experts, and returned
    slots = sum(
        slots_layout(part, ranks).nbytes if domains == 1 else _bytes_between_domains(part, ranks, domains)
        for part in spec.parts(ranks)
    )
    held = slots + rows + (batches_of(batch) + 2) * batch
    if job.steps.verify:
        held += ORACLE_BYTES
    if job.workload == "layer":
        # In float32 at worst: a processor that does not multiply the dtype itself holds its weights so.
        held += spec.local_experts(ranks) * 3 * spec.hidden * job.shape.ffn * ITEM_BYTES["float32"]
        held += link_bytes(spec, ranks)
    if job.workload == "train":
        held += train_bytes(job, spec)
    return held


def _bytes_between_domains(spec: ExchangeSpec, ranks: int, domains: int) -> int:
    """Count the slots inside a domain, for the tokens of a whole rail, and the blocks that cross the network.

    >>> spec = ExchangeSpec(tokens=512, hidden=1024, experts=32, topk=4)
    >>> [_bytes_between_domains(spec, 8, domains) >> 20 for domains in (2, 4)]
    [39, 45]
    """
    inside = replace(spec, tokens=domains * spec.tokens)
    rail = (domains + 1) * spec.tokens * (spec.row_bytes + 8 * spec.topk)  # all ranks of it gathered, and this one's
    home = (
        2 * domains * (spec.tokens + ranks // domains) * spec.combine_row_bytes
    )  # sums that leave, and that come back
    return slots_layout(inside, ranks // domains).nbytes + rail + home


def check_memory(ranks: int, nbytes: int, available: int | None = None) -> None:
    """Refuse ranks that together need more memory than this machine has available now."""
    has = available_memory() if available is None else available
    if ranks * nbytes > has:
        raise PlacementError(
            f"asked for {ranks} ranks of {nbytes / GIB:.1f} GiB each, and this machine has {has / GIB:.1f} GiB free; "
            "lower shape.tokens, shape.hidden, p2p.bytes or world.ranks, or set exchange.capacity"
        )


def check_device_memory(sharers: int, nbytes: int, gpu: str, has: int) -> None:
    """Refuse a rank if the total memory of its GPU is less than the ranks that share the GPU need.

    Memory that is in use now does not count as taken: its holder may free it soon, as a generation that just died does.
    """
    if sharers * nbytes > has:
        size = f"{nbytes / GIB:.1f} GiB"
        asked = f"a rank of {size}" if sharers == 1 else f"{sharers} ranks of {size} each"
        raise PlacementError(
            f"asked for {asked} on one GPU, and {gpu} has {has / GIB:.1f} GiB; lower p2p.bytes, shape.tokens, "
            "shape.hidden or world.ranks, or set exchange.capacity"
        )


def available_memory() -> int:
    """Return the bytes available on this machine, or in the container of this process."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *_container_free()])


def _container_free() -> Iterable[int]:
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (most := limit.read_text().strip()).isdigit():
        yield max(0, int(most) - int(used.read_text()))
