"""Another system beside each rank, in a process of its own, driven step by step over a socket.

- **Nothing that it does ends the run.** It may hang, crash, or end its process: every answer is awaited with a bound,
  then the process is killed, and what happened is a sentence.
- **All ranks give up together.** After a trouble a step takes no time and does nothing, so that a rank whose process
  is gone still meets the others in every round; at the end they tell one another.
- **No multicast.** Programs that create multicast objects of NVLink can put a machine's GPUs out of service, so the
  libraries that would are told not to, whatever is set outside.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from raymoe.job import Job
from raymoe.job.errors import RaymoeError
from raymoe.memory.world import World
from raymoe.workload.lines import Line
from raymoe.workload.measure import Step
from raymoe.workload.other_heap import heap_bytes
from raymoe.workload.room import spec_of

START_S = 60.0
"""To import torch and the system, to connect, and to compile what it compiles."""

_LOOK_S = 0.1
_KILL_S = 5.0
_NO_MULTICAST = {"NVSHMEM_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

# The child imports from where its parent does; -P keeps the working directory out of the way until then.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from raymoe.workload.apart_process import main; main(int(sys.argv[2]))"
)


@dataclass(frozen=True)
class Order:
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
class Facts:
    """What the process tells of its system once it is ready."""

    ops: tuple[tuple[str, str], ...]
    left_out: dict[str, str | None]
    keys: Line = field(default_factory=dict)


class Trouble(RaymoeError):  # noqa: N818 - it says what there is
    """The process, or the system in it, will give no answer any more; the message says why."""


class Apart:
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
                    raise Trouble(f"no answer within {bound_s:g} s{self._last_words()}")
            answer = self._line.recv()
        except (EOFError, OSError) as error:
            raise Trouble(f"its process {self._ending()}{self._last_words()}") from error
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

    def _last_words(self) -> str:
        """The last line that the process printed, for whatever ended it without an answer."""
        printed = os.pread(self._printed, 1 << 20, 0).decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(printed) if line.strip()), "")
        return last and f": {last}"


class ApartStep:
    """A step of another system, done by the processes beside the ranks.

    `begin` is collective and says what stands in the way, the same on all ranks; `keys` and `left_out` are there from
    then on. `trouble` is this rank's alone.
    """

    def __init__(self, world: World, job: Job) -> None:
        self._world, self._job = world, job
        self.trouble: str | None = None
        self.facts = Facts((), {})
        uuids = [str(uuid) for uuid in world.swap(_uuid(world), "another system: GPUs")]
        self._process = Apart(world, environment(job, uuids, world.rank))

    def begin(self) -> str | None:
        world = self._world
        name = f"{world.name}-{self._job.exchange.backend}"
        order = Order(self._job.resolved(), world.rank, name, world.generation, world.timeout_s)
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
