"""Routes are recorded and replayed: the same experts in another pass, with weights that have gradients."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raymoe.errors import ConfigError, DataRefused
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import (
    LayerForm,
    MoELayer,
    Router,
    RouterForm,
    count_routes,
    expert_load,
    record_routes,
    replay_route,
    replay_routes,
    same_routes,
)
from raymoe.moe.experts import local
from tests.unit.moe.bits import assert_same_bits, same_bits
from tests.unit.ranks import RankPool

H, E, K, T = 16, 8, 2, 12
SPEC = ExchangeSpec(tokens=T, hidden=H, experts=E, topk=K, dtype="float32", depth=0)
FORMS = {
    "softmax": RouterForm(E, K),
    "not normalised": RouterForm(E, K, normalise=False),
    "sigmoid": RouterForm(E, K, score="sigmoid", scale=2.5, groups=4, topk_groups=2),
    "chosen": RouterForm(E, K, score="chosen"),
}
OPS = torch.ops.raymoe


@pytest.fixture
def world() -> Iterator[World]:
    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        yield world


def stack_of(world: World, layers: int = 2) -> nn.Sequential:
    form = LayerForm(ffn=8, router=FORMS["sigmoid"], norm=1e-6, residual=True)
    return nn.Sequential(*[MoELayer(world, SPEC, form, seed=seed) for seed in range(layers)])


def drawn_rows(tokens: int = T, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(seed))


def drawn_ids(tokens: int, seed: int, layers: int = 2) -> torch.Tensor:
    """Draw ids, without a part in any router's choice."""
    scores = torch.rand(layers, tokens, E, generator=torch.Generator().manual_seed(seed))
    return scores.topk(K).indices.to(torch.int16)


def gradients_of(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: local(each.grad).clone() for name, each in model.named_parameters() if each.grad is not None}


