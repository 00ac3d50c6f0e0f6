"""Test workload p2p on GPU ranks: complete lines, every byte verified, eager and replayed. No test is about speed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.config import Job  # noqa: E402
from raymoe.errors import WrongResult  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.report.results import complete  # noqa: E402
from raymoe.transport.channels import Channels  # noqa: E402
from raymoe.workload import run_case  # noqa: E402
from tests.gpu.ranks import GPUS, GpuRanks  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason=f"needs an NVIDIA GPU; torch {torch.__version__} sees none here"),
]

RANKS = max(2, min(4, GPUS))
MIXED = ["tma", "copy_engine", "auto"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[GpuRanks]:
    with GpuRanks(RANKS) as started:
        yield started


def run(world: World, graph: object, p2p: dict[str, Any]) -> list[dict[str, Any]]:
    job = {
        "name": "p2p",
        "workload": "p2p",
        "world": {"ranks": world.size, "device": "cuda", "share_gpu": world.size > GPUS},
        "steps": {"warmup": 1, "count": 3, "graph": graph},
        "p2p": p2p,
    }
    return [line for case in Job.model_validate(job).cases() for line in run_case(case, world, lambda _: None)]


@pytest.mark.parametrize("protocol", ["put", "get"])
@pytest.mark.parametrize("pattern", ["pairs", "all_to_all"])
@pytest.mark.parametrize("graph", [True, False, "auto"])
def test_every_line_is_complete_and_verified(ranks, protocol, pattern, graph):
    p2p = {"protocol": protocol, "pattern": pattern, "transports": MIXED, "bytes": [4096, 300_001]}
    answers = ranks.run(RANKS, run, graph, p2p)
    assert all(lines == answers[0] for lines in answers)
    copies = RANKS * (RANKS - 1) if pattern == "pairs" else 1
    assert len(answers[0]) == 3 * 2 * copies
    for line in answers[0]:
        complete(line, run="r", generation=0, commit=None)
        assert (line["verified"], line["max_error"], line["samples"]) == (True, 0.0, 3)
        assert line["graph"] is (graph is not False)
        assert line["us_p50"] > 0 and line["gbps_wire"] > 0
        assert line["device"] == torch.cuda.get_device_name(0)
    assert {line["transport"] for line in answers[0]} == {"tma", "copy_engine", "auto:tma"}
    assert {line["sms"] for line in answers[0] if line["transport"] == "copy_engine"} == {0}
    assert all(line["sms"] >= 1 for line in answers[0] if line["transport"] != "copy_engine")


@pytest.mark.parametrize("pattern", ["pairs", "all_to_all"])
def test_a_number_of_sms_is_used_and_reported(ranks, pattern):
    p2p = {"pattern": pattern, "transports": ["tma", "auto", "copy_engine"], "bytes": [100_000, 9 << 20], "sms": 4}
    for line in ranks.run(RANKS, run, True, p2p)[0]:
        assert line["verified"] is True
        if line["transport"] == "copy_engine":
            assert line["sms"] == 0
        else:
            assert line["transport"] in ("tma", "auto:tma") and 1 <= line["sms"] <= 4
            assert line["sms"] == 4 or line["bytes"] < 1 << 20


def run_with_a_wrong_byte(world: World) -> list[dict[str, Any]]:
    """Run a job in which rank 1 changes a byte of each message that it received."""
    real = Channels.synchronise

    def synchronise_and_spoil(self: Channels) -> None:
        real(self)
        for mailbox in list(self._held.values()):
            self._mover.received(mailbox)[-1] ^= 1
        torch.cuda.synchronize()

    if world.rank == 1:
        Channels.synchronise = synchronise_and_spoil
    try:
        return run(world, False, {"transports": ["tma"], "bytes": [100_003]})
    finally:
        Channels.synchronise = real


def test_one_wrong_byte_is_found(ranks):
    errors = ranks.outcomes(2, run_with_a_wrong_byte)
    assert {type(error) for error in errors} == {WrongResult}
    assert "on rank 1" in str(errors[0])


@pytest.mark.skipif(GPUS < 2, reason=f"NCCL needs a GPU for each rank; {GPUS} here")
@pytest.mark.parametrize("graph", [True, False])
def test_nccl_runs_beside_another_transport(ranks, graph):
    for pattern in ("pairs", "all_to_all"):
        p2p = {"pattern": pattern, "transports": ["collective", "tma"], "bytes": [4096, 3 << 20]}
        for line in ranks.run(RANKS, run, graph, p2p)[0]:
            assert line["verified"] is True and line["graph"] is graph
