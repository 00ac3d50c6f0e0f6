"""Rank processes that outlive a test.

An import of torch in each would take most of a small test's time. They are therefore forked from a process that has
only imported torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 60.0


class RankPool:
    """`run(n, f, *args)` calls `f(world, *args)` on n ranks of a new world and returns the results in rank order."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "raymoe.memory.world"])
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            near_end, far_end = context.Pipe()
            process = context.Process(target=_serve, args=(far_end,), daemon=True)
            process.start()
            far_end.close()
            self._pipes.append(near_end)
            self._processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *args: object) -> list[Any]:
        """Return the results; raise the first error."""
        outcomes = self.outcomes(size, function, *args)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def outcomes(self, size: int, function: Callable[..., Any], *args: object) -> list[Any]:
        """Return each rank's result, or the error it raised."""
        deadline = time.monotonic() + DEADLINE_S
        pipes = self._pipes[:size]
        for rank, pipe in enumerate(pipes):
            pipe.send((rank, size, function, args))
        descriptors = [_receive(pipe, deadline) for pipe in pipes]
        for pipe in pipes:
            pipe.send(descriptors)
        return [_outcome(pipe, deadline) for pipe in pipes]

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()  # it holds nothing that outlives it, and torch exits slowly
            process.join()


def _outcome(pipe: Connection, deadline: float) -> Any:
    try:
        return _receive(pipe, deadline)
    except (EOFError, ConnectionResetError) as error:
        return error  # the process has ended


def _receive(pipe: Connection, deadline: float) -> Any:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError(f"a rank process did not answer within {DEADLINE_S} s")
    return pipe.recv()


def _serve(pipe: Connection) -> None:
    import torch

    from raymoe.memory.world import World

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            rank, size, function, args = pipe.recv()
            world = World.open(rank, size, name="pool", timeout_s=20.0)
            pipe.send(world.descriptor())
            world.wire(pipe.recv())
            try:
                outcome = function(world, *args)
            except Exception as error:  # noqa: BLE001 - the test judges it
                outcome = error
            world.close(together=not isinstance(outcome, Exception))
            pipe.send(outcome)
