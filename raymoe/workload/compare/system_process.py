"""The process beside a rank that another system runs in: answers `systems.SystemProcess` message by message.

Its world is one of its own, of the processes beside all ranks, and its clock is the one that our backends are timed by.
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

from raymoe.config import Job
from raymoe.errors import RaymoeError
from raymoe.memory.world import World
from raymoe.workload.clock import OpClock, TimedOp, calls_of
from raymoe.workload.compare.systems import Answer, SystemFacts
from raymoe.workload.inputs import Inputs, Routing
from raymoe.workload.measure import Line
from raymoe.workload.memory_needed import spec_of

_PR_SET_PDEATHSIG = 1


class System(Protocol):
    """Dispatch and combine of another system, enqueued on the current stream; made by all ranks."""

    @property
    def left_out(self) -> Mapping[str, str | None]:
        """By operation, what it does not do, or was done for it off the clock."""

    def take(self, index: int, *, fresh: bool) -> None:
        """Have the tokens of a step ready; what the last step left is overwritten, also with nonsense if `fresh`."""

    def dispatch(self) -> None: ...

    def combine(self) -> None: ...

    def wrong_dispatch(self) -> str | None:
        """What is wrong with what the dispatch of fresh tokens left."""

    def wrong_combine(self) -> str | None: ...


class SystemSteps:
    """Steps of a system, cold and warm, with all ranks done with one step before anybody begins the next."""

    ops = tuple((op, l2) for op in ("dispatch", "combine", "exchange") for l2 in ("cold", "warm"))

    def __init__(self, world: World, system: System, job: Job) -> None:
        self._world, self._system = world, system
        new_stream: Any = torch.cuda.Stream  # has no annotations
        self._stream: torch.cuda.Stream = new_stream(world.device)
        self._calls = calls_of(job.shape.tokens)
        with torch.cuda.stream(self._stream):
            system.take(0, fresh=False)
            self._both()  # connects, allocates and compiles whatever the first call does
            self._settle()
            self._clock, self._timed = self._made_ready(captured=job.steps.graph is not False)

    @property
    def facts(self) -> SystemFacts:
        keys: Line = {
            "graph": self._clock.captured,
            "device": torch.cuda.get_device_name(self._world.device),
        }
        return SystemFacts(self.ops, dict(self._system.left_out), keys)

    def __call__(self, index: int, *, verify: bool) -> tuple[float, ...]:
        """Microseconds of each operation. RaymoeError where a verified step left wrong rows."""
        dispatch, combine, both = self._timed
        self._world.barrier("another system: step")  # nobody reads what the step before left any more
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
        """Captured on all ranks, or on none where it fails on one."""
        clock = OpClock(self._world, self._stream, self._settle, captured=captured, calls=self._calls)
        problem = None
        try:
            ops = self._system.dispatch, self._system.combine, self._both
            dispatch, combine, both = (clock.timed(op) for op in ops)
        except (RaymoeError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
            problem = str(error)
        problems = [each for each in self._world.swap(problem, "another system: captured") if each is not None]
        if not problems:
            return clock, (dispatch, combine, both)
        clock.close()
        if not captured:
            raise RaymoeError(str(problems[0]))
        return self._made_ready(captured=False)

    def _both(self) -> None:
        self._system.dispatch()
        self._system.combine()

    def _settle(self) -> None:
        torch.cuda.synchronize(self._world.device)


def _refuse(index: int, op: str, wrong: str | None) -> None:
    if wrong is not None:
        raise RaymoeError(f"its {op} of step {index} was wrong: {wrong}")


def system_of(world: World, job: Job) -> System:
    """The system that a job names, with the tokens of this rank. Imported here, so that what it lacks is an answer."""
    from raymoe.workload.compare.nvshmem import VdevAllToAll

    spec = spec_of(job)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    inputs = Inputs(Routing.of(job), world.rank, spec.hidden, dtype, world.device)
    return VdevAllToAll(world, spec, inputs)


def serve(line: Connection) -> None:
    """Answer until the line ends; a trouble is the last answer."""
    try:
        order = line.recv()
        job = Job.from_resolved(order.job)
        world = World.open(
            order.rank,
            job.world.ranks,
            name=order.name,
            generation=order.generation,
            timeout_s=order.timeout_s,
            device="cuda",
        )
        line.send(Answer(dict(world.descriptor())))
        world.wire(line.recv())
        steps = SystemSteps(world, system_of(world, job), job)
        line.send(Answer(steps.facts))
        while True:
            index, verify = line.recv()
            line.send(Answer(steps(index, verify=verify)))
    except (EOFError, ConnectionResetError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a stranger's code raises is told as its trouble
        known = isinstance(error, RaymoeError)
        first = next(iter(str(error).splitlines()), "")
        line.send(Answer(trouble=first if known else f"{type(error).__name__}: {first}"))


def main(fd: int) -> None:
    """The entry of the program that `SystemProcess` starts.

    It ends without destructors: those of other libraries may wait for one another.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):  # the rank has closed, or is gone
        serve(Connection(fd))
    os._exit(0)
