"""A layer in microbatches: the same results on CPU ranks, and the order of its parts on streams that only note them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from raymoe.errors import ConfigError, DataRefused
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import in_microbatches, left_sms, microbatches
from raymoe.moe.layer import LayerForm, MoELayer
from tests.gpu import replay_ranks
from tests.gpu.replay_ranks import Replays, replay_many
from tests.unit.worlds import together, wired

SPEC = ExchangeSpec(tokens=12, hidden=16, experts=8, topk=3, dtype="float32")
FORM = LayerForm(24, shared=12, norm=1e-6, residual=True)


def on_ranks(size: int, function: Callable[[World], Any]) -> list[Any]:
    """Run a function on the ranks' threads, without gradients."""
    worlds = wired(size)
    try:
        outcomes = together([lambda world=world: torch.no_grad()(function)(world) for world in worlds])
    finally:
        together([world.close for world in worlds])
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def rows(tokens: int, rank: int) -> torch.Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(
    "form", [FORM, LayerForm(24), replace(FORM, deterministic="batch")], ids=["all", "bare", "batch"]
)
@pytest.mark.parametrize(
    ("spec", "count"),
    [(SPEC, 2), (SPEC, 3), (replace(SPEC, layout="rank"), 2), (replace(SPEC, slots=5), 4)],
    ids=["two", "three", "by_rank", "slots"],
)
def test_microbatches_give_what_the_layer_gives(spec: ExchangeSpec, count: int, form: LayerForm) -> None:
    def run(world: World) -> None:
        layer = MoELayer(world, spec, form).eval()
        for tokens in (12, 12 - 5 * world.rank, world.rank):  # parts of different sizes, some without rows
            x = rows(tokens, world.rank)
            torch.testing.assert_close(in_microbatches(layer, x, count), layer(x))

    on_ranks(2, run)


def test_the_layer_takes_more_rows_than_its_exchange_carries_at_once() -> None:
    def run(world: World) -> None:
        wide = MoELayer(world, SPEC, FORM, seed=3)
        narrow = MoELayer(world, replace(SPEC, tokens=4, depth=0), FORM, seed=3)
        x = rows(12, world.rank).view(2, 6, 16)
        y = in_microbatches(narrow, x, 3)
        assert y.shape == x.shape
        torch.testing.assert_close(y, wide(x))
        with pytest.raises(ConfigError, match="tokens"):
            in_microbatches(narrow, x, 2)

    on_ranks(1, run)


def test_training_counts_the_rows_of_all_parts() -> None:
    def run(world: World) -> None:
        layer = MoELayer(world, SPEC, FORM).train()
        in_microbatches(layer, rows(12, world.rank))
        assert int(layer.row_counts.total.sum()) == 12 * SPEC.topk

    on_ranks(1, run)


def test_what_cannot_be_in_microbatches_is_refused() -> None:
    def run(world: World) -> None:
        layer = MoELayer(world, SPEC, FORM)
        with torch.enable_grad(), pytest.raises(ConfigError, match="no gradients"):
            in_microbatches(layer, rows(4, 0))
        with pytest.raises(ConfigError, match="count is 0"):
            in_microbatches(layer, rows(4, 0), 0)
        with pytest.raises(ConfigError, match="rows of 16"):
            in_microbatches(layer, torch.ones(4, 8))
        layer.gives_scores = True
        with pytest.raises(ConfigError, match="scores"):
            in_microbatches(layer, rows(4, 0))

    on_ranks(1, run)


# The order on GPUs.


