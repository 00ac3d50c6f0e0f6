"""Rank processes for tests on real GPUs: one GPU for each where there are enough, else GPUs that several share.

Every rank is a process of its own, started by `GpuRanks`, killed at the end and never waited for without a limit. Where
its own end matters, because a tool that looks at it writes then what it has found, it is given time for that first.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from raymoe.memory.world import World

GPUS = torch.cuda.device_count() if torch.version.cuda else 0
RANKS = max(3, GPUS)
DEADLINE_S = 90.0

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason=f"needs an NVIDIA GPU; torch {torch.__version__} sees none here"),
]
"""What a file of such tests has as its `pytestmark`."""


class RankGone(Exception):  # noqa: N818 - it says what happened
    """A rank process ended, or did not answer in time."""


class GpuRanks:
    """`run(size, f, *args)` calls `f(world, *args)` on ranks of a new world, each in its process, pinned to a GPU.

    Where any rank of a world has failed, the processes of all its ranks are started anew: a context may be left with
    waits in its streams or with memory that a peer maps, and the next test must not pay for that.

    `grace_s`: how long processes have to end by themselves, after a failure too, before they are killed.
    """

    def __init__(self, size: int, grace_s: float = 0.0) -> None:
        self._grace_s = grace_s
        self._members = [_Process(rank) for rank in range(size)]

    def run(self, size: int, function: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
        """The results in rank order; the first error is raised, and it tells of the others."""
        outcomes = self.outcomes(size, function, *args, **options)
        errors = [(rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
        if errors:
            _, first = errors[0]
            for rank, error in errors[1:]:
                first.add_note(f"rank {rank}: {type(error).__name__}: {error}")
            raise first
        return outcomes

    def outcomes(self, size: int, function: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
        """The results, or the errors in their place. `options` are those of `World.open`."""
        deadline = time.monotonic() + DEADLINE_S
        options = {"device": "cuda", "share_gpu": size > GPUS, "timeout_s": 20.0, **options}
        members = self._members[:size]
        found: list[Any] = [RankGone("not run: another rank could not open its world")] * size
        try:
            found = self._outcomes(members, (function, args, options), deadline)
        finally:
            if any(isinstance(outcome, BaseException) for outcome in found):
                self._end(members)
                self._members[:size] = [_Process(rank) for rank in range(size)]
        return found

    def _outcomes(self, members: list[_Process], work: tuple[Any, ...], deadline: float) -> list[Any]:
        for rank, member in enumerate(members):
            member.tell((rank, len(members), *work))
        descriptors = [member.answer(deadline) for member in members]
        if any(isinstance(descriptor, BaseException) for descriptor in descriptors):
            left_out = RankGone("not run: another rank could not open its world")
            return [d if isinstance(d, BaseException) else left_out for d in descriptors]
        for member in members:
            member.tell(descriptors)
        return [member.answer(deadline) for member in members]

    def __enter__(self) -> GpuRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self._members)

    def _end(self, members: list[_Process]) -> None:
        if self._grace_s:
            for member in members:
                member.let_go()
        deadline = time.monotonic() + self._grace_s
        for member in members:
            member.end(deadline)


class _Process:
    """One rank process, and our end of the pipe to it."""

    def __init__(self, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS)))).split(",")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, visible[rank % max(1, GPUS)]), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its answer says that it is gone
            self._pipe.send(message)

    def answer(self, deadline: float) -> Any:
        """What it sent, or an error that says why there is nothing."""
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            return RankGone(f"process {self._process.pid} did not answer within {DEADLINE_S} s")
        try:
            answer, trace = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            return RankGone(f"process {self._process.pid} ended with exit code {self._process.exitcode}")
        if trace:
            answer.add_note(trace)
        return answer

    def let_go(self) -> None:
        """There is no more work: a process that waits for some ends, as Python does."""
        self._pipe.close()

    def end(self, deadline: float) -> None:
        self._process.join(max(0.0, deadline - time.monotonic()))
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, gpu: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # as Ray does; no context is there yet
    with contextlib.suppress(EOFError, BrokenPipeError):  # let go, waiting for work or in the midst of it
        while True:
            rank, size, function, args, options = pipe.recv()
            try:
                world = World.open(rank, size, name="gpu-tests", **options)
                pipe.send((world.descriptor(), ""))
                world.wire(pipe.recv())
                outcome = (function(world, *args), "")
                world.close()
            except BaseException as error:  # noqa: BLE001 - the test judges it; pytest's own are no Exceptions
                outcome = (_sendable(error), traceback.format_exc())
            pipe.send(outcome)


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever an error's own pickling raises
        return AssertionError(f"{type(error).__name__}: {error}")
    return error


def free_bytes(world: World) -> int:
    """Of this rank's GPU, when torch has what it keeps for itself on all ranks."""
    torch.zeros(1, device=world.device)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    world.barrier("settled")
    return torch.cuda.mem_get_info()[0]