# One router.


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_weights_of_recorded_ids_have_the_gradients_of_their_formula(form: RouterForm) -> None:
    logits = torch.randn(5, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    recorded = drawn_ids(5, 2, layers=1)[0]
    recorded[1] = -1

    def weights(logits: torch.Tensor) -> torch.Tensor:
        return replay_route(logits, form, recorded)[1]

    assert torch.autograd.gradcheck(weights, logits)
    ids, replayed = replay_route(logits, form, recorded)
    scores = logits.sigmoid() if form.score == "sigmoid" else logits.exp()
    wanted = scores.gather(1, ids)
    whole = wanted.sum(1, keepdim=True) if form.normalise else scores.sum(1, keepdim=True)
    torch.testing.assert_close(replayed, form.scale * wanted / whole)
    others = torch.arange(5) != 1
    assert torch.equal(ids[others], recorded[others].long())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_operator_of_gpus_does_the_same(form: RouterForm) -> None:
    logits = torch.randn(6, E, generator=torch.Generator().manual_seed(1)).requires_grad_()
    bias = None if form.score == "softmax" else torch.randn(E, generator=torch.Generator().manual_seed(4))
    recorded = drawn_ids(6, 2, layers=1)[0]
    recorded[2] = -1
    fields = form.topk, form.score, form.normalise, form.scale, form.groups, form.topk_groups
    arguments = logits, bias, recorded, *fields
    weights, ids = OPS.replay_route(*arguments)
    wanted_ids, wanted = replay_route(logits, form, recorded, bias)
    assert torch.equal(ids, wanted_ids)
    assert_same_bits(weights, wanted)
    dweights = torch.randn(6, K, generator=torch.Generator().manual_seed(3))
    [gradient], [exactly] = (torch.autograd.grad(each, logits, dweights) for each in (weights, wanted))
    torch.testing.assert_close(gradient, exactly)
    torch.library.opcheck(OPS.replay_route, arguments)
    torch.library.opcheck(OPS.record_route, (torch.zeros(9, K, dtype=torch.int16), torch.zeros(1).long(), ids))
    torch.library.opcheck(OPS.count_route, (torch.zeros(E).long(), ids))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_ids_of_the_choice_itself_give_the_same_bits(dtype: torch.dtype) -> None:
    for form in FORMS.values():
        router = Router(form, torch.randn(E, H, generator=torch.Generator().manual_seed(1)))
        routed = router(drawn_rows())
        again = router(drawn_rows(), routed.topk_idx.to(dtype))
        assert torch.equal(routed.topk_idx, again.topk_idx)
        assert_same_bits(routed.topk_weights, again.topk_weights)


# Layers.


def test_a_replay_of_its_own_routes_has_the_same_bits(world: World) -> None:
    model, x = stack_of(world), drawn_rows()
    with record_routes(model, tokens=T) as routes:
        y = model(x)
    wanted = gradients_of(model, y.square().sum())
    ids = pickle.loads(pickle.dumps(routes.ids()))
    assert (ids.dtype, ids.shape, ids.device.type) == (torch.int16, (2, T, K), "cpu")
    with replay_routes(model, ids), record_routes(model, tokens=T) as again:
        replayed = model(x)
        gradients = gradients_of(model, replayed.square().sum())
    assert_same_bits(y.detach(), replayed.detach())
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert_same_bits(gradient, wanted[name])
    assert torch.equal(again.ids(), ids)


def test_other_routes_are_taken_and_their_gradients_reach_the_router(world: World) -> None:
    model, x, ids = stack_of(world), drawn_rows(), drawn_ids(T, 5)
    live = model(x)
    with replay_routes(model, ids), record_routes(model, tokens=T) as routes:
        y = model(x)
        gradients = gradients_of(model, y.square().sum())
    assert torch.equal(routes.ids(), ids) and not torch.equal(y, live)
    layer: Any = model[0]
    h = layer.norm(x)
    chosen = layer.gate(h, ids[0])
    wanted = layer.apply_experts(h, chosen.topk_idx, chosen.topk_weights, x)
    assert_same_bits(layer(x, recorded=ids[0]), wanted)
    assert all(bool(gradients[f"{index}.gate.weight"].abs().max() > 1e-3) for index in (0, 1))
    assert_same_bits(model(x), live)  # the context has ended


def test_tokens_that_were_not_recorded_are_routed_live(world: World) -> None:
    model, x, ids = stack_of(world, layers=1), drawn_rows(), drawn_ids(T, 5, layers=1)
    layer: Any = model[0]
    live = layer.gate(layer.norm(x)).topk_idx
    ids[0, 3:6] = -1
    ids[0, 7, 1] = -1  # one id is enough
    with replay_routes(model, ids), record_routes(model, tokens=T) as routes:
        model(x)
    left_out = torch.zeros(T, dtype=torch.bool)
    left_out[[3, 4, 5, 7]] = True
    assert torch.equal(routes.ids()[0], torch.where(left_out[:, None], live, ids[0].long()).to(torch.int16))


def test_an_id_out_of_range_is_refused_by_the_dispatch(world: World) -> None:
    model, x, ids = stack_of(world), drawn_rows(), drawn_ids(T, 5)
    y, wrong = model(x), ids.clone()
    wrong[0, 4, 1] = E
    with replay_routes(model, wrong), pytest.raises(DataRefused, match=str(E)):
        model(x)
    assert_same_bits(model(x), y)


def test_calls_follow_one_another_until_the_routes_are_cleared(world: World) -> None:
    model = stack_of(world)
    with record_routes(model, tokens=T) as routes:
        model(drawn_rows(5))
        model(drawn_rows(4, seed=1))
        whole = routes.ids()
        routes.clear()
        model(drawn_rows(4, seed=1))
    assert whole.shape == (2, 9, K) and torch.equal(whole[:, 5:], routes.ids())


def test_the_load_is_counted_over_calls(world: World) -> None:
    model = stack_of(world)
    with count_routes(model) as counted, record_routes(model, tokens=T) as routes:
        for seed in range(2):
            model(drawn_rows(5, seed))
    model(drawn_rows())
    wanted = torch.stack([expert_load(layer.long(), E) for layer in routes.ids()])
    assert torch.equal(counted.load(), wanted) and int(wanted.sum()) == 2 * 10 * K
    counted.clear()
    assert int(counted.load().sum()) == 0


# Forward passes that are repeated.


def repeated(model: nn.Module, x: torch.Tensor, reentrant: bool, **options: Any) -> torch.Tensor:
    for layer in model.children():
        x = checkpoint(layer, x, use_reentrant=reentrant, **options)
    return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_repeated_forward_pass_takes_the_same_routes_and_is_not_recorded_again(world: World, reentrant: bool) -> None:
    model, x, ids = stack_of(world), drawn_rows().requires_grad_(), drawn_ids(T, 5)
    with replay_routes(model, ids):
        wanted = gradients_of(model, model(x).square().sum())
        with record_routes(model, tokens=T) as routes, count_routes(model) as counted:
            gradients = gradients_of(model, repeated(model, x, reentrant).square().sum())
    assert torch.equal(routes.ids(), ids) and int(counted.load().sum()) == 2 * T * K
    for name, gradient in gradients.items():  # of the loss of a pass without gradients, whose bits may differ
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-4)
        assert reentrant or same_bits(gradient, wanted[name])


