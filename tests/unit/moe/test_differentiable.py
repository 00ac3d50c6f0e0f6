"""Gradients of dispatch and combine: equal to autograd in float64, traceable, and with every weight's gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from raymoe.errors import ConfigError, DataRefused
from raymoe.exchange.cpu.cpu_backend import CpuBackend
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.nccl.nccl_backends import NcclAllgather
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.differentiable import combine, dispatch, dispatch_exact
from tests.unit.exchange.exchange_cases import ROUTINGS, Case, batches, open_exchange
from tests.unit.exchange.test_exchange import BACKENDS, ON_TENSORS
from tests.unit.moe.gradient_cases import (
    Gradients,
    close,
    judge_gradients,
    judge_refused_gradients,
    refuse_gradients,
    run_gradients,
)
from tests.unit.ranks import RankPool
from tests.unit.worlds import wired

SPEC = ExchangeSpec(tokens=6, hidden=8, experts=4, topk=2, dtype="float32", depth=0)


@pytest.fixture
def alone() -> Iterator[Exchange]:
    """An exchange of one rank."""
    (world,) = wired(1)
    with world, Exchange(world, SPEC) as exchange:
        yield exchange


@pytest.fixture
def by_token() -> Iterator[Exchange]:
    """An exchange of one rank, with layout `token`."""
    (world,) = wired(1)
    with world, Exchange(world, replace(SPEC, layout="token")) as exchange:
        yield exchange


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_equal_autograd_in_float64(pool: RankPool, backend: str, layout: str, weighted: bool) -> None:
    spec = ExchangeSpec(tokens=7, hidden=8, experts=6, topk=3, dtype="float32", layout=layout, depth=int(weighted))
    case = Case(2, spec, backend, ROUTINGS, seed=3, weighted=weighted)
    judge_gradients(case, pool.run(2, run_gradients, case), bound=2e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("backend", ["host", *ON_TENSORS])
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_of_exact_rows_equal_autograd_in_float64(
    pool: RankPool, backend: str, layout: str, weighted: bool
) -> None:
    spec = ExchangeSpec(
        tokens=7, hidden=16, experts=6, topk=3, dtype="float32", layout=layout, padding="zero", alignment=3
    )
    case = Case(2, spec, backend, ROUTINGS, seed=5, weighted=weighted, exact=True)
    judge_gradients(case, pool.run(2, run_gradients, case), bound=2e-6)


def test_an_exact_dispatch_has_the_rows_that_came_and_no_padding(alone: Exchange) -> None:
    x, ids, weights = inputs()
    whole, exact = (each(alone, x, ids, weights) for each in (dispatch, dispatch_exact))
    there = int(whole.expert_offsets[-1])
    assert exact.x.shape == (there, 8) and exact.weights.shape == (there,) and there < len(whole.x)
    torch.testing.assert_close((exact.x, exact.weights), (whole.x[:there], whole.weights[:there]))
    shorter = combine(alone, torch.tanh(whole.x[:there]), whole)
    torch.testing.assert_close(combine(alone, torch.tanh(exact.x), exact), shorter)
    shorter.sum().backward()
    assert weights.grad is not None and bool(weights.grad.isfinite().all())
    with pytest.raises(ConfigError, match=f"rows has 1 rows, and {there} came, gaps included"):
        combine(alone, whole.x[:1], whole)


def test_exact_rows_can_be_traced_where_torch_takes_sizes_of_data(alone: Exchange) -> None:
    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        got = dispatch_exact(alone, x, ids, weights)
        return combine(alone, torch.tanh(got.x), got)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        results = []
        for run in (layer, compiled):
            x, ids, weights = inputs()
            y = run(x, ids, weights)
            y.square().sum().backward()
            results.append((y, x.grad, weights.grad))
    torch.testing.assert_close(results[1], results[0])


def sum_weights(world: World, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids, and the gradient of weights whose sum is the loss: autograd gives one number for all of them."""
    batch = batches(case, 0)[world.rank]
    weights = batch.weights.float().requires_grad_()
    with open_exchange(world, case) as exchange:
        dispatch(exchange, batch.x.requires_grad_(), batch.ids, weights).weights.sum().backward()
        exchange.check()
    assert weights.grad is not None
    return batch.ids, weights.grad


@pytest.mark.parametrize("backend", ["host", *ON_TENSORS])
def test_gradients_of_weights_may_be_one_number_for_all(pool: RankPool, backend: str) -> None:
    spec = ExchangeSpec(tokens=5, hidden=16, experts=4, topk=3, dtype="float32")
    for ids, gradient in pool.run(2, sum_weights, Case(2, spec, backend, ("masked",))):
        assert torch.equal(gradient, (ids >= 0).float())


