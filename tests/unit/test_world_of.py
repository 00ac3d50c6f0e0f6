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
from tests.unit.exchange_cases import Case, Result, run_case
from tests.unit.exchange_judge import judge
from tests.unit.ranks import RankPool
from tests.unit.test_cuda_ipc import FakeGpu, Node

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


def told(call: Callable[[], object]) -> tuple[str, str]:
    """The error of a call that must raise."""
    with pytest.raises(RaymoeError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


def exchanged(rank: int, case: Case) -> tuple[Any, list[Result]]:
    with World.of() as world:
        dist.destroy_process_group()  # the world needs it no more
        return (world.rank, world.size, world.device, world.timeout_s), run_case(world, case)


def test_ranks_of_the_default_group_exchange_after_it_is_gone(groups) -> None:
    case = Case(3, ExchangeSpec(tokens=9, hidden=16, experts=6, topk=2), "host", ("uniform", "one", "masked"), seed=4)
    answers = groups(3, exchanged, case)
    assert [facts for facts, _ in answers] == [(rank, 3, torch.device("cpu"), 60.0) for rank in range(3)]
    judge(case, [results for _, results in answers])


def several(rank: int) -> Any:
    first, second = World.of(), World.of(dist.group.WORLD, timeout_s=7)
    group = dist.new_group([0, 2])
    inner = World.of(group) if rank in (0, 2) else None
    refused = told(lambda: World.of(group)) if inner is None else None
    found = [first.swap(rank, "first"), second.swap(-rank, "second"), inner.swap(rank, "inner") if inner else None]
    part = second.group([2, 1])
    found.append(None if part is None else part.swap(rank, "part"))
    names = [first.name, second.name, inner.name if inner else None]
    for world in (first, second, inner):
        if world is not None:
            world.close()
    return found, names, second.timeout_s, refused


def test_several_worlds_of_groups_in_one_process(groups) -> None:
    zero, one, two = groups(3, several)
    assert [each[0][:2] for each in (zero, one, two)] == [[[0, 1, 2], [0, -1, -2]]] * 3
    assert zero[0][2] == two[0][2] == [0, 2]
    assert one[0][3] == two[0][3] == [2, 1]
    assert zero[1] == two[1] and zero[1][:2] == one[1][:2]
    assert len(set(zero[1])) == 3, "each world has a name of its own"
    assert zero[2] == 7
    assert one[3] == (
        "ConfigError",
        "a world of a process group was asked for on rank 1, which is not in the group; only its members call World.of",
    )


def of_meshes(rank: int) -> Any:
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
        outside = told(lambda: World.of(some))[1]
    errors = [
        told(lambda: World.of(mesh["dp"])),
        told(lambda: World.of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")))),
        told(lambda: World.of(init_device_mesh("cpu", (4, 1)))),
    ]
    return members, everyone, outside, errors


def test_the_expert_dimension_of_a_mesh(groups) -> None:
    answers = groups(4, of_meshes)
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


def not_possible(rank: int, wrong: dict[str, Any]) -> Any:
    first = told(lambda: World.of(**(wrong if rank == 1 else {})))
    with World.of() as world:  # the group is in order
        return first, world.swap(rank, "after")


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        ({"device": "cuda:7"}, "CudaMissing", "GPU ranks were asked for with torch"),
        ({"device": "tpu"}, "ConfigError", "device is 'tpu'"),
        ({"timeout_s": math.nan}, "ConfigError", "timeout_s is nan"),
    ],
)
def test_what_one_rank_cannot_do_all_ranks_are_told(groups, wrong: dict[str, Any], kind: str, says: str) -> None:
    if "cuda:7" in wrong.values() and torch.version.cuda:
        wrong, kind, says = {"device": "cuda:999"}, "CudaError", "GPU 999 asked for"
    answers = groups(3, not_possible, wrong)
    for rank, ((found, said), after) in enumerate(answers):
        assert says in said
        assert found == (kind if rank == 1 else "WiringError")
        assert rank == 1 or said.startswith("rank 1 of process group ")
        assert after == [0, 1, 2]