def test_a_repeated_forward_pass_without_its_routes_is_an_error(world: World) -> None:
    model, x = stack_of(world), drawn_rows().requires_grad_()
    with replay_routes(model, drawn_ids(T, 5)):
        y = repeated(model, x, reentrant=False)
    with pytest.raises(ConfigError, match="repeats a forward pass after its replay_routes has ended"):
        y.sum().backward()
    repeated(model, x, reentrant=False).sum().backward()  # the routes of this pass are the router's own


def test_micro_batches_of_a_pipeline_keep_their_routes(world: World) -> None:
    """Forward passes of three micro-batches, then backward passes, first in, first out."""
    model, batches = stack_of(world), [drawn_rows(T, seed).requires_grad_() for seed in range(3)]
    routes = [drawn_ids(T, seed) for seed in (7, 8, 9)]

    def run(forward: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        losses = []
        for x, ids in zip(batches, routes, strict=True):
            with replay_routes(model, ids):
                losses.append(forward(x).square().sum())
        gradients = [gradients_of(model, loss) for loss in losses]
        return {f"{place}.{name}": each for place, of in enumerate(gradients) for name, each in of.items()}

    wanted = run(model)
    same = functools.partial(same_routes, model)
    found = run(lambda x: repeated(model, x, reentrant=False, context_fn=same))
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert_same_bits(gradient, wanted[name])


def test_routes_are_recorded_and_replayed_by_compiled_functions() -> None:
    """Compiled before the first recording, whole, and once for each of: neither, recorded, replayed."""
    torch.compiler.reset()
    router, graphs = Router(FORMS["sigmoid"], drawn_rows(E, seed=3)), []

    def counting(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routed = router(x)
        return routed.topk_idx, routed.topk_weights

    compiled = torch.compile(step, backend=counting, fullgraph=True, dynamic=False)
    x = drawn_rows()
    compiled(x)
    for seed in range(3):
        ids = drawn_ids(T, seed, layers=1)
        with record_routes(router, tokens=2 * T) as routes, count_routes(router) as counted:
            live = compiled(x)[0]
            compiled(x)
        assert torch.equal(routes.ids()[0], torch.cat((live, live)).to(torch.int16))
        assert torch.equal(counted.load()[0], 2 * expert_load(live, E))
        with replay_routes(router, ids) as replayed:
            assert torch.equal(compiled(x)[0], ids[0].long())
            replayed.load(ids.flip(1))
            found, weights = compiled(x)
            assert torch.equal(found, ids[0].flip(0).long())
            assert_same_bits(weights, step(x)[1])
    assert len(graphs) == 3


@pytest.mark.thorough
def test_inductor_records_and_replays_with_gradients(world: World) -> None:
    torch.compiler.reset()
    model, x, ids = stack_of(world), drawn_rows().requires_grad_(), drawn_ids(T, 5)
    with replay_routes(model, ids):
        wanted = gradients_of(model, model(x).square().sum())
    compiled: Any = torch.compile(model, fullgraph=True)
    for way in (compiled, lambda x: checkpoint(compiled, x, use_reentrant=False)):
        with replay_routes(model, ids), record_routes(model, tokens=T) as routes:
            gradients = gradients_of(model, way(x).square().sum())
        assert torch.equal(routes.ids(), ids)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-4)


# Two ranks: a rollout with no gradients and few tokens at a time, and a trainer with all of them.


def rollout_and_training(world: World) -> dict[str, Any]:
    engine, trainer = stack_of(world), stack_of(world)
    with torch.no_grad():
        for layer in trainer:
            layer.gate.weight += 0.1 * torch.randn(E, H, generator=torch.Generator().manual_seed(9))
    x = drawn_rows(T, seed=world.rank)
    with torch.no_grad(), record_routes(engine, tokens=T) as routes:
        for part in x.split(4):
            engine(part)
    ids = routes.ids()
    with record_routes(trainer, tokens=T) as own, torch.no_grad():
        trainer(x)
    with replay_routes(trainer, ids), record_routes(trainer, tokens=T) as taken:
        gradients = gradients_of(trainer, trainer(x).square().sum())
    return {
        "changed": int((own.ids() != ids).any(-1).sum()),
        "taken": torch.equal(taken.ids(), ids),
        "reached": all(bool(gradients[f"{place}.gate.weight"].abs().max() > 1e-3) for place in (0, 1)),
    }


def test_a_trainer_takes_the_routes_of_an_engine(pool: RankPool) -> None:
    for found in pool.run(2, rollout_and_training):
        assert found["changed"] > 0 and found["taken"] and found["reached"]


# Mistakes.


def test_mistakes_are_told() -> None:
    router = Router(FORMS["softmax"], drawn_rows(E))
    with pytest.raises(ConfigError, match="tokens=0; give the most tokens"), record_routes(router, tokens=0):
        pass
    with record_routes(router, tokens=4) as routes:
        with pytest.raises(ConfigError, match="recorded already"), record_routes(router, tokens=4):
            pass
        router(drawn_rows(5))
        with pytest.raises(ConfigError, match="5 tokens came and routes of 4 were recorded"):
            routes.ids()
    with count_routes(router), pytest.raises(ConfigError, match="counted already"), count_routes(router):
        pass
    with pytest.raises(ConfigError, match="a Linear, which has no router"), record_routes(nn.Linear(2, 2), tokens=4):
        pass
    for ids, says in (
        (torch.zeros(1, 4, K), "are torch.float32"),
        (torch.zeros(4, K).long(), r"integers \[layers, tokens, topk\]"),
        (torch.zeros(2, 4, K).long(), "a model of 1 routers that choose 2 experts"),
    ):
        with pytest.raises(ConfigError, match=says), replay_routes(router, ids):
            pass
    with replay_routes(router, torch.zeros(1, 4, K).long()) as replayed:
        with pytest.raises(ConfigError, match=r"routes \[4, 2\] for 5 tokens of top-2"):
            router(drawn_rows(5))
        with pytest.raises(ConfigError, match="sizes stay"):
            replayed.load(torch.zeros(1, 5, K).long())
    two = nn.ModuleList([router, Router(RouterForm(E, 1), drawn_rows(E))])
    with pytest.raises(ConfigError, match=r"routers choose \[1, 2\] experts"), record_routes(two, tokens=4):
        pass


def test_layers_that_saw_other_tokens_have_no_common_routes() -> None:
    routers = nn.ModuleList([Router(FORMS["softmax"], drawn_rows(E)) for _ in range(3)])
    with record_routes(routers, tokens=8) as routes:
        routers[0](drawn_rows(5))
        assert bool((routes.ids()[1:] == -1).all())
        routers[2](drawn_rows(4))
        with pytest.raises(ConfigError, match=r"called with \[4, 5\] tokens"):
            routes.ids()


def test_read_only_arrays_are_taken() -> None:
    """Ray gives such arrays."""
    router, ids = Router(FORMS["softmax"], drawn_rows(E)), numpy.zeros((1, 3, K), dtype=numpy.int16)
    ids[0, :, 1] = 3
    ids.flags.writeable = False
    with replay_routes(router, ids):
        assert router(drawn_rows(3)).topk_idx.tolist() == [[0, 3]] * 3
