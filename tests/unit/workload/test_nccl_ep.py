"""NCCL EP in the benchmark: its documented results are accepted, and spoilt ones are reported."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.config import Job  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.workload.compare import nccl_ep, other_systems  # noqa: E402
from raymoe.workload.compare.nccl_ep import NcclEp  # noqa: E402
from raymoe.workload.compare.other_systems import environment, refusal  # noqa: E402
from raymoe.workload.inputs import Inputs, Routing  # noqa: E402
from tests.unit.worlds import close, each, wired  # noqa: E402

SIZE, STREAM = 2, 77


class FakeEp:
    """The module `nccl.ep` for ranks that are threads. Sources come in descending order: none is promised."""

    Algorithm = SimpleNamespace(LOW_LATENCY=0, HIGH_THROUGHPUT=1)
    Layout = SimpleNamespace(EXPERT_MAJOR=1, RANK_MAJOR=2, FLAT=3)
    ExpertIdKind = SimpleNamespace(LOCAL=1)

    def __init__(self) -> None:
        self.barrier, self.given = threading.Barrier(SIZE), [None] * SIZE
        self.GroupConfig = self.HandleConfig = self.LayoutInfo = SimpleNamespace
        self.DispatchInputs = self.DispatchOutputs = self.CombineInputs = self.CombineOutputs = SimpleNamespace
        self.Tensor = lambda memory: memory
        self.Group = SimpleNamespace(create=lambda comm, config: FakeGroup(self, comm, config))

    def meet(self, rank: int, given: Any) -> list[Any]:
        self.given[rank] = given
        self.barrier.wait()
        everyone = list(self.given)
        self.barrier.wait()
        return everyone


class FakeGroup:
    def __init__(self, ep: FakeEp, comm: Any, config: Any) -> None:
        self.ep, self.rank, self.config = ep, comm.rank, config
        assert comm.nranks == SIZE and comm.unique_id == b"an id"
        assert config.max_token_bytes == 2 * 256 and config.timeout_ns > 0
        if config.algorithm == FakeEp.Algorithm.HIGH_THROUGHPUT:
            assert config.max_dispatch_tokens_per_rank % 4 == 0, "with two ranks it takes no odd number"
            assert config.max_recv_tokens_per_rank >= config.max_dispatch_tokens_per_rank

    def create_handle(self, layout: int, ids: Any, **given: Any) -> FakeHandle:
        low_latency = self.config.algorithm == FakeEp.Algorithm.LOW_LATENCY
        assert layout in ((1, 2) if low_latency else (1, 3)), "each algorithm has two layouts"
        assert (self.config.max_recv_tokens_per_rank == 0) == low_latency, "0 is its eager mode, which has no graphs"
        align = given["config"].dispatch_output_per_expert_alignment
        assert align == (4 if (layout, low_latency) == (1, False) else 0)
        handle = FakeHandle(self, layout, low_latency, align)
        handle.update(ids, layout_info=given["layout_info"], stream=given["stream"])
        return handle


class FakeHandle:
    def __init__(self, group: FakeGroup, layout: int, low_latency: bool, align: int) -> None:
        self.group, self.layout, self.low_latency, self.align = group, layout, low_latency, align
        self.came: list[tuple[int, int, int, int]] = []

    def update(self, ids: Any, *, layout_info: Any, stream: int) -> None:
        assert stream == STREAM and (layout_info is None) == self.low_latency
        self.ids = ids.clone()
        if layout_info is None:
            return
        everyone = self.group.ep.meet(self.group.rank, self.ids)
        counts, tokens = self._counts(everyone)
        layout_info.expert_counters.copy_(torch.tensor(counts))
        layout_info.recv_total_counter.fill_(sum(counts) if self.layout == 1 else tokens)

    def _counts(self, everyone: list[Any]) -> tuple[list[int], int]:
        """Rows of each expert here, gaps included, and tokens for this rank."""
        local = self.group.config.num_experts // SIZE
        first = self.group.rank * local
        counts = [sum(int((ids == first + place).sum()) for ids in everyone) for place in range(local)]
        tokens = sum(int(((ids >= first) & (ids < first + local)).any(dim=1).sum()) for ids in everyone)
        return [-(-count // self.align) * self.align if self.align else count for count in counts], tokens

    def dispatch(self, inputs: Any, outputs: Any, *, layout_info: Any, config: Any, stream: int) -> None:  # noqa: ARG002
        if not self.low_latency:
            assert len(outputs.tokens) >= self.group.config.max_recv_tokens_per_rank
        carries = getattr(inputs, "topk_weights", None)
        assert (carries is None) == (self.low_latency and self.layout == 1)
        everyone = self.group.ep.meet(
            self.group.rank, (inputs.tokens.clone(), self.ids, None if carries is None else carries.clone())
        )
        local, me = self.group.config.num_experts // SIZE, self.group.rank
        starts = [0]
        for count in self._counts([ids for _, ids, _ in everyone])[0]:
            starts.append(starts[-1] + count)
        taken: dict[int, int] = {}
        self.came = []
        rows = outputs.tokens.flatten(0, -2)
        for source in reversed(range(SIZE)):
            x, ids, weights = everyone[source]
            for token in range(len(ids)):
                experts = [int(i) - me * local if i // local == me and i >= 0 else -1 for i in ids[token]]
                if self.layout != 1:
                    if max(experts) < 0:
                        continue
                    block = source if self.layout == 2 else 0
                    place = block * self.group.config.max_dispatch_tokens_per_rank + taken.get(block, 0)
                    taken[block] = taken.get(block, 0) + 1
                    rows[place] = x[token]
                    outputs.topk_idx.flatten(0, -2)[place] = torch.tensor(experts)
                    outputs.topk_weights.flatten(0, -2)[place] = weights[token]
                    self.came.append((place, source, token, -1))
                    continue
                for k, expert in enumerate(experts):
                    if expert < 0:
                        continue
                    start = expert * outputs.tokens.shape[1] if self.low_latency else starts[expert]
                    place = start + taken.get(expert, 0)
                    taken[expert] = taken.get(expert, 0) + 1
                    rows[place] = x[token]
                    if not self.low_latency:
                        outputs.topk_weights[place] = weights[token, k]
                    self.came.append((place, source, token, k))
        if self.low_latency:
            name = "expert_counters" if self.layout == 1 else "src_rank_counters"
            getattr(layout_info, name).copy_(
                torch.tensor([taken.get(place, 0) for place in range(local if self.layout == 1 else SIZE)])
            )

    def combine(self, inputs: Any, outputs: Any, *, config: Any, stream: int) -> None:  # noqa: ARG002
        everyone = self.group.ep.meet(self.group.rank, (inputs.tokens.flatten(0, -2).clone(), self.came))
        y = torch.zeros(outputs.tokens.shape)
        weights = getattr(outputs, "topk_weights", None)
        assert (weights is not None) == (self.low_latency and self.layout == 1), "only this layout applies weights"
        for rows, came in everyone:
            for place, source, token, k in came:
                if source == self.group.rank:
                    y[token] += rows[place].float() * (1.0 if weights is None else weights[token, k])
        outputs.tokens.copy_(y)


class FakeCore:
    """The module `nccl.core`."""

    Communicator = SimpleNamespace(init=lambda **given: SimpleNamespace(**given))
    UniqueId = SimpleNamespace(from_bytes=lambda raw: raw)

    @staticmethod
    def get_unique_id() -> Any:
        return SimpleNamespace(as_bytes=b"an id")


ROUTINGS: dict[str, dict[str, Any]] = {"uniform": {}, "masked": {"masked": 0.4}, "ragged": {"ragged": True}}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl.ep", FakeEp())
    monkeypatch.setitem(sys.modules, "nccl.core", FakeCore())
    monkeypatch.setattr(nccl_ep, "current_stream", lambda _: STREAM)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("low_latency", [True, False])
def test_documented_results_are_accepted_and_spoilt_ones_are_reported(low_latency, layout, routing):
    spec = ExchangeSpec(tokens=13, hidden=256, experts=8, topk=3, alignment=4, layout=layout)
    drawn = {"kind": "uniform", "seed": 1, "ranks": SIZE, "tokens": 13, "experts": 8, "topk": 3, **routing}

    def steps(world: Any) -> list[str | None]:
        inputs = Inputs(Routing(**drawn), world.rank, 256, torch.bfloat16)
        system = NcclEp(world, spec, inputs, 24, low_latency=low_latency)
        said = []
        for index in (0, 9):
            system.take(index, fresh=True)
            for op, wrong in ((system.dispatch, system.wrong_dispatch), (system.combine, system.wrong_combine)):
                op()
                said.append(wrong())
        assert system.keys == {"sms": 24}
        y = system._y.clone()
        system.exchange()
        assert torch.equal(system._y, y), "the results of the last combine stay"
        if len(y):
            system._y[-1] += 1
            said.append(system.wrong_combine())
        received = system._received
        place = system._handle.came[0][0]
        if received.weights is not None:
            saved = received.weights.clone()
            received.weights += 1
            said.append(system.wrong_dispatch())
            received.weights.copy_(saved)
        if received.ids is not None:
            received.ids.flatten(0, -2)[place] = received.ids.flatten(0, -2)[place].roll(1) + 1
            said.append(system.wrong_dispatch())
            return said
        received.x.flatten(0, -2)[place] = 0
        said.append(system.wrong_dispatch())
        received.counts += 1
        received.total += 1
        said.append(system.wrong_dispatch())
        return said

    worlds = wired(SIZE)
    for said in each(worlds, steps):
        assert isinstance(said, list), said
        assert said[:4] == [None] * 4
        spoilt = [str(sentence) for sentence in said[4:]]
        assert "None" not in spoilt, spoilt
        wanted = ["weights"] * (layout == "rank" or not low_latency)
        wanted += ["ids"] if layout == "rank" else ["not those that were sent", "were sent"]
        for sentence, word in zip(spoilt[-len(wanted) :], wanted, strict=True):
            assert word in sentence
        assert all("error of" in sentence for sentence in spoilt[: -len(wanted)])
    close(worlds)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("low_latency", "layout", "dispatch", "combine"),
    [
        (True, "expert", "rows without gaps between blocks", None),
        (True, "rank", "rows by expert", "weights, the sum of a rank's rows"),
        (False, "expert", None, "weights"),
        (False, "rank", "rows by expert", "weights, the sum of a rank's rows"),
    ],
)
def test_a_line_names_what_the_algorithm_leaves_out(low_latency, layout, dispatch, combine):
    spec = ExchangeSpec(tokens=4, hidden=256, experts=8, topk=2, alignment=4, layout=layout)
    drawn = {"kind": "uniform", "seed": 1, "ranks": SIZE, "tokens": 4, "experts": 8, "topk": 2}

    def left_out(world: Any) -> dict[str, str | None]:
        inputs = Inputs(Routing(**drawn), world.rank, 256, torch.bfloat16)
        system = NcclEp(world, spec, inputs, 0, low_latency=low_latency)
        assert system.keys == {"sms": None}, "its own choice, which it does not say"
        return system.left_out

    worlds = wired(SIZE)
    for said in each(worlds, left_out):
        assert (said["dispatch"], said["combine"]) == (dispatch, combine)
    close(worlds)


def job(backend: str, **exchange: Any) -> Job:
    return Job(name="x", workload="exchange", world={"ranks": 2}, exchange={"backend": backend, **exchange})


def test_its_process_gets_memory_that_peers_map_and_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(other_systems, "_folder_of", lambda _: str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    variables = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "NCCL_CUMEM_ENABLE": "1"}
    assert environment(job("nccl_ep_ll"), ["a", "b"], rank=0) == variables, "there is no nvcc"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert environment(job("nccl_ep"), ["a", "b"], rank=0) == variables | {"CUDA_HOME": str(tmp_path)}
    monkeypatch.setenv("CUDA_HOME", "/mine")
    assert environment(job("nccl_ep"), ["a", "b"], rank=0) == variables


@pytest.mark.parametrize(
    ("backend", "sms", "unguarded"),
    [("nccl_ep", 16, False), ("nccl_ep", 17, True), ("nccl_ep", "auto", False), ("nccl_ep_ll", 24, False)],
)
def test_its_guard_is_left_out_where_it_has_too_few_barriers(backend: str, sms: int | str, unguarded: bool) -> None:
    assert ("NCCL_EP_DISABLE_GUARD" in environment(job(backend, sms=sms), ["a", "b"], rank=0)) == unguarded


def test_what_it_cannot_run_is_refused_before_it_starts() -> None:
    assert refusal(job("nccl_ep")) is None and refusal(job("nccl_ep_ll", alignment=24)) is None
    assert refusal(job("nccl_ep_ll", sms=2)) == "2 SMs; nccl_ep_ll takes 3 or more for 32 experts"
    assert refusal(job("nccl_ep_ll", sms=3)) is None and refusal(job("nccl_ep", sms=2)) is None
    assert refusal(job("nccl_ep", alignment=24)) == "experts at multiples of 24 rows; nccl_ep takes powers of two"
    assert "nccl_ep_ll is run with rows of the dtype" in str(
        refusal(job("nccl_ep_ll", wire={"dispatch": "float8_e4m3"}, output="raw"))
    )