def on_gpus(rank: int, uuids: list[str]) -> Any:
    """Ranks on GPUs that a diary stands in for; memory of the device is not asked for."""
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


def test_ranks_on_gpus_of_any_number(groups) -> None:
    found = groups(2, on_gpus, ["a", "b"])
    assert found == [(torch.device("cuda", rank + 2), [rank + 2], [0, 1]) for rank in range(2)]


def test_two_ranks_on_one_gpu_are_told_how_torchrun_does_it(groups) -> None:
    for said in groups(2, on_gpus, ["a", "a"]):
        assert said.startswith("ranks 0 and 1 are both on GPU a; ")
        assert "torch.cuda.set_device(LOCAL_RANK)" in said


def kept_group(rank: int) -> bool:
    group = dist.new_group([0, 1])
    kept = weakref.ref(group)
    with World.of(group) as world:
        dist.destroy_process_group(group)
        del group
        gc.collect()
        return kept() is None and world.swap(rank, "who") == [0, 1]


def test_a_world_keeps_no_process_group(groups) -> None:
    assert groups(2, kept_group) == [True, True]


def unusable(rank: int) -> Any:
    return told(lambda: World.of([0, 1])), told(lambda: World.of(dist.new_group([0, 1]), device=None))


def test_arguments_that_are_no_group(groups) -> None:
    for (kind, said), (_, device) in groups(2, unusable):
        assert kind == "ConfigError"
        assert said == "a world of a list was asked for; a ProcessGroup, a DeviceMesh or nothing is needed"
        assert "device is 'None'" in device


def of_groups_that_are_gone(rank: int) -> Any:
    group = dist.new_group([0, 1])
    bare = DeviceMesh("cpu", [0, 1], mesh_dim_names=("ep",), _init_backend=False)
    everyone = dist.group.WORLD
    dist.destroy_process_group(group)
    said = [told(lambda: World.of(group)), told(lambda: World.of(bare))]
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    said.append(told(lambda: World.of(everyone)))
    return [*said, told(lambda: World.of(dist.ProcessGroup(dist.HashStore(), 0, 1)))]


def test_groups_that_are_gone_are_told_of(groups) -> None:
    for told_of in groups(2, of_groups_that_are_gone):
        assert {kind for kind, _ in told_of} == {"ConfigError"}
        of_group, of_bare, of_everyone, of_own = [said for _, said in told_of]
        for said in (of_group, of_everyone, of_own):
            assert said.startswith(
                "a world of a ProcessGroup was asked for, and torch.distributed does not know the group"
            )
        assert of_bare.startswith("a world of a DeviceMesh was asked for, which has no process group: ")


def beside_another_gather(rank: int) -> Any:
    if rank == 0:
        return told(World.of)
    dist.all_gather_object([None, None], {"step": 1})
    return None


def test_a_rank_in_another_gather_is_named(groups) -> None:
    (kind, said), _ = groups(2, beside_another_gather)
    assert kind == "WiringError"
    assert said.endswith("rank 1 gave a dict instead: it is in another collective; all ranks must call in one order")


def without_files(rank: int) -> Any:
    """What is said where rank 1 can open no file, in a world and in a channel; and afterwards."""
    outer = World.of(timeout_s=3)
    Channel(outer, 1 - rank, 8).close()  # Python reads modules at a first call
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = []
    for call in (World.of, lambda: Channel(outer, 1 - rank, 8)):
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        said.append(told(call))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with outer, Channel(outer, 1 - rank, 8):
        return said, outer.swap(rank, "after")


def test_a_rank_that_can_open_no_file_is_told_to_all(groups) -> None:
    for rank, (said, after) in enumerate(groups(2, without_files)):
        assert {kind for kind, _ in said} <= {"PlacementError", "WiringError"}
        assert all("Too many open files" in sentence for _, sentence in said), said
        assert rank == 1 or said[0][1].startswith("rank 1 of process group ")
        assert after == [0, 1]


def test_no_process_group_at_all() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match=r"default process group was asked for, and .*init_process_group first"):
        World.of()
