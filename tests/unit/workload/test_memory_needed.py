"""The memory that a job needs is counted before the start. A job that does not fit is refused with the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from raymoe.config import Case, Job, load_job
from raymoe.errors import PlacementError
from raymoe.exchange.spec import slots_layout
from raymoe.gang.rank import Rank, RankSettings
from raymoe.memory.member import Member
from raymoe.memory.world import World
from raymoe.workload.memory_needed import (
    BESIDE_BYTES,
    available_memory,
    bytes_per_rank,
    check_device_memory,
    check_memory,
    device_bytes,
    device_bytes_per_rank,
    spec_of,
)


def test_the_need_of_a_job_is_that_of_its_largest_case() -> None:
    small = bytes_per_rank(load_job("host_exchange"))
    large = bytes_per_rank(load_job("host_exchange", ["shape.tokens=4096"]))
    both = bytes_per_rank(load_job("host_exchange", ["matrix={shape.tokens: [512, 4096]}"]))
    assert both == large > 4 * small - 2**30


def test_the_need_includes_the_heap_and_the_experts_of_a_layer() -> None:
    job = load_job("quickstart")
    exchange = bytes_per_rank(load_job("host_exchange"))
    assert exchange > slots_layout(spec_of(job), 4).nbytes
    messages = 2 * 3 * 512 * 1024 * 2  # from and to three others, for the limit of the links
    assert bytes_per_rank(job) - exchange == 8 * 3 * 1024 * 512 * 4 + messages


def test_slots_inside_a_domain_count_the_tokens_of_a_whole_rail() -> None:
    """Four domains of two ranks: each rank's slots hold 4 T tokens from each of two ranks."""
    job = load_job("host_exchange", ["world.ranks=8", "world.domain=2", "world.device=cpu", "shape.tokens=1024"])
    spec = spec_of(job)
    inside = slots_layout(replace(spec, tokens=4 * 1024), 2).nbytes
    extra = bytes_per_rank(job) - bytes_per_rank(job, domains=1)
    blocks = (4 + 1) * 1024 * (spec.row_bytes + 8 * spec.topk) + 2 * 4 * (1024 + 2) * spec.combine_row_bytes
    assert bytes_per_rank(job, domains=4) == bytes_per_rank(job)
    assert extra == inside + blocks - slots_layout(spec, 8).nbytes


def test_a_job_too_large_for_the_machine_is_refused_with_both_numbers() -> None:
    job = load_job("quickstart")
    check_memory(4, bytes_per_rank(job), available=4 * bytes_per_rank(job))
    with pytest.raises(PlacementError, match=r"4 ranks of 0\.4 GiB each, and this machine has 1\.0 GiB") as caught:
        check_memory(4, bytes_per_rank(job), available=2**30)
    assert caught.value.exit_code == 3


def test_available_memory_is_at_most_the_total() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert 2**20 < available_memory() <= int(total.split()[1]) * 1024


def p2p(**asked: object) -> Case:
    job = {"name": "x", "workload": "p2p", "world": {"ranks": 4, "device": "cuda"}, "p2p": asked}
    [case] = Job.model_validate(job).cases()
    return case


@pytest.mark.parametrize(
    ("transports", "pattern", "messages"),
    [
        (["tma"], "pairs", 1 + 2),  # a slot of the largest size, a source of each size
        (["copy_engine", "auto"], "all_to_all", 3 * (1 + 2)),
        (["tma", "collective"], "pairs", 1 + 2 * 2),  # NCCL's landings too
    ],
)
def test_p2p_needs_slots_sources_and_landings_for_each_peer(transports, pattern, messages) -> None:
    size = 2**28
    for protocol in ("put", "get"):
        case = p2p(transports=transports, pattern=pattern, bytes=[size, size], protocol=protocol)
        assert device_bytes(case) == messages * size
        assert device_bytes_per_rank(case.job) == BESIDE_BYTES + messages * size


def test_gpu_ranks_need_no_host_memory_and_cpu_ranks_do() -> None:
    sizes = ["p2p.bytes=[1GiB]", "p2p.transports=[auto]"]
    assert bytes_per_rank(load_job("p2p", [*sizes, "world.device=cuda"])) == 0
    for device in ("cpu", "auto"):
        assert bytes_per_rank(load_job("p2p", [*sizes, f"world.device={device}"])) > 2**30


def test_the_gpu_need_of_a_job_is_that_of_its_largest_case() -> None:
    both = device_bytes_per_rank(load_job("p2p"))
    assert both == device_bytes_per_rank(load_job("p2p", ["matrix={p2p.pattern: [pairs, all_to_all]}"]))
    assert both > device_bytes_per_rank(load_job("p2p", ["matrix={p2p.pattern: [pairs]}"]))


def test_a_gpu_that_is_too_small_is_refused_with_both_numbers() -> None:
    check_device_memory(1, 80 * 2**30, "the NVIDIA H100 of rank 2", 80 * 2**30)
    with pytest.raises(PlacementError) as caught:
        check_device_memory(1, 81 * 2**30, "the NVIDIA H100 of rank 2", 80 * 2**30)
    assert str(caught.value).startswith(
        "asked for a rank of 81.0 GiB on one GPU, and the NVIDIA H100 of rank 2 has 80.0 GiB; lower p2p.bytes, "
    )
    assert caught.value.exit_code == 3
    with pytest.raises(PlacementError, match=r"asked for 4 ranks of 21\.0 GiB each on one GPU"):
        check_device_memory(4, 21 * 2**30, "the NVIDIA H100 of rank 0", 80 * 2**30)


@pytest.mark.parametrize(("share", "nbytes", "refused"), [(False, 9, False), (False, 11, True), (True, 9, True)])
def test_a_rank_refuses_a_job_too_large_for_its_gpu(monkeypatch: pytest.MonkeyPatch, share, nbytes, refused) -> None:
    """The GPU has 10 bytes; a world on the CPU replaces the one on the GPU."""

    def open_on_cpu(member: Member) -> World:
        assert member.device == "cuda"
        return real(replace(member, device="cpu"))

    real = World.of_member
    gpu = SimpleNamespace(name="NVIDIA H100", total_memory=10)
    monkeypatch.setattr(World, "of_member", open_on_cpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    rank = Rank("a-run", 0)
    monkeypatch.setattr(rank, "_enter", lambda _: None)
    answer = rank.open(RankSettings(0, 4, 0, 5.0, 1, "cuda", share, nbytes))
    assert rank.world is not None
    rank.world.close()
    if refused:
        assert (answer.kind, answer.exit_code) == ("PlacementError", 3)
        assert "and the NVIDIA H100 of rank 0 has 0.0 GiB" in answer.message
    else:
        assert answer["rank"] == 0
