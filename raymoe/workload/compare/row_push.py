"""The baseline of dispatch between GPU ranks: its rows pushed to known slots, and nothing else.

It leaves out the routing, counts, rows that stay on their rank, quantisation, and placing rows by expert (`LEFT_OUT`,
quoted in every line). Rows that would cross as float8_e4m3 have as many bytes here. Rows are as far apart, and as long,
as the slots of `fused`. Nothing is read where it arrives, so nothing is verified; tests/gpu/test_row_push.py checks the
slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from raymoe.config import Job
from raymoe.cuda.error_word import ErrorWord
from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Kernels, Launch, Shape
from raymoe.cuda.params import U32, U64, Address, Params
from raymoe.cuda.structs import STRUCTS, Peers, Watch
from raymoe.exchange.peer.workspace import slot_bytes_of
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.transport.copy_kernel import Ring
from raymoe.workload.clock import OpClock, calls_of
from raymoe.workload.inputs import Inputs
from raymoe.workload.measure import Line, Step, Timeline
from raymoe.workload.memory_needed import push_layout

# The kernel of kernels/peer/row_push.cu: its parameters, and a launch of it.

THREADS = 32

SHARED_BYTES = 200 << 10
"""The most shared memory of a block for its ring."""

STAGES = 4
"""Pushes are fastest with all SMs, and few rows in flight on each. Microseconds for 4096 tokens between four ranks, by
blocks x stages (4x H200, cold L2 cache, 2026-11-22); 132 blocks with 8 stages take as long as with 4:

    row bytes   132 x 4   66 x 4   32 x 8
       14,336       462      467      477
        7,424       246      251      255
        7,392       266      272      256   rows do not begin with lines of 128 B
        5,760       194      198      203
        2,944       108      113      130
        1,024        48       52       74
