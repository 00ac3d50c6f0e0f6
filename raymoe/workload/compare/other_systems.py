"""Time other systems with the clock of the backends. Each is a case like any other, or a line that says why not.

Each runs in a process of its own beside each rank. It may end the process on a case that it cannot do. It frees no
memory before the process ends. It needs settings that must not reach others. Results report its failures.

- **No failure ends the run.** A system may hang, crash, or end its process. Every answer is awaited with a bound; then
  the process is killed, and a sentence says what happened.
- **All ranks give up together.** After a failure a step takes no time and does nothing. So a rank whose process is gone
  still meets the others in every round. At the end the ranks swap their failures.
- **No multicast.** Programs that create multicast objects of NVLink can put a machine's GPUs out of service. So the
  process sets the variables that forbid it to libraries, whatever is set outside.
"""

from __future__ import annotations

import contextlib
import importlib.util
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
from pathlib import Path
from typing import Any

import torch

from raymoe.config import Case, Job
from raymoe.errors import RaymoeError
from raymoe.fp8 import FP8
from raymoe.memory.world import World
from raymoe.workload.inputs import Routing, draws_of
from raymoe.workload.measure import Line, Step, Steps, measure, result_line, runs_of, shape_keys
from raymoe.workload.memory_needed import heap_bytes, spec_of
from raymoe.workload.progress import Progress, step_listener
from raymoe.workload.traffic import traffic_of

# Another system beside each rank, in a process of its own, driven step by step over a socket.

START_S = 60.0
"""Seconds to import torch and the system, to connect, and to compile."""
NVCC_START_S = 240.0
"""The same for systems whose first process compiles kernels of thousands of lines by nvcc. Later ones find them."""

NCCL_EP = ("nccl_ep", "nccl_ep_ll")
"""NCCL EP by its algorithms for many tokens (high throughput) and for few (low latency)."""
FLASHINFER = "flashinfer"
LOW_LATENCY_EXPERTS = 14
"""The most experts that an SM serves in its low latency."""
GUARDED_SMS = 16
"""SMs that its guard between two rounds of high throughput has barriers for."""

_POLL_S = 0.1
_KILL_S = 5.0
_NO_MULTICAST = {"NVSHMEM_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

# The child imports from the parent's sys.path; until that is set, -P keeps the working directory out of it.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from raymoe.workload.compare.system_process import main; main(int(sys.argv[2]))"
)


@dataclass(frozen=True)
class SystemOrder:
    """The first message to the process: its place in the world, and the job as `Job.resolved` gives it."""

    job: dict[str, Any]
    rank: int
    name: str
    generation: int
    timeout_s: float


@dataclass(frozen=True)
class Answer:
    """The answer of the process to a message. After a `failure` there is no other answer."""

    value: Any = None
    failure: str | None = None
    explained: bool = True
    """Whether the failure says why. An error code does not; then the reason is among the lines that were printed."""


@dataclass(frozen=True)
class SystemFacts:
    """The process sends these about its system once it is ready."""

    ops: tuple[tuple[str, str], ...]
    left_out: dict[str, str | None]
    keys: Line = field(default_factory=dict)


class SystemFailed(RaymoeError):  # noqa: N818 - it says what happened
    """The process, or the system in it, gives no more answers; the message says why."""


class SystemProcess:
    """The process beside one rank. After `ask` has raised `SystemFailed`, close the process and do not ask again."""

    def __init__(self, world: World, environment: Mapping[str, str]) -> None:
        self._waiter = world.waiter
        our_end, its_end = socket.socketpair()
        self._connection = Connection(our_end.detach())
        self._printed = os.memfd_create("printed")
        command = [sys.executable, "-P", "-c", PROGRAM, json.dumps(sys.path), str(its_end.fileno())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=[its_end.fileno()],
            start_new_session=True,
            env={**os.environ, **environment, **_NO_MULTICAST},
        )
        its_end.close()

    def ask(self, message: object, bound_s: float) -> Any:
        """Send a message; return the answer. Raise `SystemFailed` if none comes. An abort of this rank ends it."""
        deadline = time.monotonic() + bound_s
        try:
            self._connection.send(message)
            while not self._connection.poll(_POLL_S):
                self._waiter.check()
                if time.monotonic() > deadline:
                    raise SystemFailed(f"no answer within {bound_s:g} s{self._crash_report()}")
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise SystemFailed(f"its process {self._ending()}{self._crash_report()}") from error
        assert isinstance(answer, Answer)
        if answer.failure is not None:
            raise SystemFailed(answer.failure + ("" if answer.explained else self._crash_report()))
        return answer.value

    def close(self) -> None:
        """Kill the process and all that it started. One that does not end within _KILL_S is left behind."""
        with contextlib.suppress(ProcessLookupError):  # no process of its session is left
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it sleeps in the kernel; wait no longer
            self._process.wait(timeout=_KILL_S)
        self._connection.close()
        if self._printed >= 0:
            os.close(self._printed)
            self._printed = -1

    def _ending(self) -> str:
        try:
            code = self._process.wait(timeout=_KILL_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}"

    def _crash_report(self) -> str:
        """Return the last line that the process printed: it may say why there is no answer."""
        printed = os.pread(self._printed, 1 << 20, 0).decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(printed) if line.strip()), "")
        return last and f": {last}"


