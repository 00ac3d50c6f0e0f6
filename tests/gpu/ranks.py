"""Rank processes for tests on real GPUs: one GPU for each rank if there are enough, else several ranks share one.

`GpuRanks` starts each rank as a process, kills it at the end, and never waits for it without a limit. A process may get
time to end by itself first, for a tool that reports when the process ends.
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

from raymoe.memory.address import LOOPBACK
from raymoe.memory.member import Member
from raymoe.memory.world import SpanningWorld, World

GPUS = torch.cuda.device_count() if torch.version.cuda else 0
RANKS = max(3, GPUS)
DEADLINE_S = 90.0

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason=f"needs an NVIDIA GPU; torch {torch.__version__} sees none here"),
]
"""The `pytestmark` of a file of such tests."""


class RankGone(Exception):  # noqa: N818 - it says what happened
    """A rank process ended, or did not answer in time."""


class GpuRanks:
    """`run(size, f, *args)` calls `f(world, *args)` on ranks of a new world, each in its process, pinned to a GPU.

    If a rank of a world fails, the processes of all its ranks are started again. A context may still have waits in its
    streams or memory that a peer maps, which must not affect the next test.

    `grace_s`: seconds that processes have to end by themselves, after a failure too, before they are killed.
    """

    def __init__(self, size: int, grace_s: float = 0.0) -> None:
        self._grace_s = grace_s
        self._members = [_Process(rank) for rank in range(size)]

    def run(self, size: int, function: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
        """Return the results in rank order, or raise the first error, with notes about the others."""
        outcomes = self.outcomes(size, function, *args, **options)
        errors = [(rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
        if errors:
            _, first = errors[0]
            for rank, error in errors[1:]:
                first.add_note(f"rank {rank}: {type(error).__name__}: {error}")
            raise first
        return outcomes

    def outcomes(self, size: int, function: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
        """Return the results, with errors in the place of missing ones.

        `options` are those of `World.open`. With `domain_size` the world has domains of so many ranks.
        """
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
            member.send((rank, len(members), *work))
        descriptors = [member.answer(deadline) for member in members]
        if any(isinstance(descriptor, BaseException) for descriptor in descriptors):
            not_run = RankGone("not run: another rank could not open its world")
            return [d if isinstance(d, BaseException) else not_run for d in descriptors]
        for member in members:
            member.send(descriptors)
        return [member.answer(deadline) for member in members]

    def __enter__(self) -> GpuRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self._members)

    def _end(self, members: list[_Process]) -> None:
        if self._grace_s:
            for member in members:
                member.close_pipe()
        deadline = time.monotonic() + self._grace_s
        for member in members:
            member.end(deadline)


class _Process:
    """One rank process, and the test's end of the pipe to it."""

    def __init__(self, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS)))).split(",")
        self._pipe, their_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(their_end, visible[rank % max(1, GPUS)]), daemon=True)
        self._process.start()
        their_end.close()

    def send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `answer` reports that the process is gone
            self._pipe.send(message)

    def answer(self, deadline: float) -> Any:
        """Return the answer of the process, or an error that says why there is none."""
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

    def close_pipe(self) -> None:
        """Close the pipe: a process that waits for work then ends normally."""
        self._pipe.close()

    def end(self, deadline: float) -> None:
        self._process.join(max(0.0, deadline - time.monotonic()))
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, gpu: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # as Ray does; before there is a context
    with contextlib.suppress(EOFError, BrokenPipeError):  # the pipe was closed
        while True:
            rank, size, function, args, options = pipe.recv()
            try:
                world = _open(rank, size, **options)
                pipe.send((world.descriptor(), ""))
                world.wire(pipe.recv())
                outcome = (function(world, *args), "")
                world.close()
            except BaseException as error:  # noqa: BLE001 - the test judges it; pytest's own errors are not Exceptions
                outcome = (_sendable(error), traceback.format_exc())
            pipe.send(outcome)


def _open(rank: int, size: int, domain_size: int | None = None, **options: Any) -> World:
    """Open a world, or with `domain_size` one of several domains, which are pretended."""
    member = Member(rank, size, name="gpu-tests", **options)
    if domain_size is None:
        return World.of_member(member)
    return SpanningWorld.open_rank(member, domain_size, LOOPBACK)


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - the pickling of an error may raise anything
        return AssertionError(f"{type(error).__name__}: {error}")
    return error


def free_bytes(world: World) -> int:
    """Return the free bytes of this rank's GPU, when torch on all ranks holds only the memory that it keeps."""
    torch.zeros(1, device=world.device)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    world.barrier("settled")
    return torch.cuda.mem_get_info()[0]
