"""Start rank processes that see all GPUs, as torchrun does, and the functions that tests of worlds run in them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raymoe.errors import RaymoeError
from raymoe.memory.world import World
from tests.gpu import exchange_ranks as on_rank
from tests.unit.exchange.exchange_cases import Case, Result, run_case

DEADLINE_S = 150.0
KINDS = ["whole", "parts", "eager", "captured dispatch", "smaller", "whole"]


def torchrun(size: int, folder: Path, backend: str, function: Callable[..., Any], *args: object) -> list[Any]:
    """Return the results of `function(rank, *args)` in each of `size` new processes with a default process group."""
    context = multiprocessing.get_context("spawn")
    deadline, members = time.monotonic() + DEADLINE_S, []
    folder.mkdir(exist_ok=True)
    for rank in range(size):
        our_end, their_end = context.Pipe()
        work = (rank, size, str(folder / "store"), backend, function, args)
        process = context.Process(target=_serve, args=(their_end, work), daemon=True)
        process.start()
        their_end.close()
        members.append((process, our_end))
    try:
        return [_answer(rank, pipe, deadline) for rank, (_, pipe) in enumerate(members)]
    finally:
        for process, pipe in members:
            process.join(2)
            process.kill()
            process.join()
            pipe.close()


def _answer(rank: int, pipe: Connection, deadline: float) -> Any:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError(f"rank {rank} did not answer within {DEADLINE_S} s")
    answer, trace = pickle.loads(pipe.recv_bytes())
    if trace:
        raise AssertionError(f"rank {rank}: {trace}")
    return answer


def _serve(pipe: Connection, work: tuple[Any, ...]) -> None:
    rank, size, store, backend, function, args = work
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    try:
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        answer = (function(rank, *args), "")
    except BaseException:  # noqa: BLE001 - the test shows it; pytest's own errors are not Exceptions
        answer = (None, traceback.format_exc())
    # A pipe's own `send` would leave tensors in memory of this process, which ends before they are read.
    pipe.send_bytes(pickle.dumps(answer))


# Functions that ranks run.


def exchange(world: World, cases: list[Case], captured: bool) -> list[list[Result]]:
    """Return the results of each case: of eager steps, or of replays and eager steps in turns."""
    return [on_rank.replay(world, case, KINDS) if captured else run_case(world, case) for case in cases]


def default_group(rank: int, eager: list[Case], replayed: list[Case], device: str = "auto") -> Any:
    """Run the lines that a program under torchrun has."""
    if device == "auto":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with World.of(device=device) as world:
        dist.barrier()  # the group is the user's, and still works
        return str(world.device), exchange(world, eager, False), exchange(world, replayed, True)


def another_device(rank: int, eager: list[Case], replayed: list[Case]) -> Any:
    """Run a world on GPU 1 - r for rank r, while torch's current device is GPU 0 on both."""
    torch.cuda.set_device(0)
    with World.of(device=f"cuda:{1 - rank}") as world:
        found = exchange(world, eager, False), exchange(world, replayed, True)
        return str(world.device), torch.cuda.current_device(), *found


def two_worlds(rank: int, cases: list[Case]) -> Any:
    """Run two worlds in turns: on this rank's own GPU and on the other rank's."""
    torch.cuda.set_device(rank)
    with World.of() as here, World.of(device=f"cuda:{1 - rank}") as there:
        found = [exchange(world, [case], False)[0] for case in cases for world in (here, there)]
        return here.name != there.name, str(here.device), str(there.device), found


def in_domains(rank: int, eager: list[Case], replayed: list[Case]) -> Any:
    """Run a world of two domains of one rank each."""
    torch.cuda.set_device(rank)
    with World.of(domain=1) as world:
        found = exchange(world, eager, False), exchange(world, replayed, True)
        return world.domains, str(world.device), *found


def one_gpu(rank: int, device: str) -> str:
    """Return the error of ranks on one GPU."""
    torch.cuda.set_device(0)
    with pytest.raises(RaymoeError) as caught:
        World.of(device=device)
    return str(caught.value)
