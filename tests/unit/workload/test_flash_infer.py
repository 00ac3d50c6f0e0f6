"""FlashInfer in the benchmark: its documented results are accepted, and spoilt ones are reported."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.config import Job  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.workload.compare.flash_infer import FlashInfer  # noqa: E402
from raymoe.workload.compare.other_systems import refusal  # noqa: E402
from raymoe.workload.inputs import Inputs, Routing  # noqa: E402
from tests.unit.worlds import close, each, wired  # noqa: E402

SIZE, TOKENS, H, E, K = 2, 13, 256, 8, 3


class FakeWorkspace:
    """The memory of all ranks, which `MoeAlltoAll` gives to the functions."""

    def __init__(self, fake: FakeFlashInfer, rank: int) -> None:
        self.fake, self.rank = fake, rank
        self.rows = torch.zeros(SIZE, TOKENS, H, dtype=torch.bfloat16)
        self.sent: list[list[tuple[int, int]]] = []
        self.came = [0] * SIZE

    def __getitem__(self, place: tuple[int, slice]) -> FakeWorkspace:
        assert place == (self.rank, slice(None))
        return self


class FakeFlashInfer:
    """Its modules for ranks that are threads. A source's tokens come in descending order: none is promised."""

    def __init__(self) -> None:
        self.barrier, self.given = threading.Barrier(SIZE), [None] * SIZE
        self.payloads: dict[int, list[torch.Tensor]] = {}

    def meet(self, rank: int, given: Any) -> list[Any]:
        self.given[rank] = given
        self.barrier.wait()
        everyone = list(self.given)
        self.barrier.wait()
        return everyone

    def MoeAlltoAll(  # noqa: N802
        self, mapping: Any, *, max_num_tokens: int, top_k: int, num_experts: int, hidden_size: int, mnnvl_config: Any
    ) -> Any:
        assert (max_num_tokens, top_k, num_experts, hidden_size) == (TOKENS, K, E, H)
        assert (mapping.world_size, mapping.tp_size, mapping.moe_ep_size, mapping.gpus_per_node) == (SIZE,) * 4
        comm = mnnvl_config.comm_backend.Split(0, mapping.rank)
        assert comm.allgather(comm.Get_rank()) == tuple(range(comm.Get_size())) and comm.bcast(mapping.rank, 1) == 1
        comm.barrier()
        return SimpleNamespace(workspace=FakeWorkspace(self, mapping.rank), metainfo="metainfo")

    def moe_a2a_dispatch(self, ids, payloads, workspace, metainfo, tokens, rank, size, topk, experts):
        assert (metainfo, tokens, rank, size, topk, experts) == ("metainfo", TOKENS, workspace.rank, SIZE, K, E)
        assert ids.dtype == torch.int32 and payloads[1] is ids
        everyone = self.meet(rank, [each.clone() for each in payloads])
        mine = self.payloads.setdefault(rank, [each.new_zeros(SIZE, TOKENS, each.shape[1]) for each in payloads])
        counts, workspace.sent = [0] * SIZE, []
        for token in reversed(range(len(ids))):
            places = []
            for owner in sorted({int(i) // (E // SIZE) for i in ids[token]}):
                places.append((owner, counts[owner]))
                counts[owner] += 1
            workspace.sent.insert(0, places)
        for source, theirs in enumerate(everyone):
            place = 0
            for token in reversed(range(len(theirs[1]))):
                if any(int(i) // (E // SIZE) == rank for i in theirs[1][token]):
                    for into, of in zip(mine, theirs, strict=True):
                        into[source, place] = of[token]
                    place += 1
            workspace.came[source] = place
        return mine, 4096, None

    def moe_a2a_sanitize_expert_ids(self, ids, workspace, metainfo, rank, invalid):
        assert (metainfo, rank, invalid) == ("metainfo", workspace.rank, E)
        for source, count in enumerate(workspace.came):
            ids[source, count:] = invalid

    def moe_a2a_wrap_payload_tensor_in_workspace(self, workspace, shape, start, end, dtype):
        assert (shape, start, end, dtype) == ([SIZE, TOKENS], 4096, 4096 + SIZE * TOKENS * H * 2, torch.bfloat16)
        return workspace.rows

    def moe_a2a_combine(self, payload, tokens, workspace, metainfo, most, rank, size, topk, offset, **options):
        assert (metainfo, most, rank, size, topk, offset) == ("metainfo", TOKENS, workspace.rank, SIZE, K, 4096)
        assert options["payload_in_workspace"] and payload is workspace.rows and tokens == len(options["output"])
        everyone = self.meet(rank, payload.clone())
        for token, places in enumerate(workspace.sent):
            options["output"][token] = sum(everyone[owner][rank, place].float() for owner, place in places)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    fake = FakeFlashInfer()
    monkeypatch.setitem(sys.modules, "flashinfer.comm.trtllm_moe_alltoall", fake)
    for name, attribute in (("mapping", "Mapping"), ("mnnvl", "MnnvlConfig")):
        monkeypatch.setitem(sys.modules, f"flashinfer.comm.{name}", SimpleNamespace(**{attribute: SimpleNamespace}))
    return fake


SPOILT: dict[str, Callable[[FlashInfer], None]] = {
    "rows from rank": lambda system: system._x.add_(1),
    "ids from rank": lambda system: system._ids.copy_(torch.where(system._ids < E, (system._ids + 1) % E, E)),
    "weights from rank": lambda system: system._weights.add_(1),
    "were sent": lambda system: system._ids.fill_(E),
}


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("word", SPOILT)
@pytest.mark.parametrize("routing", [{}, {"ragged": True}])
def test_documented_results_are_accepted_and_spoilt_ones_are_reported(routing: dict[str, Any], word: str) -> None:
    spec = ExchangeSpec(tokens=TOKENS, hidden=H, experts=E, topk=K, layout="rank")
    drawn = Routing(kind="uniform", seed=1, ranks=SIZE, tokens=TOKENS, experts=E, topk=K, **routing)

    def steps(world: Any) -> list[str | None]:
        system = FlashInfer(world, spec, Inputs(drawn, world.rank, H, torch.bfloat16))
        said = []
        for index in (0, 9):
            system.take(index, fresh=True)
            for op, wrong in ((system.dispatch, system.wrong_dispatch), (system.combine, system.wrong_combine)):
                op()
                said.append(wrong())
        y = system._y.clone()
        system.exchange()
        assert torch.equal(system._y, y) and system.keys == {"sms": None}, "the results of the last combine stay"
        if len(y):
            system._y[-1] += 1
            said.append(system.wrong_combine())
        system.take(9, fresh=True)
        system.dispatch()
        SPOILT[word](system)
        return [*said, system.wrong_dispatch()]

    worlds = wired(SIZE)
    for said in each(worlds, steps):
        assert isinstance(said, list), said
        assert said[:4] == [None] * 4
        assert all("error of" in str(sentence) for sentence in said[4:-1])
        assert word in str(said[-1])
    close(worlds)


def job(**exchange: Any) -> Job:
    sections = {"world": {"ranks": 2}, "routing": exchange.pop("routing", {})}
    return Job(name="x", workload="exchange", exchange={"backend": "flashinfer"} | exchange, **sections)


def test_what_it_cannot_run_is_refused_before_it_starts() -> None:
    assert refusal(job(layout="rank")) is None
    assert "set exchange.layout to rank" in str(refusal(job()))
    assert str(refusal(job(layout="token"))).startswith("rows by token; flashinfer gives them as rows by rank")
    assert "set exchange.sms to auto" in str(refusal(job(layout="rank", sms=24)))
    assert "an expert for each" in str(refusal(job(layout="rank", routing={"masked": 0.1})))
    assert "flashinfer is run with rows of the dtype" in str(
        refusal(job(layout="rank", wire={"dispatch": "float8_e4m3"}, output="raw"))
    )
