"""The routing of a model, recorded into a trace that a job replays."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raymoe import ExchangeSpec, World, cli
from raymoe.errors import ConfigError
from raymoe.moe import LayerForm, MoELayer, Router, RouterForm, RoutingTrace
from raymoe.workload.inputs import Routing

SPEC = ExchangeSpec(tokens=6, hidden=8, experts=4, topk=2, dtype="float32")


def router() -> Router:
    return Router(RouterForm(experts=4, topk=2), torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))


def test_a_job_replays_the_recorded_steps_of_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        layer = MoELayer(world, SPEC, LayerForm(ffn=4))
        batches = [torch.randn(tokens, 8) for tokens in (6, 4, 6)]
        chosen = [layer.get_submodule(layer._router_name)(batch).topk_idx for batch in batches]
        with RoutingTrace(layer) as trace:
            for batch in batches:
                layer(batch)
        layer(batches[0])
    trace.save("ids.npy")
    job = Routing("trace", seed=0, ranks=1, tokens=6, experts=4, topk=2, file="ids.npy")
    assert job.recorded == 3
    for step, ids in enumerate(chosen):
        replayed = job.draw(0, step).ids
        assert torch.equal(replayed[: len(ids)], ids) and bool((replayed[len(ids) :] == -1).all())
    (tmp_path / "x.yaml").write_text(
        "workload: exchange\nworld: {ranks: 1, device: cpu}\nshape: {tokens: 6, experts: 4, topk: 2, hidden: 64}\n"
        "routing: {kind: trace, file: ids.npy}\n"
    )
    assert cli.main(["validate", "x.yaml"]) == 0, capsys.readouterr().err


def test_a_repeated_forward_pass_is_no_further_step() -> None:
    routing = router()
    with RoutingTrace(routing) as trace:
        for _ in range(2):
            x = torch.randn(3, 8, requires_grad=True)
            checkpoint(lambda x: routing(x).topk_weights.sum(), x, use_reentrant=False).backward()
    assert trace.ids().shape == (2, 3, 2)


def test_steps_bound_the_trace_and_recording_ends_with_the_context() -> None:
    routing = router()
    with RoutingTrace(routing, steps=2) as trace:
        for _ in range(5):
            routing(torch.randn(3, 8))
    assert len(trace.ids()) == 2 and not routing._forward_hooks


class OtherRouter(nn.Module):
    """A router of another library: it returns scores, weights and ids, or scores only."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: torch.Tensor) -> object:
        best = x.topk(2)
        return (x, best.values, best.indices) if self.whole else x


def test_routers_of_other_libraries() -> None:
    x = torch.randn(2, 3, 4)
    ids = x.topk(2).indices.reshape(1, 6, 2).numpy()
    with RoutingTrace(OtherRouter(whole=True)) as trace:
        trace._router(x)
    assert numpy.array_equal(trace.ids(), ids)
    with RoutingTrace(OtherRouter(whole=False), choose=lambda scores: scores.topk(2).indices) as trace:
        trace._router(x)
    assert numpy.array_equal(trace.ids(), ids)
    with RoutingTrace(OtherRouter(whole=False)) as trace, pytest.raises(ConfigError, match=r"0 tensors.*choose="):
        trace._router(x)
    with pytest.raises(ConfigError, match="the router was not called"):
        trace.ids()