class NotedStreams:
    """Takes the place of torch.cuda: two streams, whose events and waits go to a log."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "main"

    def current_stream(self, device: Any) -> NotedStream:  # noqa: ARG002
        return NotedStream(self, self.now)

    @contextmanager
    def stream(self, stream: NotedStream) -> Iterator[None]:
        before, self.now = self.now, stream.name
        try:
            yield
        finally:
            self.now = before


class NotedStream:
    def __init__(self, streams: NotedStreams, name: str) -> None:
        self._streams, self.name = streams, name

    def record_event(self) -> str:
        """Return the last work of the stream."""
        done = [entry for entry in self._streams.log if entry.endswith(f"on {self.name}") and "waits" not in entry]
        return done[-1] if done else "nothing"

    def wait_event(self, event: str) -> None:
        self._streams.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> NotedStreams:
    streams = NotedStreams()
    monkeypatch.setattr(microbatches, "_cuda", streams)

    def begin(second: Any, world: World) -> None:
        second._device, second._stream = world.device, NotedStream(streams, "second")

    monkeypatch.setattr(microbatches._SecondStream, "__init__", begin)
    monkeypatch.setattr(microbatches, "_sms_of_exchange", lambda _: 32)
    for name in ("dispatch_rows", "multiply_rows", "apply_shared", "route"):
        note(monkeypatch, streams, MoELayer, name)
    return streams


def note(monkeypatch: pytest.MonkeyPatch, streams: NotedStreams, owner: Any, name: str) -> None:
    real = getattr(owner, name)

    def noted(*arguments: Any, **options: Any) -> Any:
        left = 132 - left_sms.blocks_of_product(132, most=1000)
        streams.log.append(f"{name.split('_')[0]}{' beside ' + str(left) * (left > 0)} on {streams.now}")
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, noted)


def test_each_dispatch_is_enqueued_before_the_experts_of_the_part_before(
    streams: NotedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(world: World) -> None:
        layer = MoELayer(world, SPEC, FORM)
        note(monkeypatch, streams, type(layer.exchange), "combine_unkept")
        x = rows(10, 0)
        y = in_microbatches(layer, x)
        assert streams.log == [
            *("route beside  on main", "second waits for route beside  on main"),
            *("dispatch beside 32 on second", "apply beside 32 on main", "dispatch beside 32 on second"),
            *("main waits for dispatch beside 32 on second", "multiply beside 32 on main"),
            *("second waits for multiply beside 32 on main", "combine beside 32 on second"),
            *("main waits for dispatch beside 32 on second", "multiply beside 32 on main"),
            *("second waits for multiply beside 32 on main", "combine beside 32 on second"),
            "main waits for combine beside 32 on second",
        ]
        torch.testing.assert_close(y, layer(x))

    on_ranks(1, run)


def test_the_lane_is_joined_after_an_error(streams: NotedStreams) -> None:
    def run(world: World) -> None:
        layer = MoELayer(world, SPEC, FORM)
        layer.experts.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            in_microbatches(layer, rows(10, 0))
        assert streams.log[-1] == "main waits for dispatch beside 32 on second"
        assert left_sms.blocks_of_product(132, most=1000) == 132

    on_ranks(1, run)


def test_replays_that_differ_on_one_rank_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs and delays: what judges the replays of GPU ranks (tests/gpu/test_microbatches_gpu.py)."""
    calls = [0, 0]

    def stale(layer: MoELayer, x: torch.Tensor, count: int) -> torch.Tensor:
        y = in_microbatches(layer, x, count)
        calls[layer.world.rank] += 1
        return y if calls[layer.world.rank] < 20 or layer.world.rank else y.roll(1, dims=0)

    asked = Replays(24, tokens=16, steps=("layer", "microbatches"))
    right = on_ranks(2, lambda world: replay_many(world, asked))
    monkeypatch.setattr(replay_ranks, "in_microbatches", stale)
    wrong = on_ranks(2, lambda world: replay_many(world, asked))
    assert [of_rank["replays"] for of_rank in (*right, *wrong)] == [dict.fromkeys(asked.steps, 24)] * 4
    counts = [of_rank["wrong"]["microbatches"] for of_rank in (*right, *wrong)]
    assert counts == [0, 0, 6, 0]  # the first call of 25 is no replay
    assert max(of_rank["distance"] for of_rank in right) < 0.05


def test_refused_data_of_a_part_raises_on_all_ranks_and_the_next_call_works() -> None:
    def run(world: World) -> None:
        layer = MoELayer(world, replace(SPEC, capacity=10, alignment=1), LayerForm(24, norm=1e-6))
        with pytest.raises(DataRefused):
            in_microbatches(layer, rows(12, 0))
        torch.testing.assert_close(in_microbatches(layer, rows(2, 0)), layer(rows(2, 0)))

    on_ranks(2, run)
