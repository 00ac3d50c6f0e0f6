"""The shared expert beside the dispatch: the order of calls and of events, on streams that only note them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from raymoe.exchange.spec import ExchangeSpec
from raymoe.moe import beside
from raymoe.moe.beside import SideStream
from raymoe.moe.layer import LayerForm, MoELayer
from tests.unit.worlds import wired

SPEC = ExchangeSpec(tokens=6, hidden=8, experts=4, topk=2, dtype="float32")


class Streams:
    """Takes the place of torch.cuda: streams and events write to a log."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "main"

    def Stream(self, device: Any) -> Stream:  # noqa: ARG002, N802
        return Stream(self, "side")

    def Event(self) -> Event:  # noqa: N802
        return Event(self)

    def current_stream(self, device: Any) -> Stream:  # noqa: ARG002
        return Stream(self, self.now)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream.name
        try:
            yield
        finally:
            self.now = before


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self._streams, self.name = streams, name

    def wait_event(self, event: Event) -> None:
        self._streams.log.append(f"{self.name} waits for {event.at}")


class Event:
    def __init__(self, streams: Streams) -> None:
        self._streams, self.at = streams, "nothing"

    def record(self, stream: Stream) -> None:
        self.at = f"{stream.name} after {len(self._streams.log)}"
        self._streams.log.append(f"event on {stream.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(beside, "_cuda", streams)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda _, stream: streams.log.append(f"memory read on {stream.name}"),
    )
    return streams


def noted(layer: MoELayer, streams: Streams) -> MoELayer:
    """Note the parts of a layer, with the stream on which each is called."""

    def note(part: str) -> Any:
        return lambda *_: streams.log.append(f"{part} on {streams.now}")

    layer.gate.register_forward_hook(note("router"))
    layer.experts.register_forward_pre_hook(note("experts"))
    layer.shared_experts.register_forward_pre_hook(note("shared"))
    return layer


def run(layer: MoELayer, grad: bool) -> list[torch.Tensor]:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2)).requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        y = layer(x)
    return [y.detach(), *(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) if grad else ())]


FORM = LayerForm(16, shared=12, norm=1e-6, residual=True)
READY, DONE = "event on main", "event on side"


@pytest.mark.parametrize("grad", [False, True])
def test_the_shared_expert_starts_after_the_dispatch_and_is_joined_before_it_is_added(
    streams: Streams, grad: bool
) -> None:
    (world,) = wired(1)
    with world:
        layer = noted(MoELayer(world, SPEC, FORM), streams)
        wanted = run(layer, grad)
        assert streams.log == ["router on main", "experts on main", "shared on main"]  # on a CPU nothing is beside
        streams.log.clear()
        layer._side = SideStream(world)
        found = run(layer, grad)
    kept = ["memory read on side"] if grad else []
    assert streams.log == [
        *("router on main", READY, "side waits for main after 1", *kept, "shared on side", DONE),
        *("experts on main", f"main waits for side after {4 + grad}", "memory read on main"),
    ]
    assert all(torch.equal(result, want) for result, want in zip(found, wanted, strict=True))


def test_a_layer_can_run_its_parts_one_after_the_other(streams: Streams) -> None:
    (world,) = wired(1)
    with world:
        layer = noted(MoELayer(world, SPEC, FORM), streams)
        layer._side, layer.beside = SideStream(world), False
        run(layer, grad=False)
    assert streams.log == ["router on main", "experts on main", "shared on main"]


@pytest.mark.parametrize("part", ["experts", "shared_experts"])
def test_the_stream_is_joined_after_an_error(streams: Streams, part: str) -> None:
    """A capture that ends while a stream is apart would hide the error behind one of its own."""
    (world,) = wired(1)
    with world:
        layer = noted(MoELayer(world, SPEC, FORM), streams)
        layer._side = SideStream(world)
        layer.get_submodule(part).register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(layer, grad=False)
    assert "main waits for side after 4" in streams.log


def test_nothing_is_joined_where_nothing_was_started(streams: Streams) -> None:
    (world,) = wired(1)
    with world:
        layer = noted(MoELayer(world, SPEC, FORM), streams)
        layer._side = SideStream(world)
        with pytest.raises(Exception, match="x has 7 rows"), torch.no_grad():
            layer(torch.ones(7, 8))
    assert streams.log == ["router on main", READY]


def test_a_copied_layer_shares_the_side_stream(streams: Streams) -> None:
    import copy

    (world,) = wired(1)
    with world:
        layer = MoELayer(world, SPEC, FORM)
        layer._side = SideStream(world)
        assert copy.deepcopy(layer)._side is layer._side
