"""DeepEP in the benchmark: its documented results are accepted, and spoilt ones are reported."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.workload.compare import deep_ep  # noqa: E402
from raymoe.workload.compare.deep_ep import DeepEp  # noqa: E402
from raymoe.workload.inputs import Inputs, Routing  # noqa: E402
from tests.unit.worlds import close, each, wired  # noqa: E402


class FakeBuffers:
    """The elastic buffers of ranks that are threads. Sources come in descending order: none is promised."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.given = size, threading.Barrier(size), [None] * size
        self.topk_idx_t = torch.int64

    def ElasticBuffer(self, _group: object, **options: Any) -> FakeBuffer:  # noqa: N802 - its own name
        assert not options["allow_hybrid_mode"]
        return FakeBuffer(self, options)

    def meet(self, given: Any) -> list[Any]:
        self.given[int(threading.current_thread().name)] = given
        self.barrier.wait()
        everyone = list(self.given)
        self.barrier.wait()
        return everyone


class FakeBuffer:
    def __init__(self, buffers: FakeBuffers, options: dict[str, Any]) -> None:
        self.buffers, self.most = buffers, options["num_max_tokens_per_rank"]
        self.me = int(threading.current_thread().name)

    def get_theoretical_num_sms(self, _experts: int, _topk: int) -> int:
        return 24

    def dispatch(self, x: Any, **given: Any) -> tuple[Any, ...]:
        assert not given["do_cpu_sync"]
        everyone = self.buffers.meet((x, given["topk_idx"].clone(), given["topk_weights"].clone()))
        topk, local = given["topk_idx"].shape[1], given["num_experts"] // self.buffers.size
        align, first = given["expert_alignment"], self.me * local
        came = [
            (source, token)
            for source, (_, ids, _) in reversed(list(enumerate(everyone)))
            for token in range(len(ids))
            if any(first <= each < first + local for each in ids[token].tolist())
        ]
        counts = torch.zeros(local, dtype=torch.int32)
        for source, token in came:
            for each_id in everyone[source][1][token].tolist():
                if first <= each_id < first + local:
                    counts[each_id - first] += 1
        starts, place = [], 0
        for count in counts.tolist():
            starts.append(place)
            place += -(-count // align) * align
        meta = torch.full((self.buffers.size * self.most, 2 + topk), -7)
        most = self.buffers.size * self.most * topk + local * align if given["do_expand"] else len(meta)
        values = x if isinstance(x, tuple) else (x,)
        rows = [torch.full((most, value.shape[1]), float("nan")).to(value.dtype) for value in values]
        weights = torch.zeros((most,) if given["do_expand"] else (most, topk))
        taken = [0] * local
        for at, (source, token) in enumerate(came):
            their, ids, their_weights = everyone[source]
            their = their if isinstance(their, tuple) else (their,)
            meta[at, 0], meta[at, 2:] = source * self.most + token, -1
            for k, each_id in enumerate(ids[token].tolist()):
                if not first <= each_id < first + local:
                    continue
                slot = starts[each_id - first] + taken[each_id - first]
                taken[each_id - first] += 1
                meta[at, 2 + k] = slot
                place = slot if given["do_expand"] else at
                for row, value in zip(rows, their, strict=True):
                    row[place] = value[token]
                if given["do_expand"]:
                    weights[slot] = their_weights[token, k]
        handle = SimpleNamespace(
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor([0] * (self.buffers.size - 1) + [len(came)]),
            recv_src_metadata=meta,
            psum_num_recv_tokens_per_expert=torch.tensor(starts) + counts,
            num_unaligned_recv_tokens_per_expert=counts,
            expands=given["do_expand"],
            came=len(came),
            tokens=len(given["topk_idx"]),
        )
        return tuple(rows) if isinstance(x, tuple) else rows[0], None, weights, handle, None

    def combine(self, rows: Any, handle: Any, num_sms: int) -> tuple[Any, ...]:  # noqa: ARG002
        everyone = self.buffers.meet((rows, handle))
        y = torch.zeros(handle.tokens, rows.shape[1])
        for their_rows, their in everyone:
            for at in range(their.came):
                source, token = divmod(int(their.recv_src_metadata[at, 0]), self.most)
                if source == self.me:
                    slots = their.recv_src_metadata[at, 2:]
                    places = slots[slots >= 0] if their.expands else torch.tensor([at])
                    y[token] += their_rows[places].float().sum(dim=0)
        self.buffers.barrier.wait()  # peers' rows have been read
        return y.to(rows.dtype), None, None


ROUTINGS: dict[str, dict[str, Any]] = {"uniform": {}, "masked": {"masked": 0.4}, "ragged": {"ragged": True}}


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("form", ["expert", "rank", "fp8"])
def test_documented_results_are_accepted_and_spoilt_ones_are_reported(monkeypatch, routing, form):
    size = 2
    monkeypatch.setitem(sys.modules, "deep_ep", FakeBuffers(size))
    monkeypatch.setattr(deep_ep, "join_default_group", lambda _, *, connect: "0" if connect else None)
    monkeypatch.setattr(deep_ep, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=None)))
    fp8 = {"wire": {"dispatch": "float8_e4m3"}, "output": "raw"} if form == "fp8" else {}
    layout = "rank" if form == "rank" else "expert"
    spec = ExchangeSpec(tokens=12, hidden=256, experts=8, topk=3, alignment=4, layout=layout, **fp8)
    drawn = {"kind": "uniform", "seed": 1, "ranks": size, "tokens": 12, "experts": 8, "topk": 3, **routing}

    def steps(world: Any) -> list[str | None]:
        system = DeepEp(world, spec, Inputs(Routing(**drawn), world.rank, 256, torch.bfloat16), sms=0)
        said = []
        for index in (0, 9):
            system.take(index, fresh=True)
            for op, wrong in ((system.dispatch, system.wrong_dispatch), (system.combine, system.wrong_combine)):
                op()
                said.append(wrong())
        assert (system.keys, system.left_out["combine"].startswith("weights")) == ({"sms": 24}, True)
        y = system._y.clone()
        system.exchange()
        assert torch.equal(system._y, y), "the results of the last combine stay"
        if len(y):
            system._y[-1] += 1
            said.append(system.wrong_combine())
        slots = system._received.handle.recv_src_metadata[0, 2:]
        place = int(slots[slots >= 0][0]) if layout == "expert" else 0
        system._received.x[place] = 0
        said.append(system.wrong_dispatch())
        system._received.handle.recv_src_metadata[0, 0] += 1
        said.append(system.wrong_dispatch())
        return said

    worlds = wired(size)
    for said in each(worlds, steps):
        assert isinstance(said, list), said
        assert said[:4] == [None] * 4
        *combines, rows, tokens = said[4:]
        assert all("error of" in str(each) for each in combines)
        assert "not those that were sent" in str(rows)
        assert tokens is not None
    close(worlds)
