"""The yardstick of dispatch between GPU ranks: its rows pushed to known slots, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from raymoe.config import Job
from raymoe.device.copy import Ring
from raymoe.device.error_word import ErrorWord
from raymoe.device.jit import KernelSource
from raymoe.device.kernels import Kernels, Launch, Shape
from raymoe.device.params import U32, U64, Address, Params
from raymoe.device.structs import STRUCTS, Peers, Watch
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.workspace import slot_bytes_of
from raymoe.memory.watchdog import Watchdog
from raymoe.memory.world import World
from raymoe.workload.clock import OpClock, calls_of
from raymoe.workload.inputs import Inputs
from raymoe.workload.measure import Line, Step, Timeline
from raymoe.workload.memory_needed import push_layout

# The kernel of kernels/row_push.cu: what it takes, and a launch of it.

THREADS = 32

SHARED_BYTES = 200 << 10
"""Of a block's shared memory at most, for the ring."""

STAGES = 4
"""Rows are pushed best by every multiprocessor, few of them in flight on each. 4096 tokens between four ranks by 132
blocks x 4 stages, 66 x 4 and 32 x 8: rows of 14,336 B 462, 467, 477 us; of 7,424 B 246, 251, 255; of 5,760 B 194, 198,
203; of 2,944 B 108, 113, 130; of 1,024 B 48, 52, 74; with 8 stages on 132 blocks the same (4x H200, cold L2 cache,
2026-11-22). Of 7,392 B, which do not begin with lines of 128 B, 266, 272 and 256."""


@dataclass(frozen=True)
class RowPushParams(Params):
    """Twin of the struct in kernels/row_push.cu, where the words are described."""

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


ROW_PUSH = KernelSource("row_push", (RowPushParams, Peers, *STRUCTS))


def shape_of(tokens: int, row_bytes: int, sms: int) -> tuple[int, Ring]:
    """Blocks, each on an SM of its own, and the ring of each.

    >>> shape_of(4096, 14336, sms=132)
    (132, Ring(stages=4, stage_bytes=14336))
    >>> shape_of(1, 65536, sms=132)
    (1, Ring(stages=3, stage_bytes=65536))
    """
    stages = min(STAGES, SHARED_BYTES // (row_bytes + 8))
    return min(tokens, sms), Ring(max(1, stages), row_bytes)


def row_push_launch(kernels: Kernels, params: RowPushParams, blocks: int, ring: Ring) -> Launch:
    """A launch of the kernel on `blocks` blocks; `params` without stages, which are the ring's."""
    whole = replace(params, stages=ring.stages, row_bytes=ring.stage_bytes)
    return Launch(kernels.function(ROW_PUSH), Shape(blocks, THREADS, ring.shared_bytes), whole)


# The yardstick of dispatch between GPU ranks: its rows pushed to known slots, and nothing else.
#
# What it leaves out (`LEFT_OUT`, told in every line): finding out where tokens go, counts, the rows that stay on their
# rank, quantisation (rows that would cross as float8_e4m3 are just so many bytes), and placing rows by expert. Rows are
# as far apart, and so long, as the slots of `fused` are. Nothing is read where it arrives, so nothing is verified;
# tests/gpu/test_row_push.py looks at the slots.

LEFT_OUT = "routing, counts, own rows, quantisation, placement"


def plan_of(ids: torch.Tensor, rank: int, ranks: int, experts: int) -> torch.Tensor:
    """Which tokens of this rank go to other ranks, and to which: token << 32 | mask of ranks, int64.

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
        """`shape`: how many blocks, with what ring each; the best unless said."""
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
        self._watchdog = Watchdog(world, on_abort=self._error.abort)
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
        """Push what this plan says from now on; on the current stream."""
        self._plan[: len(plan)].copy_(plan)
        self._count.fill_(len(plan))

    def __call__(self) -> None:
        """Enqueue on the current stream."""
        self._launch(torch.cuda.current_stream(self.world.device).cuda_stream)

    def check(self) -> None:
        """Wait for the device; raise where a rank did not come."""
        torch.cuda.synchronize(self.world.device)
        self._error.check()
        self.world.waiter.check()

    def close(self) -> None:
        self.world.gpu.synchronise()
        self._watchdog.close()
        self._error.close()
        self._kernels.close()
        self.heap.close()


class RowPushStep:
    """Pushes the rows that a step of the exchange would push, cold and warm."""

    ops = (("dispatch", "cold"), ("dispatch", "warm"))

    def __init__(self, world: World, spec: ExchangeSpec, inputs: Inputs, asked: Job) -> None:
        self.world = world
        self._plans = [
            plan_of(draw.ids, world.rank, world.size, spec.experts).to(world.device) for draw in inputs.draws
        ]
        sms = world.gpu.sms if asked.exchange.sms == "auto" else min(asked.exchange.sms, world.gpu.sms)
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
            captured = asked.steps.graph is not False
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
        assert not verify, "nothing that a push leaves is checked here"
        with torch.cuda.stream(self.stream):
            self.push.take(self._plans[index % len(self._plans)])
            return Step(self.clock.us(self._timed))

    def timelines(self) -> dict[str, Timeline]:
        return {}

    def close(self) -> None:
        self.clock.close()
        self.push.close()