class SystemStep:
    """A step of another system, done by the processes beside the ranks.

    `begin` is collective. It returns why the system cannot run, the same on all ranks, or None; `keys` and `left_out`
    are there from then on. `failure` is this rank's alone.
    """

    def __init__(self, world: World, job: Job) -> None:
        self._world, self._job = world, job
        self._start_s = NVCC_START_S if job.exchange.backend in (*NCCL_EP, FLASHINFER) else START_S
        self.failure: str | None = None
        self.facts = SystemFacts((), {})
        uuids = [str(uuid) for uuid in world.swap(_uuid(world), "another system: GPUs")]
        self._process = SystemProcess(world, environment(job, uuids, world.rank))

    def begin(self) -> str | None:
        world = self._world
        name = f"{world.name}-{self._job.exchange.backend}"
        order = SystemOrder(self._job.resolved(), world.rank, name, world.generation, world.timeout_s)
        descriptor = self._ask(order, self._start_s)
        answers = world.swap((self.failure, descriptor), "another system: opened")
        if (reason := _first_failure(answers)) is not None:
            return reason
        facts = self._ask([answer[1] for answer in answers], self._start_s)  # type: ignore[index]
        answers = world.swap((self.failure, None), "another system: ready")
        if (reason := _first_failure(answers)) is None:
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
        us = None if self.failure else self._ask((index, verify), 2 * self._world.timeout_s + self._start_s)
        return Step(us or (0.0,) * len(self.ops), 0.0 if verify else None)

    def close(self) -> None:
        self._process.close()

    def _ask(self, message: object, bound_s: float) -> Any:
        """Return the answer, or None after a failure."""
        try:
            return self._process.ask(message, bound_s)
        except SystemFailed as error:
            self.failure = str(error)
            self._process.close()
            return None


def environment(job: Job, uuids: Sequence[str], rank: int) -> dict[str, str]:
    """Return the variables that are set for the process.

    It sees all GPUs of the world, its own first. NVSHMEM's heap is plain memory of the size that it needs, allocated
    once.

    >>> job = Job(name="x", workload="exchange", exchange={"backend": "nvshmem"})
    >>> environment(job, ["a", "b"], rank=1)["CUDA_VISIBLE_DEVICES"]
    'GPU-b,GPU-a'
    """
    visible = [uuids[rank], *(uuid for other, uuid in enumerate(uuids) if other != rank)]
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(f"GPU-{uuid}" for uuid in visible)}
    if job.exchange.backend == "deepep_v2":
        # No network. Its NCCL need not be the one that torch was built with. Its compiler needs the headers of both.
        roots = {"EP_NCCL_ROOT_DIR": "nvidia.nccl", "EP_NVSHMEM_ROOT_DIR": "nvidia.nvshmem"}
        missing = {name: package for name, package in roots.items() if name not in os.environ}
        folders = {name: folder for name, package in missing.items() if (folder := _folder_of(package)) is not None}
        return seen | {"EP_DISABLE_GIN": "1", "EP_SUPPRESS_NCCL_CHECK": "1"} | folders
    if job.exchange.backend in NCCL_EP:
        # Kernels of peers map its memory. It compiles its own by the nvcc that CUDA_HOME names.
        return seen | {"NCCL_CUMEM_ENABLE": "1"} | _guard(job) | _compiler()
    if job.exchange.backend == FLASHINFER:
        return seen | _compiler()
    return seen | {
        "NVSHMEM_DISABLE_CUDA_VMM": "1",
        "NVSHMEM_SYMMETRIC_SIZE": str(heap_bytes(spec_of(job), job.world.ranks)),
        "NVSHMEM_REMOTE_TRANSPORT": "none",
        "NVSHMEM_DISABLE_NCCL": "1",
        "TORCH_SYMMMEM_IMPLICIT_POOL": "0",
    }


def _guard(job: Job) -> dict[str, str]:
    """Leave out the guard where it has too few barriers. Each dispatch gathers the routing, so no round overtakes."""
    sms = job.exchange.sms
    unguarded = job.exchange.backend == "nccl_ep" and isinstance(sms, int) and sms > GUARDED_SMS
    return {"NCCL_EP_DISABLE_GUARD": "1"} if unguarded else {}