"""


@dataclass(frozen=True)
class RowPushParams(Params):
    """The struct of kernels/peer/row_push.cu, which describes its fields."""

    peers: Peers
    x: Address
    plan: Address
    count: Address
    slots: U64
    arrived: U64
    operation: Address
    watch: Watch = field(default_factory=Watch)
    op: U32 = 0
    tokens: U32 = 0
    row_bytes: U32 = 0
    stages: U32 = 0


ROW_PUSH = KernelSource("peer/row_push", (RowPushParams, Peers, *STRUCTS))


def shape_of(tokens: int, row_bytes: int, sms: int) -> tuple[int, Ring]:
    """Return how many blocks to launch, each on an SM of its own, and the ring of each.

    >>> shape_of(4096, 14336, sms=132)
    (132, Ring(stages=4, stage_bytes=14336))
    >>> shape_of(1, 65536, sms=132)
    (1, Ring(stages=3, stage_bytes=65536))
    """
    stages = min(STAGES, SHARED_BYTES // (row_bytes + 8))
    return min(tokens, sms), Ring(max(1, stages), row_bytes)


def row_push_launch(kernels: Kernels, params: RowPushParams, blocks: int, ring: Ring) -> Launch:
    """Return a launch of the kernel on `blocks` blocks. The ring sets `stages` and `row_bytes` of `params`."""
    whole = replace(params, stages=ring.stages, row_bytes=ring.stage_bytes)
    return Launch(kernels.function(ROW_PUSH), Shape(blocks, THREADS, ring.shared_bytes), whole)


LEFT_OUT = "routing, counts, own rows, quantisation, placement"


def plan_of(ids: torch.Tensor, rank: int, ranks: int, experts: int) -> torch.Tensor:
    """Return the tokens of this rank that go to other ranks, each as int64: token << 32 | mask of ranks.

    >>> plan = plan_of(torch.tensor([[0, 5], [1, 0], [2, 7], [-1, 2]]), rank=0, ranks=4, experts=8)
    >>> [(entry >> 32, bin(entry & 0xFFFFFFFF)) for entry in plan.tolist()]
    [(0, '0b100'), (2, '0b1010'), (3, '0b10')]
    """
    owner = torch.where(ids < 0, -1, ids // (experts // ranks))
    mask = torch.zeros(len(ids), dtype=torch.int64)
    for peer in range(ranks):
        if peer != rank:
            mask |= (owner == peer).any(dim=1).long() << peer
    token = mask.nonzero().flatten()
    return token << 32 | mask[token]


class RowPush:
    """The kernel with its memory. All ranks make one, run it together, and close it."""

    def __init__(self, world: World, tokens: int, row_bytes: int, shape: tuple[int, Ring] | None = None) -> None:
        """`shape`: the number of blocks, and the ring of each; `shape_of` by default."""
        self.world = world
        self.sms, ring = shape or shape_of(tokens, row_bytes, world.gpu.sms)
        self.heap = world.allocate(push_layout(world.size, tokens, row_bytes), "row push", "device")
        device = world.device
        self.x = torch.empty(tokens, row_bytes, dtype=torch.uint8, device=device).random_(0, 256)
        self._plan = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        self._operation = torch.zeros(2, dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        self._kernels = Kernels(world.gpu)
        self._error = ErrorWord(world.gpu, world.rank)
        self._forget_aborts = world.waiter.on_abort(self._error.abort)
        params = RowPushParams(
            peers=Peers.of([self.heap.base(rank) for rank in range(world.size)], world.rank),
            x=self.x.data_ptr(),
            plan=self._plan.data_ptr(),
            count=self._count.data_ptr(),
            slots=self.heap.layout.find("slots").offset,
            arrived=self.heap.layout.find("arrived").offset,
            operation=self._operation.data_ptr(),
            watch=self._error.watch(world.timeout_s),
            op=self._error.number("row push"),
            tokens=tokens,
        )
        self._launch = row_push_launch(self._kernels, params, self.sms, ring)

    def take(self, plan: torch.Tensor) -> None:
        """Set the plan of all later pushes; on the current stream."""
        self._plan[: len(plan)].copy_(plan)
        self._count.fill_(len(plan))

    def __call__(self) -> None:
        """Enqueue on the current stream."""
        self._launch.enqueue(torch.cuda.current_stream(self.world.device).cuda_stream)

    def check(self) -> None:
        """Wait for the device; raise an error if a rank did not come."""
        torch.cuda.synchronize(self.world.device)
        self._error.check()
        self.world.waiter.check()

    def close(self) -> None:
        self.world.gpu.synchronise()
        self._forget_aborts()
        self._error.close()
        self._kernels.close()
        self.heap.close()


class RowPushStep:
    """Pushes the rows that a step of the exchange would push, cold and warm."""

    ops = (("dispatch", "cold"), ("dispatch", "warm"))

    def __init__(self, world: World, spec: ExchangeSpec, inputs: Inputs, job: Job) -> None:
        self.world = world
        self._plans = [
            plan_of(draw.ids, world.rank, world.size, spec.experts).to(world.device) for draw in inputs.draws
        ]
        sms = world.gpu.sms if job.exchange.sms == "auto" else min(job.exchange.sms, world.gpu.sms)
        row_bytes = slot_bytes_of(spec, stamped=False)
        self.push = RowPush(world, spec.tokens, row_bytes, shape_of(spec.tokens, row_bytes, sms))
        new_stream: Any = torch.cuda.Stream  # has no annotations
        self.stream: torch.cuda.Stream = new_stream(world.device)
        self.stream.wait_stream(torch.cuda.current_stream(world.device))
        with torch.cuda.stream(self.stream):
            self.push.take(self._plans[0])
            self.push()
            self.push.check()
            calls = calls_of(spec.tokens)
            captured = job.steps.graph is not False
            self.clock = OpClock(world, self.stream, self.push.check, captured=captured, calls=calls)
            self._timed = self.clock.timed(self.push)

    @property
    def keys(self) -> Line:
        return {
            "backend": "row_push",
            "graph": self.clock.captured,
            "sms": self.push.sms,
            "leaves_out": LEFT_OUT,
            "device": torch.cuda.get_device_name(self.world.device),
        }

    def __call__(self, index: int, *, verify: bool) -> Step:
        assert not verify, "a push is not verified"
        with torch.cuda.stream(self.stream):
            self.push.take(self._plans[index % len(self._plans)])
            return Step(self.clock.us(self._timed))

    def timelines(self) -> dict[str, Timeline]:
        return {}

    def close(self) -> None:
        self.clock.close()
        self.push.close()
