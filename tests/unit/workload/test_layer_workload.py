"""Workload layer on CPU ranks: its lines, its parts, and errors that its verification finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from raymoe.config.job import Job
from raymoe.errors import WrongResult
from raymoe.exchange import shared
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import layer_form
from raymoe.moe.router import Router
from raymoe.moe.weights import expert_biases
from raymoe.rows import norm
from raymoe.workload.layer import passes
from raymoe.workload.layer.marks import START, SUM, Marks
from raymoe.workload.layer.passes import LayerPasses
from raymoe.workload.measure import Line
from tests.unit.memory.test_world_of import groups
from tests.unit.ranks import RankPool
from tests.unit.workload.test_workload import failures, job, run, run_cases

__all__ = ["groups"]  # a fixture

FORWARD = ["norm", "router", "dispatch", "experts", "combine", "shared", "sum"]
BACKWARD = [f"{part}_backward" for part in reversed(FORWARD)]
ROUTERS = {
    "softmax": {"kind": "softmax"},
    "sigmoid": {"kind": "sigmoid", "groups": 4, "topk_groups": 2, "scale": 2.5},
    "chosen": {"kind": "chosen"},
}


def layer_job(ranks: int = 2, kind: str = "sigmoid", **asked: Any) -> dict[str, Any]:
    given = {"router": ROUTERS[kind], **asked} if kind != "given" else asked
    return job("layer", ranks, layer=given, shape={"hidden": 64, "ffn": 32})


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("kind", ROUTERS)
def test_a_layer_gives_a_verified_line_for_the_step_and_each_part(pool: RankPool, ranks: int, kind: str) -> None:
    for attempt in range(6):  # other processes can disturb every sample of one run
        lines = run(pool, layer_job(ranks, kind, shared=48))
        assert [line["op"] for line in lines] == ["step", *FORWARD]
        assert all(line["verified"] and line["routing"] == kind for line in lines)
        step, *parts = (line["us_min"] for line in lines)
        if (undisturbed := max(parts) < step and sum(parts) > 0.5 * step) or attempt == 5:
            break
    assert undisturbed, (step, parts)
    assert lines[0]["gbps_wire"] is None, "the time of a whole layer is no time of a transfer"
    assert lines[0]["tokens_per_s"] == pytest.approx(ranks * lines[0]["tokens"] / lines[0]["us_p50"] * 1e6, rel=1e-3)
    assert not any("tokens_per_s" in line for line in lines[1:])
    assert [line["op"] for line in lines if line["bytes_wire"]] == (
        ["step", "dispatch", "combine"] if ranks > 1 else []
    )


@pytest.mark.parametrize(("microbatches", "experts_dtype"), [(2, None), (3, "float8_e4m3")])
def test_a_layer_in_microbatches_gives_a_verified_line_for_the_step(
    pool: RankPool, microbatches: int, experts_dtype: str | None
) -> None:
    given = layer_job(2, "sigmoid", shared=48, microbatches=microbatches, experts_dtype=experts_dtype)
    (line,) = run(pool, given | {"routing": {"ragged": True}})
    assert line["op"] == "step" and line["verified"] and line["bytes_wire"] > 0


@pytest.mark.parametrize("recompute", [False, "activation", True])
@pytest.mark.parametrize("kind", ROUTERS)
def test_a_backward_pass_has_a_line_for_each_part(pool: RankPool, kind: str, recompute: bool | str) -> None:
    lines = run(pool, layer_job(2, kind, shared=48, backward=True, recompute=recompute))
    found = [line["op"] for line in lines]
    assert found[0] == "step" and set(found) == {
        "step",
        *FORWARD,
        *BACKWARD,
        *(["recompute"] if recompute is True else []),
    }
    assert all(line["verified"] and line["max_error"] < 6e-2 for line in lines)
    assert lines[0]["bytes_wire"] is None


@pytest.mark.parametrize("backward", [False, True])
def test_experts_of_gpt_oss_are_verified(pool: RankPool, backward: bool) -> None:
    lines = run(pool, layer_job(2, "chosen", experts="gpt_oss", backward=backward))
    assert lines[0]["op"] == "step" and all(line["verified"] for line in lines)


def test_ragged_ranks_and_a_given_routing_have_a_backward_pass(pool: RankPool) -> None:
    given = layer_job(4, "given", backward=True, shared=16) | {"routing": {"ragged": True, "masked": 0.2}}
    assert [line["op"] for line in run(pool, given)] == ["step"]
    alone = layer_job(1, "given", backward=True) | {"routing": {"masked": 1.0}}  # no token has an expert
    assert [line["op"] for line in run(pool, alone)] == ["step"]
    own = layer_job(4, "sigmoid", backward=True) | {"routing": {"ragged": True}}
    assert "experts_backward" in [line["op"] for line in run(pool, own)]


def run_spanning(_rank: int, given: dict[str, Any]) -> list[Line]:
    with World.of(domain=2, timeout_s=20) as world:
        return run_cases(world, given)[0]


@pytest.mark.thorough
def test_microbatches_cross_between_two_domains(groups: Callable[..., list[Any]]) -> None:
    (line,) = groups(4, run_spanning, layer_job(4, shared=16, microbatches=2))[0]
    assert line["verified"] and line["bytes_net"] > 0


@pytest.mark.parametrize("backward", [False, True])
def test_a_layer_of_two_domains_gives_verified_lines_with_the_bytes_between_them(
    groups: Callable[..., list[Any]], backward: bool
) -> None:
    given = layer_job(4, shared=16, backward=backward)
    lines = groups(4, run_spanning, given)[0]
    assert all(line["verified"] and line["domains"] == 2 for line in lines)
    sent = {line["op"]: line["bytes_net"] for line in lines}
    assert sent["dispatch"] > 0 and sent["combine"] > 0 and sent["experts"] is None
    assert sent["step"] == (None if backward else sent["dispatch"] + sent["combine"])


def spoiled(world: World, given: dict[str, Any], fault: str) -> None:
    """Run a job with a part that computes something wrong."""
    with pytest.MonkeyPatch.context() as patched:
        if fault == "router":
            real = Router.forward
            patched.setattr(Router, "forward", lambda self, x: real(self, x)._replace(topk_idx=real(self, -x).topk_idx))
        elif fault == "weights":
            real = Router.forward

            def doubled(self: Router, x: torch.Tensor) -> Any:
                routed = real(self, x)
                return routed._replace(topk_weights=routed.topk_weights * 1.5)

            patched.setattr(Router, "forward", doubled)
        elif fault == "norm":
            patched.setattr(norm.formulas, "rms_norm", lambda x, *_: x.float() * 0.7)
        elif fault == "gradients":
            real_gradients = Exchange.combine_gradients

            def halved(self: Exchange, *args: Any) -> Any:
                dx, dweights = real_gradients(self, *args)
                return dx, dweights * 0.5

            patched.setattr(Exchange, "combine_gradients", halved)
        elif fault == "activation":
            patched.setattr(passes, "GPT_OSS", replace(passes.GPT_OSS, up_plus=0.0))
        elif fault == "biases":
            patched.setattr(
                layer_form, "expert_biases", lambda shape, seed, expert, _: expert_biases(shape, seed, expert + 1)
            )
        run_cases(world, given)


@pytest.mark.parametrize("fault", ["router", "weights", "norm", "gradients"])
def test_wrong_results_are_found(pool: RankPool, fault: str) -> None:
    errors = failures(pool, 2, spoiled, layer_job(2, "sigmoid", backward=True, shared=16), fault)
    assert {type(error) for error in errors} == {WrongResult}


@pytest.mark.parametrize("fault", ["activation", "biases"])
def test_wrong_experts_of_gpt_oss_are_found(pool: RankPool, fault: str) -> None:
    errors = failures(pool, 2, spoiled, layer_job(2, "chosen", experts="gpt_oss"), fault)
    assert {type(error) for error in errors} == {WrongResult}


def scaled_wrongly(world: World, given: dict[str, Any], name: str, factor: float) -> None:
    """Run a job whose 8-bit experts have one scale multiplied by a factor, in each expert."""
    real = passes.MoELayer

    def spoilt(*args: Any, **options: Any) -> Any:
        layer = real(*args, **options)
        with torch.no_grad():
            part, _, name_of_scale = name.rpartition(".")
            getattr(layer.get_submodule(part), name_of_scale)[..., 0, 0] *= factor
        return layer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(passes, "MoELayer", spoilt)
        run_cases(world, given)


@pytest.mark.parametrize(
    ("kind", "layout", "experts"), [("given", "rank", "swiglu"), ("chosen", "expert", "gpt_oss")], ids=str
)
def test_8_bit_experts_are_verified_and_a_wrong_scale_is_found(
    pool: RankPool, kind: str, layout: str, experts: str
) -> None:
    given = layer_job(2, kind, experts=experts, experts_dtype="float8_e4m3", shared=16)
    given |= {"shape": given["shape"] | {"hidden": 256, "ffn": 200}, "exchange": {"layout": layout}}
    lines = run(pool, given)
    assert lines[0]["verified"] and lines[0]["max_error"] < 2e-2
    for name in ("experts.gate_up_proj_scale_inv", "experts.down_proj_scale_inv", "shared_experts.down_proj_scale_inv"):
        assert {type(error) for error in failures(pool, 2, scaled_wrongly, given, name, 2.0)} == {WrongResult}
    pool.run(2, scaled_wrongly, given, "experts.down_proj_scale_inv", 1.0)


def test_the_same_job_is_correct_without_a_fault(pool: RankPool) -> None:
    pool.run(2, spoiled, layer_job(2, "sigmoid", backward=True, shared=16), "none")


def held_alone(world: World) -> list[list[str]]:
    """Return the spans of a forward and backward pass, without recomputing and with it."""
    found = []
    for recompute in (False, True):
        given = layer_job(1, "softmax", shared=16, backward=True, recompute=recompute)
        made = LayerPasses(Job.model_validate({"name": "test"} | given), world)
        times = iter(range(1000))
        made.marks.note = lambda times=times: next(times)
        x = torch.randn(5, 64).to(torch.bfloat16)
        nothing = torch.zeros(5, 3)
        made.run(passes.Batch(x, nothing.long(), nothing), torch.ones_like(x))
        spans = list(made.marks.spans())
        assert all(before[2] == after[1] for before, after in pairwise(spans))
        found.append([part for part, _, _ in spans])
    return found


def test_spans_follow_one_another_and_name_what_is_recomputed(pool: RankPool) -> None:
    ((kept, again),) = pool.run(1, held_alone)
    # The sum's gradient has two spans: up to its mark, and from there to the next.
    assert kept == [*FORWARD, "sum_backward", *BACKWARD]
    assert sorted(part for part in again if part != "recompute") == sorted(kept)
    assert again.count("recompute") >= 5


def test_the_sms_of_a_job_are_those_of_its_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Noted(Exchange):
        def __init__(self, world: World, spec: ExchangeSpec, backend: str, *, sms: int | str) -> None:
            made.append(sms)
            super().__init__(world, spec, backend)  # CPU ranks have no SMs to limit

    monkeypatch.setattr(shared, "Exchange", Noted)
    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        for asked in ({}, {"exchange": {"sms": 24}}):
            LayerPasses(Job.model_validate({"name": "test"} | layer_job(1) | asked), world)
    assert made == ["auto", 24]


def test_marks_change_no_gradient_and_note_nothing_unless_asked() -> None:
    marks, x = Marks(), torch.randn(3, requires_grad=True)
    marks.begin()
    y = marks.at(SUM, marks.at(START, x) ** 2)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, 2 * x.detach()) and not list(marks.spans())