def _compiler() -> dict[str, str]:
    """Name NVIDIA's packages as CUDA_HOME, if they have an nvcc and the user has named no other."""
    folder = _folder_of("nvidia.cu13")
    if "CUDA_HOME" in os.environ or folder is None or not (Path(folder) / "bin" / "nvcc").is_file():
        return {}
    return {"CUDA_HOME": folder}


def _folder_of(package: str) -> str | None:
    """Return the folder of a package of NVIDIA's, or None if it is not installed.

    >>> _folder_of("nvidia.no_such_package") is None
    True
    """
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even its parent is installed
        return None
    return None if spec is None else next(iter(spec.submodule_search_locations or ()), None)


def _uuid(world: World) -> str:
    return world.gpu.uuid if world.device.type == "cuda" else ""


def _first_failure(answers: Sequence[object]) -> str | None:
    failures = [answer[0] for answer in answers]  # type: ignore[index]
    return next((f"rank {rank}: {why}" for rank, why in enumerate(failures) if why is not None), None)


# The case of another system.


def run_other(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """Return the lines of one system's operations, each cold and warm, or one line that says why there are none."""
    job = case.job
    steps = Steps(job.steps.warmup, job.steps.count, job.steps.verify, bound=0.0)
    reason = _first_reason(world, refusal(job))
    if reason is None:
        step = SystemStep(world, job)
        try:
            reason = step.begin()
            if reason is None:
                label = f"{case.name}: exchange by {job.exchange.backend}"
                samples = measure(world, steps, step, step_listener(progress, steps.total), label)
                reason = _first_reason(world, step.failure)
        finally:
            step.close()
    if reason is not None:
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
        return [skipped_line(case, reason) | {"device": device}]
    spec = spec_of(job)
    by_op = traffic_of(world, draws_of(Routing.of(job), world.rank), spec).by_op
    shared = shape_keys(case, job.exchange.backend) | step.keys
    return [
        result_line(case, op, by_op[op], samples, index)
        | shared
        | {"l2": l2, "runs": runs_of(spec.tokens, step.keys.get("graph"), l2), "leaves_out": step.left_out[op]}
        for index, (op, l2) in enumerate(step.ops)
    ]


def refusal(job: Job) -> str | None:
    """Return why a case cannot begin, as far as one rank can know by itself, or None."""
    backend = job.exchange.backend
    if job.world.ranks == 1:
        return "one rank has no peer to send to"
    if job.world.share_gpu:
        return f"ranks share a GPU; {backend} needs a GPU for each rank"
    exchange, dtype = job.exchange, job.shape.dtype
    rows, sums = exchange.wire.dispatch or dtype, exchange.wire.combine or dtype
    if rows == FP8 and backend == "deepep_v2" and exchange.output != "raw":
        return "deepep_v2 gives rows that crossed as fp8 with their scales: set exchange.output to raw"
    if rows != dtype and not (rows == FP8 and backend == "deepep_v2"):
        return f"rows as {rows}; {backend} is run with rows of the dtype and quantises nothing"
    if sums != dtype:
        return f"sums as {sums}; {backend} is run with sums of the dtype"
    if exchange.layout == "token":
        return f"rows by token; {backend} gives them as rows by rank: set exchange.layout to rank"
    if backend in ("deepep_v2", *NCCL_EP, FLASHINFER) and dtype != "bfloat16":
        return f"rows of {dtype}; {backend} takes bfloat16"
    if backend == "nccl_ep" and exchange.layout == "expert" and exchange.alignment.bit_count() != 1:
        return f"experts at multiples of {exchange.alignment} rows; nccl_ep takes powers of two"
    if backend == FLASHINFER and exchange.layout != "rank":
        return f"rows by {exchange.layout}; flashinfer gives rows by rank: set exchange.layout to rank"
    if backend == FLASHINFER and exchange.sms != "auto":
        return (
            f"{exchange.sms} SMs; flashinfer starts a block for each token and takes no limit: set exchange.sms to auto"
        )
    if backend == FLASHINFER and job.routing.masked:
        return "masked choices; flashinfer takes an expert for each"
    least = -(-job.shape.experts // LOW_LATENCY_EXPERTS)
    if backend == "nccl_ep_ll" and isinstance(exchange.sms, int) and exchange.sms < least:
        return f"{exchange.sms} SMs; nccl_ep_ll takes {least} or more for {job.shape.experts} experts"
    return None


def skipped_line(case: Case, reason: str) -> Line:
    """Return a line that says why a case was not run, and has no times."""
    said = {"case": case.name, "workload": case.job.workload, "op": "exchange", "ranks": case.job.world.ranks}
    return said | shape_keys(case, case.job.exchange.backend) | {"samples": 0, "skipped": reason}


def _first_reason(world: World, reason: str | None) -> str | None:
    """Return the reason of the first rank that has one; the same on all ranks."""
    reasons = world.swap(reason, "another system: reason")
    return next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why is not None), None)