@pytest.mark.parametrize("backend", ON_TENSORS)
def test_gradients_of_refused_data_are_nan_by_nccl_backends(pool: RankPool, backend: str) -> None:
    case = Case(2, ExchangeSpec(tokens=5, hidden=16, experts=4, topk=3), backend, ())
    for found in pool.run(2, refuse_gradients, case):
        judge_refused_gradients(found, "rank 1 asked for expert 4 for its token 1; ids are -1 to 3")


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("backend", ON_TENSORS)
def test_gradients_by_nccl_backends_equal_autograd_in_float64(pool: RankPool, backend: str, layout: str) -> None:
    spec = ExchangeSpec(tokens=5, hidden=16, experts=4, topk=3, dtype="float32", layout=layout, padding="zero")
    case = Case(2, spec, backend, ("uniform", "repeated", "masked", "none"), seed=3, weighted=layout == "expert")
    judge_gradients(case, pool.run(2, run_gradients, case), bound=2e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("backend", [*BACKENDS, *ON_TENSORS])
def test_gradients_by_token_equal_autograd_in_float64(pool: RankPool, backend: str, exact: bool) -> None:
    spec = ExchangeSpec(tokens=7, hidden=16, experts=6, topk=3, dtype="float32", layout="token", depth=0)
    case = Case(2, spec, backend, ROUTINGS, seed=4, prefix=True, weighted=False, exact=exact)
    judge_gradients(case, pool.run(2, run_gradients, case), bound=2e-6)


def test_rows_by_token_can_be_traced(by_token: Exchange) -> None:
    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        got = dispatch(by_token, x, ids, weights)
        assert got.topk_idx is not None
        shares = torch.where(got.topk_idx >= 0, got.weights * (got.topk_idx + 1), 0.0)
        return combine(by_token, torch.where(shares.sum(1, keepdim=True) > 0, torch.tanh(got.x), 0.0), got, False)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for run in (layer, compiled):
        x, ids, weights = inputs()
        y = run(x, ids, weights)
        y.square().sum().backward()
        results.append((y, x.grad))
    torch.testing.assert_close(results[1], results[0])
    with pytest.raises(ConfigError, match="weighted is True with layout token, where combine takes sums of rows"):
        combine(by_token, x, dispatch(by_token, *inputs()))


def run_counted(world: World, case: Case) -> tuple[int, int, list[Gradients]]:
    """Count the dispatches that route, and those that go to known places."""
    with (
        mock.patch.object(NcclAllgather, "dispatch", autospec=True, side_effect=NcclAllgather.dispatch) as routed,
        mock.patch.object(
            NcclAllgather, "dispatch_known", autospec=True, side_effect=NcclAllgather.dispatch_known
        ) as known,
    ):
        found = run_gradients(world, case)
    return routed.call_count, known.call_count, found


@pytest.mark.parametrize("weighted", [True, False])
def test_the_backward_of_combine_routes_nothing_where_places_are_kept(pool: RankPool, weighted: bool) -> None:
    spec = ExchangeSpec(tokens=5, hidden=16, experts=4, topk=3, dtype="float32", padding="zero", alignment=4)
    case = Case(2, spec, "tensor allgather", ("uniform", "masked"), seed=4, weighted=weighted, prefix=True)
    counts = pool.run(2, run_counted, case)
    assert [(routed, known) for routed, known, _ in counts] == [(2, 2), (2, 2)]
    judge_gradients(case, [found for *_, found in counts], bound=2e-6)


def test_rows_of_known_places_are_checked(alone: Exchange) -> None:
    """A CPU rank keeps no places; the arguments are refused before that."""
    x, rows = torch.ones(3, 8), torch.zeros(alone.spec.rows(1), 8)
    got = alone.dispatch(x, torch.tensor([[0, 1]] * 3), torch.ones(3, 2), out=rows)
    assert not alone.keeps_places
    with pytest.raises(ConfigError, match=r"x has shape \[2, 8\]; \[3, 8\] is needed"):
        alone.dispatch_known(x[:2], got, torch.zeros_like(rows))
    with pytest.raises(ConfigError, match=r"out has shape \[3, 8\]"):
        alone.dispatch_known(x, got, torch.zeros(3, 8))
    with pytest.raises(ConfigError, match="overlap"):
        alone.dispatch_known(rows[:3], got, rows)
    with pytest.raises(ConfigError, match="whose carriers send ids with the rows"):
        alone.dispatch_known(x, got, torch.zeros_like(rows))
    with Exchange(alone.world, SPEC) as other, pytest.raises(ConfigError, match="got comes from another exchange"):
        other.dispatch_known(x, got, torch.zeros_like(rows))


@pytest.mark.parametrize("ranks", [1, 4])
def test_gradients_of_a_part_of_the_tokens_on_any_number_of_ranks(pool: RankPool, ranks: int) -> None:
    spec = ExchangeSpec(tokens=5, hidden=4, experts=8, topk=2, dtype="float32", alignment=3)
    case = Case(ranks, spec, "host", ("uniform", "repeated", "none"), seed=1, prefix=True, wide_topk_idx=False)
    judge_gradients(case, pool.run(ranks, run_gradients, case), bound=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_narrow_rows_are_near(pool: RankPool, dtype: str) -> None:
    spec = ExchangeSpec(tokens=7, hidden=16, experts=4, topk=2, dtype=dtype, wire={"combine": "float32"})
    case = Case(2, spec, "host", ("uniform", "masked"), seed=8)
    judge_gradients(case, pool.run(2, run_gradients, case), bound=2e-2)


def run_without_weight_gradients(world: World, case: Case) -> list[Gradients]:
    """The classic mistake: gradients of rows are returned, those of weights are not."""
    real = CpuBackend.combine_gradients

    def drop(self: CpuBackend, rows, weights, got, out, out_weights):
        real(self, rows, torch.zeros_like(weights), got, out, out_weights)

    with mock.patch.object(CpuBackend, "combine_gradients", drop):
        return run_gradients(world, case)


def test_a_dropped_gradient_of_the_weights_is_found(pool: RankPool) -> None:
    case = Case(2, SPEC, "host", ("uniform",), seed=3)
    with pytest.raises(AssertionError, match="weights of rank 0"):
        judge_gradients(case, pool.run(2, run_without_weight_gradients, case), bound=1e-2)


def run_gradcheck(world: World, case: Case) -> bool:
    """Compare with finite differences. The exchange is linear in each input, so wide steps are exact in float32."""
    batch = batches(case, 0)[world.rank]
    with Exchange(world, case.spec, case.backend) as exchange:

        def both(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            got = dispatch(exchange, x, batch.ids, weights)
            return combine(exchange, 2 * got.x, got)

        inputs = batch.x.requires_grad_(), batch.weights.requires_grad_()
        return bool(torch.autograd.gradcheck(both, inputs, eps=0.5, atol=1e-4, rtol=1e-4, nondet_tol=0.0))


@pytest.mark.filterwarnings("ignore:Input #.* requires gradient and is not a double precision")
def test_gradients_equal_finite_differences(pool: RankPool) -> None:
    spec = ExchangeSpec(tokens=2, hidden=4, experts=4, topk=2, dtype="float32")
    assert pool.run(2, run_gradcheck, Case(2, spec, "host", ("uniform",), ragged=False)) == [True, True]


def run_layers(world: World, case: Case, shared: bool) -> tuple[Gradients, Gradients]:
    """Run three layers in flight at once, forward and then backward; then the same layers in float64 on this rank."""
    exchanges = [Exchange(world, case.spec, case.backend) for _ in range(1 if shared else 3)]
    batch = batches(case, 0)[world.rank]
    x, weights = batch.x.requires_grad_(), batch.weights.requires_grad_()
    y = x
    for layer in range(3):
        exchange = exchanges[layer % len(exchanges)]
        got = dispatch(exchange, y, (batch.ids + layer) % case.spec.experts, weights)
        y = y + combine(exchange, torch.tanh((layer + 1) * got.x), got)
    y.sum().backward()
    for exchange in exchanges:
        exchange.close()
    assert x.grad is not None and weights.grad is not None
    ours = Gradients(y.detach(), x.grad, weights.grad, x)
    x, weights = batch.x.double().detach().requires_grad_(), batch.weights.double().detach().requires_grad_()
    y = x
    for layer in range(3):
        y = y + weights.sum(dim=1, keepdim=True) * torch.tanh((layer + 1) * y)
    y.sum().backward()
    assert x.grad is not None and weights.grad is not None
    return ours, Gradients(y.detach(), x.grad, weights.grad, x)


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("shared", [True, False])
def test_layers_in_flight_keep_their_rows(pool: RankPool, layout: str, shared: bool) -> None:
    spec = ExchangeSpec(tokens=6, hidden=8, experts=4, topk=2, dtype="float32", layout=layout)
    for ours, wanted in pool.run(2, run_layers, Case(2, spec, "host", ("uniform",), seed=2), shared):
        for name in ("y", "x", "weights"):
            close(name, getattr(ours, name), getattr(wanted, name), 1e-5)


# Tracing.


def inputs(tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    ids = torch.tensor([[0, 3], [1, 1], [-1, 2], [-1, -1], [2, 0]])[:tokens]
    x, weights = torch.randn(tokens, 8, generator=source), torch.rand(tokens, 2, generator=source)
    return x.requires_grad_(), ids, weights.requires_grad_()


def test_operators_pass_opcheck(alone: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    # opcheck runs an operator several times and wants equal results; the number of a dispatch is part of its result.
    real = CpuBackend._dispatch

    def numbered(self, *arguments):
        self._dispatches = 0
        return real(self, *arguments)

    monkeypatch.setattr(CpuBackend, "_dispatch", numbered)
    x, ids, weights = inputs()
    count = torch.tensor([4], dtype=torch.int32)
    ops = torch.ops.raymoe
    for counts in ([], [count]):
        torch.library.opcheck(ops.dispatch, (alone.numbers, 3, x, ids, weights, counts))
        got = dispatch(alone, x, ids, weights, *counts, site=3)
        rows, places = got.x.detach().requires_grad_(), got.weights.detach().requires_grad_()
        for weighted in (True, False):
            combined = alone.numbers, 3, rows, places, got.routing, weighted
            torch.library.opcheck(ops.combine, combined)
        torch.library.opcheck(ops.combine_gradients, (alone.numbers, 3, rows.detach(), places.detach(), got.routing))
        for length in (len(rows), int(got.expert_offsets[-1])):
            known = alone.numbers, 3, x.detach(), got.routing, length
            torch.library.opcheck(ops.dispatch_gradients, known)


def test_compiled_layers_trace_whole_forward_and_backward(alone: Exchange) -> None:
    def two_layers(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for weighted in (True, False):
            got = dispatch(alone, x, ids, weights)
            rows = torch.tanh(got.x) if weighted else torch.tanh(got.x) * got.weights[:, None]
            x = x + combine(alone, rows, got, weighted=weighted)
        return x

    compiled = torch.compile(two_layers, backend="aot_eager", fullgraph=True)
    for tokens in (5, 3, 2):  # the second compilation has a symbolic number of tokens
        results = []
        for run in (two_layers, compiled):
            x, ids, weights = inputs(tokens)
            y = run(x, ids, weights)
            y.square().sum().backward()
            results.append((y, x.grad, weights.grad))
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager)


def test_selective_checkpointing_sees_the_operators(alone: Exchange) -> None:
    seen: list[str] = []

    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        seen.append(str(op))
        return CheckpointPolicy.MUST_SAVE if "raymoe" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        got = dispatch(alone, x, ids, weights)
        return combine(alone, torch.tanh(got.x), got)

    gradients = []
    for saved in (True, False):
        x, ids, weights = inputs()
        if saved:
            real = Exchange.dispatch_unkept
            with mock.patch.object(Exchange, "dispatch_unkept", autospec=True, side_effect=real) as dispatched:
                y = checkpoint(
                    layer, x, ids, weights,
                    use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy),
                )  # fmt: skip
                y.sum().backward()
            assert dispatched.call_count == 1  # none is run again; the backward of combine is `dispatch_again`
        else:
            layer(x, ids, weights).sum().backward()
        gradients.append((x.grad, weights.grad))
    assert {"raymoe.dispatch.default", "raymoe.combine.default"} <= set(seen)
    torch.testing.assert_close(gradients[0], gradients[1])


# Mistakes.


def test_refused_data_raises_in_combine_and_the_next_step_works(alone: Exchange) -> None:
    x, ids, weights = inputs()
    got = dispatch(alone, x, ids + 9, weights)
    with pytest.raises(DataRefused, match="ids are -1 to 3"):
        combine(alone, got.x, got)
    got = dispatch(alone, x, ids, weights)
    combine(alone, got.x, got).sum().backward()
    assert weights.grad is not None and weights.grad[0, 0] == pytest.approx(float(x[0].detach().sum()))


def test_rows_of_another_exchange_are_refused(alone: Exchange) -> None:
    got = dispatch(alone, *inputs())
    with Exchange(alone.world, SPEC) as other, pytest.raises(ConfigError, match="got comes from another exchange"):
        combine(other, got.x, got)


def test_a_dropped_exchange_is_named(alone: Exchange) -> None:
    x, ids, weights = inputs()
    with pytest.raises(ConfigError, match="exchange 0 of this process was dropped"):
        torch.ops.raymoe.dispatch([0, 1, 1, 1], 0, x, ids, weights, [])


def test_second_derivatives_and_a_plain_number_of_tokens_are_refused(alone: Exchange) -> None:
    x, ids, weights = inputs()
    got = dispatch(alone, x, ids, weights)
    y = combine(alone, got.x * got.x, got)
    with pytest.raises(ConfigError, match="no second derivative: call backward without create_graph"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(ConfigError, match=r"num_tokens is 3; with gradients it is an int32\[1\] tensor"):
        dispatch(alone, x, ids, weights, 3)  # type: ignore[arg-type]
