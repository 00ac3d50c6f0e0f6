"""Other systems under the clock of our backends, each in a process of its own beside each rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from raymoe.config import Case, Job
from raymoe.errors import RaymoeError
from raymoe.memory.world import World
from raymoe.workload.inputs import Routing, draws_of
from raymoe.workload.measure import Line, Step, Steps, measure, result_line, shape_keys
from raymoe.workload.memory_needed import heap_bytes, spec_of
from raymoe.workload.progress import Progress, step_listener
from raymoe.workload.traffic import traffic_of

# Another system beside each rank, in a process of its own, driven step by step over a socket.
#
# - **Nothing that it does ends the run.** It may hang, crash, or end its process: every answer is awaited with a bound,
#   then the process is killed, and what happened is a sentence.
# - **All ranks give up together.** After a trouble a step takes no time and does nothing, so that a rank whose process
#   is gone still meets the others in every round; at the end they tell one another.
# - **No multicast.** Programs that create multicast objects of NVLink can put a machine's GPUs out of service, so the
#   libraries that would are told not to, whatever is set outside.

START_S = 60.0
"""To import torch and the system, to connect, and to compile what it compiles."""

_LOOK_S = 0.1
_KILL_S = 5.0
_NO_MULTICAST = {"NVSHMEM_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

# The child imports from where its parent does; -P keeps the working directory out of the way until then.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from raymoe.workload.compare.system_process import main; main(int(sys.argv[2]))"
)


@dataclass(frozen=True)
class SystemOrder:
    """What the process is told first: who it is, and the job as `Job.resolved` gives it."""

    job: dict[str, Any]
    rank: int
    name: str
    generation: int
    timeout_s: float


@dataclass(frozen=True)
class Answer:
    """What the process says to each message; `trouble` is its last word."""

    value: Any = None
    trouble: str | None = None


@dataclass(frozen=True)
class SystemFacts:
    """What the process tells of its system once it is ready."""

    ops: tuple[tuple[str, str], ...]
    left_out: dict[str, str | None]
    keys: Line = field(default_factory=dict)


class Trouble(RaymoeError):  # noqa: N818 - it says what there is
    """The process, or the system in it, will give no answer any more; the message says why."""


class SystemProcess:
    """The process of one rank. `ask` raises `Trouble` where there is no good answer; from then on always."""

    def __init__(self, world: World, environment: Mapping[str, str]) -> None:
        self._waiter = world.waiter
        ours, its = socket.socketpair()
        self._line = Connection(ours.detach())
        self._printed = os.memfd_create("printed")
        command = [sys.executable, "-P", "-c", PROGRAM, json.dumps(sys.path), str(its.fileno())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=[its.fileno()],
            start_new_session=True,
            env={**os.environ, **environment, **_NO_MULTICAST},
        )
        its.close()

    def ask(self, message: object, bound_s: float) -> Any:
        """The answer to a message. An abort of this rank ends the wait."""
        deadline = time.monotonic() + bound_s
        try:
            self._line.send(message)
            while not self._line.poll(_LOOK_S):
                self._waiter.check()
                if time.monotonic() > deadline:
                    raise Trouble(f"no answer within {bound_s:g} s{self._crash_report()}")
            answer = self._line.recv()
        except (EOFError, OSError) as error:
            raise Trouble(f"its process {self._ending()}{self._crash_report()}") from error
        assert isinstance(answer, Answer)
        if answer.trouble is not None:
            raise Trouble(answer.trouble)
        return answer.value

    def close(self) -> None:
        """Kill the process and what it started. One that the kernel does not let go is left where it is."""
        with contextlib.suppress(ProcessLookupError):  # nobody of its session is left
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it sleeps in the kernel; nothing waits for it any longer
            self._process.wait(timeout=_KILL_S)
        self._line.close()
        if self._printed >= 0:
            os.close(self._printed)
            self._printed = -1

    def _ending(self) -> str:
        try:
            code = self._process.wait(timeout=_KILL_S)
        except subprocess.TimeoutExpired:
            return "closed its line"
        return f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}"

    def _crash_report(self) -> str:
        """The last line that the process printed, for whatever ended it without an answer."""
        printed = os.pread(self._printed, 1 << 20, 0).decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(printed) if line.strip()), "")
        return last and f": {last}"


class SystemStep:
    """A step of another system, done by the processes beside the ranks.

    `begin` is collective and says what stands in the way, the same on all ranks; `keys` and `left_out` are there from
    then on. `trouble` is this rank's alone.
    """

    def __init__(self, world: World, job: Job) -> None:
        self._world, self._job = world, job
        self.trouble: str | None = None
        self.facts = SystemFacts((), {})
        uuids = [str(uuid) for uuid in world.swap(_uuid(world), "another system: GPUs")]
        self._process = SystemProcess(world, environment(job, uuids, world.rank))

    def begin(self) -> str | None:
        world = self._world
        name = f"{world.name}-{self._job.exchange.backend}"
        order = SystemOrder(self._job.resolved(), world.rank, name, world.generation, world.timeout_s)
        descriptor = self._ask(order, START_S)
        answers = world.swap((self.trouble, descriptor), "another system: opened")
        if (reason := _first_trouble(answers)) is not None:
            return reason
        facts = self._ask([answer[1] for answer in answers], START_S)  # type: ignore[index]
        answers = world.swap((self.trouble, None), "another system: ready")
        if (reason := _first_trouble(answers)) is None:
            self.facts = facts
        return reason

    @property
    def ops(self) -> tuple[tuple[str, str], ...]:
        return self.facts.ops

    @property
    def keys(self) -> Line:
        return self.facts.keys

    @property
    def left_out(self) -> dict[str, str | None]:
        return self.facts.left_out

    def __call__(self, index: int, *, verify: bool) -> Step:
        us = None if self.trouble else self._ask((index, verify), 2 * self._world.timeout_s + START_S)
        return Step(us or (0.0,) * len(self.ops), 0.0 if verify else None)

    def close(self) -> None:
        self._process.close()

    def _ask(self, message: object, bound_s: float) -> Any:
        """The answer, None after a trouble."""
        try:
            return self._process.ask(message, bound_s)
        except Trouble as error:
            self.trouble = str(error)
            self._process.close()
            return None


def environment(job: Job, uuids: Sequence[str], rank: int) -> dict[str, str]:
    """What is set for the process: all GPUs of the world are visible to it, its own first, and its heap is plain memory
    of the size that it needs, allocated once.

    >>> job = Job(name="x", workload="exchange", exchange={"backend": "nvshmem"})
    >>> environment(job, ["a", "b"], rank=1)["CUDA_VISIBLE_DEVICES"]
    'GPU-b,GPU-a'
    """
    visible = [uuids[rank], *(uuid for other, uuid in enumerate(uuids) if other != rank)]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(f"GPU-{uuid}" for uuid in visible),
        "NVSHMEM_DISABLE_CUDA_VMM": "1",
        "NVSHMEM_SYMMETRIC_SIZE": str(heap_bytes(spec_of(job), job.world.ranks)),
        "NVSHMEM_REMOTE_TRANSPORT": "none",
        "NVSHMEM_DISABLE_NCCL": "1",
        "TORCH_SYMMMEM_IMPLICIT_POOL": "0",
    }


def _uuid(world: World) -> str:
    return world.gpu.uuid if world.device.type == "cuda" else ""


def _first_trouble(answers: Sequence[object]) -> str | None:
    troubles = [answer[0] for answer in answers]  # type: ignore[index]
    return next((f"rank {rank}: {why}" for rank, why in enumerate(troubles) if why is not None), None)


# Other systems under the clock of our backends: each a case like any other, or a line that says why it was not run.
#
# Each runs in a process of its own beside each rank, because it may end the process where it meets what it cannot do,
# gives no memory back before the process ends, and wants settings that are nobody else's. What it cannot do, or does
# wrong, is told in the results and ends no run.


def run_other(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """The lines of one system's operations, each cold and warm, or one line that says why there are none."""
    job = case.job
    steps = Steps(job.steps.warmup, job.steps.count, job.steps.verify, bound=0.0)
    reason = _first(world, refusal(job))
    if reason is None:
        step = SystemStep(world, job)
        try:
            reason = step.begin()
            if reason is None:
                what = f"{case.name}: exchange by {job.exchange.backend}"
                measured = measure(world, steps, step, step_listener(progress, steps.total), what)
                reason = _first(world, step.trouble)
        finally:
            step.close()
    if reason is not None:
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
        return [skipped_line(case, reason) | {"device": device}]
    spec = spec_of(job)
    by_op = traffic_of(world, draws_of(Routing.of(job), world.rank), spec).by_op
    shared = shape_keys(case, job.exchange.backend) | step.keys
    return [
        result_line(case, op, by_op[op], measured, place) | shared | {"l2": l2, "leaves_out": step.left_out[op]}
        for place, (op, l2) in enumerate(step.ops)
    ]


def refusal(job: Job) -> str | None:
    """Why a case is not even begun, as far as one rank can tell by itself."""
    backend = job.exchange.backend
    if job.world.ranks == 1:
        return "one rank has no peer to send to"
    if job.world.share_gpu:
        return f"ranks share a GPU; {backend} wants one a rank"
    if job.exchange.wire.dispatch is not None and job.exchange.wire.dispatch != job.shape.dtype:
        return f"rows as {job.exchange.wire.dispatch}; {backend} is run with rows of the dtype and quantises nothing"
    if job.exchange.wire.combine is not None and job.exchange.wire.combine != job.shape.dtype:
        return f"sums as {job.exchange.wire.combine}; {backend} is run with sums of the dtype"
    return None


def skipped_line(case: Case, reason: str) -> Line:
    """A line without figures."""
    said = {"case": case.name, "workload": case.job.workload, "op": "exchange", "ranks": case.job.world.ranks}
    return said | shape_keys(case, case.job.exchange.backend) | {"samples": 0, "skipped": reason}


def _first(world: World, reason: str | None) -> str | None:
    """The first rank's reason that has one; the same on all ranks."""
    reasons = world.swap(reason, "another system: reason")
    return next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why is not None), None)
