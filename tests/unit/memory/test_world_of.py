"""`World.of`: worlds of torch.distributed process groups and device meshes, between processes, over Gloo."""

from __future__ import annotations

import gc
import math
import os
import resource
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raymoe.errors import ConfigError, RaymoeError, WiringError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory import cuda_ipc
from raymoe.memory.world import World
from raymoe.transport.channel import Channel
from tests.unit.exchange.exchange_cases import Case, Result, run_case
from tests.unit.exchange.exchange_judge import judge
from tests.unit.memory.test_cuda_ipc import FakeGpu, Node
from tests.unit.ranks import RankPool

Body = Callable[..., Any]


@pytest.fixture
def groups(pool: RankPool, tmp_path: Path) -> Callable[..., list[Any]]:
    """`groups(size, f, *args)` calls `f(rank, *args)` in processes that have a default process group."""

    def run(size: int, body: Body, *args: object) -> list[Any]:
        return pool.run(size, with_group, str(tmp_path / "store"), body, *args)

    return run


def with_group(outer: World, store: str, body: Body, *args: object) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=outer.rank, world_size=outer.size, timeout=timedelta(seconds=20)
    )
    try:
        return body(outer.rank, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """Return the type and message of a call's error; the call must raise."""
    with pytest.raises(RaymoeError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


def exchange_without_the_group(rank: int, case: Case) -> tuple[Any, list[Result]]:
    with World.of() as world:
        dist.destroy_process_group()  # the world no longer needs it
        return (world.rank, world.size, world.device, world.timeout_s), run_case(world, case)


def test_a_world_of_the_default_group_works_after_the_group_is_destroyed(groups) -> None:
    case = Case(3, ExchangeSpec(tokens=9, hidden=16, experts=6, topk=2), "host", ("uniform", "one", "masked"), seed=4)
    answers = groups(3, exchange_without_the_group, case)
    assert [facts for facts, _ in answers] == [(rank, 3, torch.device("cpu"), 60.0) for rank in range(3)]
    judge(case, [results for _, results in answers])


def make_several_worlds(rank: int) -> Any:
    first, second = World.of(), World.of(dist.group.WORLD, timeout_s=7)
    group = dist.new_group([0, 2])
    inner = World.of(group) if rank in (0, 2) else None
    refused = error_of(lambda: World.of(group)) if inner is None else None
    found = [first.swap(rank, "first"), second.swap(-rank, "second"), inner.swap(rank, "inner") if inner else None]
    part = second.group([2, 1])
    found.append(None if part is None else part.swap(rank, "part"))
    names = [first.name, second.name, inner.name if inner else None]
    for world in (first, second, inner):
        if world is not None:
            world.close()
    return found, names, second.timeout_s, refused


def test_a_process_may_have_worlds_of_several_groups(groups) -> None:
    zero, one, two = groups(3, make_several_worlds)
    assert [each[0][:2] for each in (zero, one, two)] == [[[0, 1, 2], [0, -1, -2]]] * 3
    assert zero[0][2] == two[0][2] == [0, 2]
    assert one[0][3] == two[0][3] == [2, 1]
    assert zero[1] == two[1] and zero[1][:2] == one[1][:2]
    assert len(set(zero[1])) == 3, "each world has its own name"
    assert zero[2] == 7
    assert one[3] == (
        "ConfigError",
        "a world of a process group was asked for on rank 1, which is not in the group; only its members call World.of",
    )


def make_worlds_of_meshes(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with World.of(mesh) as world, World.of(mesh["ep"]) as again:
        members = world.swap(rank, "who"), again.swap(rank, "who")
    plain = init_device_mesh("cpu", (4,))
    with World.of(plain) as world:
        everyone = world.swap(rank, "who")
    some = DeviceMesh("cpu", [0, 3])
    outside = None
    if rank in (0, 3):
        World.of(some).close()
    else:
        outside = error_of(lambda: World.of(some))[1]
    errors = [
        error_of(lambda: World.of(mesh["dp"])),
        error_of(lambda: World.of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")))),
        error_of(lambda: World.of(init_device_mesh("cpu", (4, 1)))),
    ]
    return members, everyone, outside, errors


def test_a_world_of_a_mesh_has_the_ranks_of_its_ep_dimension(groups) -> None:
    answers = groups(4, make_worlds_of_meshes)
    for rank, (members, everyone, outside, errors) in enumerate(answers):
        mine = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert members == (mine, mine)
        assert everyone == [0, 1, 2, 3]
        assert outside == (
            None
            if rank in (0, 3)
            else f"a world of a DeviceMesh was asked for on rank {rank}, which is not in the mesh; only its members "
            "call World.of"
        )
        assert [kind for kind, _ in errors] == ["ConfigError"] * 3
        found = ["dimensions dp", "dimensions pp, tp", "2 dimensions without names"]
        for (_, said), there in zip(errors, found, strict=True):
            assert f"which has {there} and none called 'ep'" in said


def fail_on_rank_1(rank: int, wrong: dict[str, Any]) -> Any:
    first = error_of(lambda: World.of(**(wrong if rank == 1 else {})))
    with World.of() as world:  # the group still works
        return first, world.swap(rank, "after")


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        ({"device": "cuda:7"}, "CudaMissing", "GPU ranks were asked for with torch"),
        ({"device": "tpu"}, "ConfigError", "device is 'tpu'"),
        ({"timeout_s": math.nan}, "ConfigError", "timeout_s is nan"),
    ],
)
def test_all_ranks_raise_if_one_cannot_make_its_world(groups, wrong: dict[str, Any], kind: str, says: str) -> None:
    if "cuda:7" in wrong.values() and torch.version.cuda:
        wrong, kind, says = {"device": "cuda:999"}, "CudaError", "GPU 999 asked for"
    answers = groups(3, fail_on_rank_1, wrong)
    for rank, ((found, said), after) in enumerate(answers):
        assert says in said
        assert found == (kind if rank == 1 else "WiringError")
        assert rank == 1 or said.startswith("rank 1 of process group ")
        assert after == [0, 1, 2]


def on_gpus(rank: int, uuids: list[str]) -> Any:
    """Make a world on fake GPUs, without device memory; return its facts, or the error."""
    opened: list[int] = []

    def fake(ordinal: int) -> FakeGpu:
        opened.append(ordinal)
        gpu = FakeGpu(Node(), rank)
        gpu.uuid = uuids[rank]
        return gpu

    kept, cuda_ipc.GpuMemory.open = cuda_ipc.GpuMemory.open, fake
    try:
        with World.of(device=f"cuda:{rank + 2}") as world:
            return world.device, opened, world.swap(rank, "who")
    except WiringError as error:
        return str(error)
    finally:
        cuda_ipc.GpuMemory.open = kept


def test_ranks_may_use_gpus_of_any_number(groups) -> None:
    found = groups(2, on_gpus, ["a", "b"])
    assert found == [(torch.device("cuda", rank + 2), [rank + 2], [0, 1]) for rank in range(2)]


def test_two_ranks_on_one_gpu_are_refused_with_advice_for_torchrun(groups) -> None:
    for said in groups(2, on_gpus, ["a", "a"]):
        assert said.startswith("ranks 0 and 1 are both on GPU a; ")
        assert "torch.cuda.set_device(LOCAL_RANK)" in said


def group_is_freed(rank: int) -> bool:
    group = dist.new_group([0, 1])
    kept = weakref.ref(group)
    with World.of(group) as world:
        dist.destroy_process_group(group)
        del group
        gc.collect()
        return kept() is None and world.swap(rank, "who") == [0, 1]


def test_a_world_holds_no_reference_to_its_process_group(groups) -> None:
    assert groups(2, group_is_freed) == [True, True]


def pass_wrong_arguments(rank: int) -> Any:
    return error_of(lambda: World.of([0, 1])), error_of(lambda: World.of(dist.new_group([0, 1]), device=None))


def test_arguments_that_are_no_group_are_refused(groups) -> None:
    for (kind, said), (_, device) in groups(2, pass_wrong_arguments):
        assert kind == "ConfigError"
        assert said == "a world of a list was asked for; a ProcessGroup, a DeviceMesh or nothing is needed"
        assert "device is 'None'" in device


def make_worlds_of_destroyed_groups(rank: int) -> Any:
    group = dist.new_group([0, 1])
    bare = DeviceMesh("cpu", [0, 1], mesh_dim_names=("ep",), _init_backend=False)
    everyone = dist.group.WORLD
    dist.destroy_process_group(group)
    said = [error_of(lambda: World.of(group)), error_of(lambda: World.of(bare))]
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    said.append(error_of(lambda: World.of(everyone)))
    return [*said, error_of(lambda: World.of(dist.ProcessGroup(dist.HashStore(), 0, 1)))]


def test_destroyed_groups_are_refused(groups) -> None:
    for refusals in groups(2, make_worlds_of_destroyed_groups):
        assert {kind for kind, _ in refusals} == {"ConfigError"}
        of_group, of_bare, of_everyone, of_own = [said for _, said in refusals]
        for said in (of_group, of_everyone, of_own):
            assert said.startswith(
                "a world of a ProcessGroup was asked for, and torch.distributed does not know the group"
            )
        assert of_bare.startswith("a world of a DeviceMesh was asked for, which has no process group: ")


def call_another_collective(rank: int) -> Any:
    if rank == 0:
        return error_of(World.of)
    dist.all_gather_object([None, None], {"step": 1})
    return None


def test_a_rank_in_another_collective_is_named(groups) -> None:
    (kind, said), _ = groups(2, call_another_collective)
    assert kind == "WiringError"
    assert said.endswith("rank 1 gave a dict instead: it is in another collective; all ranks must call in one order")


def without_files(rank: int) -> Any:
    """Make a world and a channel while rank 1 can open no file; return the errors, and a swap afterwards."""
    outer = World.of(timeout_s=3)
    Channel(outer, 1 - rank, 8).close()  # the first call imports modules
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = []
    for call in (World.of, lambda: Channel(outer, 1 - rank, 8)):
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        said.append(error_of(call))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with outer, Channel(outer, 1 - rank, 8):
        return said, outer.swap(rank, "after")


def test_all_ranks_raise_if_one_can_open_no_file(groups) -> None:
    for rank, (said, after) in enumerate(groups(2, without_files)):
        assert {kind for kind, _ in said} <= {"PlacementError", "WiringError"}
        assert all("Too many open files" in sentence for _, sentence in said), said
        assert rank == 1 or said[0][1].startswith("rank 1 of process group ")
        assert after == [0, 1]


def test_world_of_without_a_process_group_is_refused() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match=r"default process group was asked for, and .*init_process_group first"):
        World.of()
