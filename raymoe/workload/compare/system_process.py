"""The process beside a rank that runs another system; it answers `systems.SystemProcess` message by message.

It has a world of its own, of the processes beside all ranks, and the same clock as the backends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from raymoe.config import Job, job_from_resolved
from raymoe.errors import RaymoeError
from raymoe.memory.world import World
from raymoe.workload.clock import OpClock, TimedOp, Work, calls_of
from raymoe.workload.compare.other_systems import FLASHINFER, NCCL_EP, Answer, SystemFacts
from raymoe.workload.inputs import Inputs, Routing
from raymoe.workload.measure import Line
from raymoe.workload.memory_needed import spec_of

_PR_SET_PDEATHSIG = 1


class System(Protocol):
    """Dispatch and combine of another system, enqueued on the current stream; made by all ranks."""

    @property
    def left_out(self) -> Mapping[str, str | None]:
        """By operation, the work that it leaves out or that is done for it off the clock."""

    @property
    def keys(self) -> Line:
        """Further keys of its result lines."""

    def take(self, index: int, *, fresh: bool) -> None:
        """Prepare the tokens of a step. With `fresh`, take new tokens and poison the results of the last step."""

    def dispatch(self) -> None: ...

    def combine(self) -> None: ...

    def exchange(self) -> None:
        """Do both. The results of `dispatch` and `combine` stay as they are."""

    def wrong_dispatch(self) -> str | None:
        """Return what is wrong with the result of a dispatch of fresh tokens, or None."""

    def wrong_combine(self) -> str | None:
        """Return what is wrong with the result of its combine, or None."""


class SystemSteps:
    """Steps of a system, cold and warm. All ranks are done with one step before any begins the next."""

    ops = tuple((op, l2) for op in ("dispatch", "combine", "exchange") for l2 in ("cold", "warm"))

    def __init__(self, world: World, system: System, job: Job) -> None:
        self._world, self._system = world, system
        new_stream: Any = torch.cuda.Stream  # has no annotations
        self._stream: torch.cuda.Stream = new_stream(world.device)
        self._calls = calls_of(job.shape.tokens)
        self._pools: list[Any] = []
        with torch.cuda.stream(self._stream):
            system.take(0, fresh=False)
            system.dispatch()  # the first call connects, allocates and compiles
            system.combine()
            self._settle()
            self._clock, self._timed = self._made_ready(captured=job.steps.graph is not False)

    @property
    def facts(self) -> SystemFacts:
        keys: Line = {
            **self._system.keys,
            "graph": self._clock.captured,
            "device": torch.cuda.get_device_name(self._world.device),
        }
        return SystemFacts(self.ops, dict(self._system.left_out), keys)

    def __call__(self, index: int, *, verify: bool) -> tuple[float, ...]:
        """Return microseconds of each operation. Raise RaymoeError if a verified step left wrong rows."""
        dispatch, combine, both = self._timed
        self._world.barrier("another system: step")  # no rank reads results of the step before any more
        with torch.cuda.stream(self._stream):
            self._system.take(index, fresh=verify)
            us = [*self._clock.us(dispatch)]
            if verify:
                _refuse(index, "dispatch", self._system.wrong_dispatch())
            us += self._clock.us(combine)
            if verify:
                _refuse(index, "combine", self._system.wrong_combine())
            us += self._clock.us(both)
        return tuple(us)

    def _made_ready(self, *, captured: bool) -> tuple[OpClock, tuple[TimedOp, TimedOp, TimedOp]]:
        """Make the clock and the timed operations: captured on all ranks, or on none if capture fails on one."""
        clock = OpClock(self._world, self._stream, self._settle, captured=captured, calls=self._calls)
        problem = None
        try:
            ops = self._system.dispatch, self._system.combine, self._system.exchange
            dispatch, combine, both = (self._ready_to_time(clock, op) for op in ops)
        except (RaymoeError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
            problem = str(error)
        problems = [text for text in self._world.swap(problem, "another system: captured") if text is not None]
        if not problems:
            return clock, (dispatch, combine, both)
        clock.close()
        if not captured:
            raise RaymoeError(str(problems[0]))
        return self._made_ready(captured=False)

    def _ready_to_time(self, clock: OpClock, op: Work) -> TimedOp:
        """Capture an operation, whose allocations come from a pool of its own.

        A graph writes to the memory that its capture has allocated, in each replay. From torch's common pool that
        memory would go to other tensors once the operation has freed it.
        """
        if not clock.captured:
            return clock.timed(op)
        self._pools.append(torch.cuda.MemPool())
        with torch.cuda.use_mem_pool(self._pools[-1]):
            return clock.timed(op)

    def _settle(self) -> None:
        torch.cuda.synchronize(self._world.device)


def _refuse(index: int, op: str, wrong: str | None) -> None:
    if wrong is not None:
        raise RaymoeError(f"its {op} of step {index} was wrong: {wrong}")


def system_of(world: World, job: Job) -> System:
    """Make the system of a job, with the tokens of this rank. Imported here, so that a failed import is an answer."""
    from raymoe.workload.compare.deep_ep import DeepEp
    from raymoe.workload.compare.flash_infer import FlashInfer
    from raymoe.workload.compare.nccl_ep import NcclEp
    from raymoe.workload.compare.nvshmem import VdevAllToAll

    spec = spec_of(job)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    inputs = Inputs(Routing.of(job), world.rank, spec.hidden, dtype, world.device)
    backend, sms = job.exchange.backend, job.exchange.sms if isinstance(job.exchange.sms, int) else 0
    if backend == "deepep_v2":
        return DeepEp(world, spec, inputs, sms)
    if backend in NCCL_EP:
        return NcclEp(world, spec, inputs, sms, low_latency=backend == "nccl_ep_ll")
    if backend == FLASHINFER:
        return FlashInfer(world, spec, inputs)
    return VdevAllToAll(world, spec, inputs)


def serve(connection: Connection) -> None:
    """Answer messages until the connection ends. A failure is the last answer."""
    try:
        order = connection.recv()
        job = job_from_resolved(order.job)
        world = World.open(
            order.rank,
            job.world.ranks,
            name=order.name,
            generation=order.generation,
            timeout_s=order.timeout_s,
            device="cuda",
        )
        connection.send(Answer(dict(world.descriptor())))
        world.wire(connection.recv())
        steps = SystemSteps(world, system_of(world, job), job)
        connection.send(Answer(steps.facts))
        while True:
            index, verify = connection.recv()
            connection.send(Answer(steps(index, verify=verify)))
    except (EOFError, ConnectionResetError):
        raise
    except Exception as error:  # noqa: BLE001 - another system may raise anything; the answer says it
        known = isinstance(error, RaymoeError)
        first = next(iter(str(error).splitlines()), "")
        connection.send(Answer(failure=first if known else f"{type(error).__name__}: {first}", explained=known))


def main(fd: int) -> None:
    """Run the program that `SystemProcess` starts.

    It ends without destructors: those of other libraries may wait for one another.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):  # the rank has closed it, or is gone
        serve(Connection(fd))
    os._exit(0)
