"""New weights in layers that are in use: whole or not at all, on all ranks, and never beside old ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raymoe.errors import ConfigError, RaymoeError, WeightsMissing, WiringError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer, RouterForm, load_weights, loading, offer_weights, open_weights
from raymoe.moe.experts import local
from raymoe.moe.live_weights import Loading
from tests.unit.moe.bits import assert_same_bits, same_bits
from tests.unit.ranks import RankPool
from tests.unit.worlds import close, each, wired

H, F, E, K, T = 16, 8, 8, 2, 12
SPEC = ExchangeSpec(tokens=T, hidden=H, experts=E, topk=K, dtype="float32", depth=0)
FORM = LayerForm(ffn=F, router=RouterForm(E, K, score="sigmoid"), shared=4, norm=1e-6, residual=True, biases=True)


@pytest.fixture
def world() -> Iterator[World]:
    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        yield world


def layer_of(world: World, seed: int, spec: ExchangeSpec = SPEC) -> MoELayer:
    layer = MoELayer(world, spec, FORM, seed=seed)
    with torch.no_grad():
        layer.gate.e_score_correction_bias += seed
    return layer


def stack_of(world: World, seed: int) -> nn.Sequential:
    return nn.Sequential(layer_of(world, seed), nn.Linear(H, H), layer_of(world, seed + 1))


def rows(seed: int = 7) -> Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(seed))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: local(tensor.detach()).clone() for name, tensor in tensors.items()}


def whole_weights(seed: int) -> dict[str, Tensor]:
    """The weights of a layer with the experts of all ranks."""
    with World.open(rank=0, size=1) as alone:
        alone.wire([alone.descriptor()])
        return weights_of(layer_of(alone, seed))


def assert_has(model: nn.Module, weights: dict[str, Tensor]) -> None:
    now = weights_of(model)
    assert now.keys() == weights.keys()
    for name, tensor in now.items():
        assert_same_bits(tensor, weights[name])


# On one rank.


def test_new_weights_are_in_the_memory_of_the_old(world: World) -> None:
    layer, other = layer_of(world, 1), layer_of(world, 2)
    addresses = [each.data_ptr() for each in layer.parameters()]
    assert layer.load(weights_of(other)) == 1
    assert_has(layer, weights_of(other))
    assert [each.data_ptr() for each in layer.parameters()] == addresses
    assert_same_bits(layer(rows()), other(rows()))
    assert layer.load(weights_of(other)) == layer.experts.epoch == 2


def test_a_model_is_loaded_at_once_with_layers_that_are_not_of_raymoe(world: World) -> None:
    model, other = stack_of(world, 1), stack_of(world, 5)
    before = weights_of(model)
    with loading(model) as weights:
        weights.load(weights_of(other))
        assert_has(model, before)
    assert_has(model, weights_of(other))
    load_weights(model, before)
    assert_has(model, before)
    with pytest.raises(ConfigError, match="a Linear whose layers of raymoe have 0 worlds"):
        load_weights(model[1], {})


def slices_of(name: str, new: Tensor) -> Iterator[tuple[Tensor, Any]]:
    """Cut a parameter of experts into quarters of two dimensions, which come out of order."""
    if new.dim() != 3:
        yield new, None
        return
    for a in (new.shape[1] // 2, 0):
        for b in (0, new.shape[2] // 2):
            yield new[:, a : a + new.shape[1] // 2, b : b + new.shape[2] // 2], (a, b)


COMPILED = pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["eager", "compiled"]
)
"""torch.compile takes seconds."""


@COMPILED
def test_pieces_take_effect_together_and_passes_before_read_old_weights(world: World, is_compiled: bool) -> None:
    layer, other = layer_of(world, 1), layer_of(world, 2)
    run = torch.compile(layer, backend="eager") if is_compiled else layer
    old, new, wanted = layer(rows()), weights_of(other), other(rows())
    assert_same_bits(run(rows()), old)
    scratch = torch.empty(4096)  # as the memory of messages: each piece overwrites the last one
    with layer.loading() as weights:
        for name, tensor in new.items():
            for part, at in slices_of(name, tensor):
                message = scratch[: part.numel()].view(part.shape)
                message.copy_(part)
                weights.load(message, name, at=at)
                assert_same_bits(run(rows()), old)
    assert_has(layer, new)
    assert_same_bits(run(rows()), wanted)


WRONG = {
    "a name": (
        {"experts.gate_up": torch.zeros(1)},
        {},
        "no parameter is named 'experts.gate_up'; there are .*down_proj",
    ),
    "a dtype": ({"gate.weight": torch.zeros(E, H, dtype=torch.bfloat16)}, {}, "gate.weight is torch.float32 and was"),
    "a shape": ({"gate.weight": torch.zeros(E, H + 1)}, {}, r"gate.weight was given \[8, 17\], and it has \[8, 16\]"),
    "a dimension": ({"gate.weight": torch.zeros(E)}, {}, r"gate.weight has shape \[8, 16\] and was given \[8\]"),
    "a number of experts": ({"experts.down_proj": torch.zeros(3, H, F)}, {}, "was given 3 experts; without experts="),
    "an expert twice": ({"experts.down_proj": torch.zeros(2, H, F)}, {"experts": [1, 1]}, "each has one of its own"),
    "an expert too many": ({"experts.down_proj": torch.zeros(1, H, F)}, {"experts": [E]}, "from 0 to 7"),
    "an expert's shape": ({"experts.down_proj": torch.zeros(E, F, H)}, {}, r"and an expert has \[16, 8\]"),
}


@pytest.mark.parametrize(("given", "options", "says"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_named_and_nothing_changes(
    world: World, given: dict[str, Tensor], options: dict[str, Any], says: str
) -> None:
    layer = layer_of(world, 1)
    before = weights_of(layer)
    with pytest.raises(ConfigError, match=says):
        layer.load(weights_of(layer_of(world, 2)) | given, **options)
    assert_has(layer, before)
    assert layer.experts.epoch == 0


def test_slices_outside_or_twice_are_refused(world: World) -> None:
    layer = layer_of(world, 1)
    before = weights_of(layer)
    for at, says in (
        ((9, 0), r"was given \[8, 8\] from \[9, 0\] on"),
        ((7, 0), "a part of experts.down_proj was given"),
    ):
        with pytest.raises(ConfigError, match=says), layer.loading() as weights:
            weights.load(torch.zeros(E, 8, F), "experts.down_proj", at=(0, 0))
            weights.load(torch.zeros(E, 8, F), "experts.down_proj", at=at)
    assert_has(layer, before)


def test_half_of_the_weights_is_refused_unless_partial(world: World) -> None:
    layer, new = layer_of(world, 1), weights_of(layer_of(world, 2))
    before = weights_of(layer)
    half = new["experts.down_proj"][: E // 2]
    with pytest.raises(ConfigError, match=r"weights lack .*experts.down_proj \(512 of 1024 numbers\)"):
        layer.load({"experts.down_proj": half}, experts=range(E // 2))
    with pytest.raises(ConfigError, match=r"weights lack gate\.weight: old numbers would stay beside new ones"):
        layer.load({name: tensor for name, tensor in new.items() if name != "gate.weight"})
    assert_has(layer, before)
    layer.load({"experts.down_proj": half}, experts=range(E // 2), partial=True)
    before["experts.down_proj"][: E // 2] = half
    assert_has(layer, before)


def test_an_error_inside_changes_nothing(world: World) -> None:
    layer, new = layer_of(world, 1), weights_of(layer_of(world, 2))
    before = weights_of(layer)
    with pytest.raises(KeyError, match="oh"), layer.loading() as weights:
        weights.load(new)
        raise KeyError("oh")
    assert_has(layer, before)


def test_a_load_during_a_load_is_refused(world: World) -> None:
    layer, new = layer_of(world, 1), weights_of(layer_of(world, 2))
    with pytest.raises(ConfigError, match=r"weights \{0\} were loaded anew"), layer.loading() as weights:
        weights.load(new)
        layer.load(new)


def test_weights_of_another_dtype_are_rounded_on_demand(world: World) -> None:
    spec = dataclasses.replace(SPEC, dtype="bfloat16")
    layer = MoELayer(world, spec, LayerForm(ffn=F), seed=1)
    wide = {
        name: torch.randn(each.shape, generator=torch.Generator().manual_seed(3))
        for name, each in layer.named_parameters()
    }
    with pytest.raises(ConfigError, match=r"is torch\.bfloat16 and was given torch\.float32; cast=True rounds it"):
        layer.load(wide)
    layer.load(wide, cast=True)
    assert_has(layer, {name: tensor.bfloat16() for name, tensor in wide.items()})


def test_float32_weights_are_cast_anew_after_a_load(world: World) -> None:
    spec = dataclasses.replace(SPEC, dtype="bfloat16")
    layer, other = (MoELayer(world, spec, LayerForm(ffn=F, weights="float32"), seed=seed) for seed in (1, 2))
    layer(rows().bfloat16())
    layer.load(weights_of(other))
    assert_same_bits(layer(rows().bfloat16()), other(rows().bfloat16()))


def test_a_load_in_the_middle_of_a_step_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, new = layer_of(world, 1), weights_of(layer_of(world, 2))
    before = weights_of(layer)
    monkeypatch.setattr(type(layer.exchange), "in_flight", "dispatch_send")  # of GPU ranks alone
    with pytest.raises(ConfigError, match="while dispatch_send is in flight; let it end first"):
        layer.load(new)
    assert_has(layer, before)


def test_a_backward_pass_over_old_and_new_weights_is_refused(world: World) -> None:
    layer = layer_of(world, 1)
    loss = layer(rows()).square().sum()
    layer.load(weights_of(layer_of(world, 2)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Bugs that these tests must find.


def write_at_once(load: Loading, to: Tensor, values: Tensor) -> None:
    to.copy_(values)


def all_but_the_last(load: Loading) -> None:
    with torch.no_grad():
        for each_copy in load._copies[:-1]:
            each_copy.to.copy_(each_copy.values)


INJECTED = {
    "half of the weights is taken": (
        "_check_whole",
        lambda _: None,
        test_half_of_the_weights_is_refused_unless_partial,
    ),
    "a piece is written at once": ("_copy", write_at_once, test_an_error_inside_changes_nothing),
    "a piece is forgotten": ("_copy_all", all_but_the_last, test_new_weights_are_in_the_memory_of_the_old),
}


@pytest.mark.parametrize(("method", "bug", "test"), INJECTED.values(), ids=INJECTED)
def test_injected_bugs_are_found(
    world: World, monkeypatch: pytest.MonkeyPatch, method: str, bug: Any, test: Callable[[World], None]
) -> None:
    monkeypatch.setattr(Loading, method, bug)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(world)


# On two ranks.


def load_on_a_rank(world: World, new: dict[str, Tensor]) -> dict[str, Tensor]:
    layer = layer_of(world, 1)
    layer(rows())
    with layer.loading() as weights:
        order = [5, 6, 7, 2, 0, 1, 3, 4]
        for name, tensor in new.items():
            if name.startswith("experts."):
                weights.load(tensor[order[:5]], name, experts=order[:5])
                weights.load(tensor[order[5:]], name, experts=order[5:])
            else:
                weights.load(tensor, name)
    return weights_of(layer) | {"y": layer(rows(world.rank)).detach()}


def test_each_rank_takes_its_own_experts(pool: RankPool, world: World) -> None:
    new = whole_weights(2)
    ranks = pool.run(2, load_on_a_rank, new)
    for rank, loaded in enumerate(ranks):
        torch.testing.assert_close(loaded.pop("y"), layer_of(world, 2)(rows(rank)).detach())
        for name, tensor in loaded.items():
            own = slice(rank * E // 2, (rank + 1) * E // 2)
            assert_same_bits(tensor, new[name][own] if name.startswith("experts.") else new[name])


def load_where_one_lacks(world: World, new: dict[str, Tensor]) -> tuple[str, bool, bool]:
    layer = layer_of(world, 1)
    before, y = weights_of(layer), layer(rows())
    given = {name: tensor for name, tensor in new.items() if world.rank == 0 or name != "norm.weight"}
    try:
        layer.load(given)
    except ConfigError as error:
        now = weights_of(layer)
        return str(error), all(same_bits(now[name], before[name]) for name in now), same_bits(layer(rows()), y)
    return "loaded", False, False


def test_if_one_rank_cannot_load_none_does(pool: RankPool) -> None:
    (first, *kept), (second, *also_kept) = pool.run(2, load_where_one_lacks, whole_weights(2))
    assert second.startswith("weights lack norm.weight")
    assert first == f"weights were not loaded, because of rank 1: {second}"
    assert kept == also_kept == [True, True]


def load_with_a_copy_that_fails(world: World, new: dict[str, Tensor], is_compiled: bool) -> list[str]:
    """Rank 1 fails between two copies. Then both load again."""
    layer, says = layer_of(world, 1), []
    run = torch.compile(layer, backend="eager") if is_compiled else layer
    run(rows())
    copy_all = Loading._copy_all

    def fails(load: Loading) -> None:
        del load._copies[1:]
        copy_all(load)
        raise RuntimeError("the driver failed")

    Loading._copy_all = fails if world.rank == 1 else copy_all  # type: ignore[method-assign]
    try:
        layer.load(new)
    except (RuntimeError, WeightsMissing) as error:
        says.append(f"{type(error).__name__}: {error}")
    finally:
        Loading._copy_all = copy_all  # type: ignore[method-assign]
    try:
        run(rows())
    except RaymoeError as error:
        says.append(f"{type(error).__name__}: {error}")
    layer.load(new)
    return [*says, str(bool(torch.isfinite(run(rows())).all()))]


@COMPILED
def test_half_loaded_weights_are_refused_on_all_ranks_until_they_are_loaded(pool: RankPool, is_compiled: bool) -> None:
    first, second = pool.run(2, load_with_a_copy_that_fails, whole_weights(2), is_compiled)
    assert first[0] == "WeightsMissing: weights are half loaded, because of rank 1: the driver failed"
    assert second[0] == "RuntimeError: the driver failed"
    for rank, says in enumerate((first, second)):
        refused = f"WeightsMissing: rank {rank} has no values of gate.weight, gate.e_score_correction_bias, experts."
        assert says[1].startswith(refused) and says[2:] == ["True"], says


def load_where_one_rank_is_a_step_ahead(outer: World, new: dict[str, Tensor]) -> str:
    world = World.open(outer.rank, outer.size, name="ahead", timeout_s=1.0)
    world.wire([dict(other) for other in outer.swap(world.descriptor(), "ahead")])  # type: ignore[call-overload]
    layer = layer_of(world, 1)
    before = weights_of(layer)
    try:
        if world.rank == 1:
            layer(rows())
        layer.load(new)
    except RaymoeError as error:
        now = weights_of(layer)
        outcome = f"{type(error).__name__} {all(same_bits(now[name], before[name]) for name in now)}"
    else:
        outcome = "loaded"
    world.close(together=False)
    outer.barrier("ended")
    return outcome


def test_ranks_that_load_between_different_steps_end_in_an_error_with_old_weights(pool: RankPool) -> None:
    outcomes = pool.run(2, load_where_one_rank_is_a_step_ahead, whole_weights(2))
    assert all(outcome in ("PeerTimeout True", "Aborted True") for outcome in outcomes), outcomes


def load_other_epochs(world: World, new: dict[str, Tensor]) -> str:
    layer = layer_of(world, 1)
    with pytest.raises(ConfigError, match=r"epochs \[3, 4\]"), layer.loading() as weights:
        weights.load(new)
        weights.epoch = 3 + world.rank
    return "refused"


def test_ranks_load_one_epoch(pool: RankPool) -> None:
    assert pool.run(2, load_other_epochs, whole_weights(2)) == ["refused"] * 2


# From the ranks of another world.


@pytest.mark.parametrize(("trainers", "engines"), [(1, 2), (2, 1), (2, 4)])
def test_an_engine_loads_what_a_trainer_with_other_ranks_offers(trainers: int, engines: int) -> None:
    train, serve = wired(trainers, "train"), wired(engines, "serve")
    try:
        offers = each(train, lambda world: offer_weights(layer_of(world, 2), readers=engines))
        descriptors = [offer.descriptor() for offer in offers]
        assert sum("gate.weight" in str(descriptor["weights"]) for descriptor in descriptors) == 1
        new = whole_weights(2)

        def load(world: World) -> tuple[dict[str, Tensor], int]:
            layer = layer_of(world, 1)
            with open_weights(world, descriptors) as opened:
                return weights_of(layer), layer.load(opened)

        early = each(serve, load)
        assert all("have published" in str(error) for error in early), early
        assert each(train, lambda world: offers[world.rank].publish()) == [1] * trainers
        assert each(train, lambda world: offers[world.rank].publish()) == [2] * trainers

        def load_and_look(world: World) -> dict[str, Tensor]:
            layer = layer_of(world, 1)
            with open_weights(world, descriptors) as opened:
                assert layer.load(opened) == 2
            return weights_of(layer)

        for rank, loaded in enumerate(each(serve, load_and_look)):
            assert isinstance(loaded, dict), loaded
            for name, tensor in loaded.items():
                own = slice(rank * E // engines, (rank + 1) * E // engines)
                assert_same_bits(tensor, new[name][own] if name.startswith("experts.") else new[name])
        each(train, lambda world: offers[world.rank].close())
    finally:
        close(train)
        close(serve)


PLACED = torch.tensor([[0, 3, 5, -1, 7], [1, 2, 3, 4, 6]], dtype=torch.int32)
"""Eight experts in ten slots: a copy of expert 3, and an empty slot."""
MOVED = torch.tensor([[6, 3, 5, 2, 7], [1, 2, -1, 4, 0]], dtype=torch.int32)


def test_copies_of_experts_are_offered_once_and_loaded_into_every_slot() -> None:
    train, serve = wired(2, "train"), wired(2, "serve")
    slots = dataclasses.replace(SPEC, slots=5)
    try:

        def offer(world: World) -> tuple[MoELayer, Any]:
            layer = layer_of(world, 2, slots)
            layer.place(PLACED)
            offered = offer_weights(layer, readers=2)
            offered.publish()
            return layer, offered

        offers = each(train, offer)
        descriptors = [offered.descriptor() for _, offered in offers]
        new = whole_weights(2)

        def load(world: World) -> dict[str, Tensor]:
            layer = layer_of(world, 1, slots)
            layer.place(MOVED)
            with open_weights(world, descriptors) as opened:
                layer.load(opened)
            return weights_of(layer)

        for rank, loaded in enumerate(each(serve, load)):
            assert isinstance(loaded, dict), loaded
            for name, tensor in loaded.items():
                if name.startswith("experts."):
                    for place, expert in enumerate(MOVED[rank].tolist()):
                        assert expert < 0 or same_bits(tensor[place], new[name][expert]), (rank, name, place)
                else:
                    assert_same_bits(tensor, new[name])

        def move(world: World) -> None:
            layer, offered = offers[world.rank]
            layer.place(MOVED)
            offered.publish()

        assert all("since their weights were offered" in str(error) for error in each(train, move))
        each(train, lambda world: offers[world.rank][1].close())
    finally:
        close(train)
        close(serve)


def test_copies_of_an_expert_on_one_rank_are_all_loaded(world: World) -> None:
    spec, new = dataclasses.replace(SPEC, slots=E + 2), whole_weights(2)
    held = [3, 0, 1, 2, 3, 4, 5, 6, 7, 3]
    layer, trainer = layer_of(world, 1, spec), layer_of(world, 2, spec)
    layer.place(torch.tensor([held], dtype=torch.int32))
    before = weights_of(layer)
    layer.load(new)
    for name in ("gate_up_proj", "down_proj", "down_proj_bias"):
        assert_same_bits(weights_of(layer)[f"experts.{name}"], new[f"experts.{name}"][held])
    layer.load(before)
    assert_has(layer, before)
    trainer.place(torch.tensor([[7, 7, 6, 5, 4, 3, 2, 1, 0, 0]], dtype=torch.int32))
    with offer_weights(trainer, readers=1) as offered, open_weights(world, [offered.descriptor()]) as opened:
        offered.publish()
        layer.load(opened)
    assert_same_bits(weights_of(layer)["experts.down_proj"], new["experts.down_proj"][held])


def test_all_experts_or_those_in_the_slots_must_be_said_where_both_fit(world: World) -> None:
    layer, new = layer_of(world, 1, dataclasses.replace(SPEC, slots=E)), whole_weights(2)
    held = [7, 6, 5, 4, 3, 2, 1, 0]
    layer.load(new)
    layer.place(torch.tensor([held], dtype=torch.int32))
    with pytest.raises(ConfigError, match="may be all of them or those in the slots of this rank"):
        layer.load(new)
    layer.load(new, experts=range(E))
    assert_same_bits(weights_of(layer)["experts.down_proj"], new["experts.down_proj"][held])


def test_a_placement_in_the_middle_of_a_load_is_refused() -> None:
    worlds = wired(2, "placed")
    try:
        new = whole_weights(2)

        def load(world: World) -> dict[str, Tensor]:
            layer = layer_of(world, 1, dataclasses.replace(SPEC, slots=5))
            layer.place(PLACED)
            with pytest.raises(ConfigError, match="moved to other slots while"), layer.loading() as weights:
                weights.load(new)
                layer.place(MOVED)
            layer.load(new)
            return weights_of(layer)

        for rank, loaded in enumerate(each(worlds, load)):
            assert isinstance(loaded, dict), loaded
            down = loaded["experts.down_proj"]
            for place, expert in enumerate(MOVED[rank].tolist()):
                assert expert < 0 or same_bits(down[place], new["experts.down_proj"][expert])
    finally:
        close(worlds)


def world_of_some(outer: World, ranks: range, name: str) -> World | None:
    """Make a world of some of the processes."""
    world = World.open(ranks.index(outer.rank), len(ranks), name=name, timeout_s=20.0) if outer.rank in ranks else None
    theirs: list[Any] = outer.swap(world and world.descriptor(), f"descriptors of {name}")
    if world is not None:
        world.wire([theirs[rank] for rank in ranks])
    return world


def train_or_serve(outer: World, seeds: list[int]) -> list[dict[str, Tensor]]:
    """Process 0 trains, the two others serve. Return what those have loaded."""
    train, serve = world_of_some(outer, range(1), "train"), world_of_some(outer, range(1, 3), "serve")
    own = train or serve
    assert own is not None
    with own:
        layer, loaded = layer_of(own, 1), []
        offered = offer_weights(layer, readers=2) if train is not None else None
        offer: Any = outer.swap(offered and offered.descriptor(), "offer")[0]
        opened = open_weights(own, [offer]) if serve is not None else None
        for seed in seeds:
            if offered is not None:
                layer.load(weights_of(layer_of(own, seed)))
                offered.publish()
            outer.barrier("published")
            if opened is not None:
                layer.load(opened)
                loaded.append(weights_of(layer))
        if opened is not None:
            opened.close()
        if offered is not None:
            offered.close()
    return loaded


def test_offers_cross_processes(pool: RankPool) -> None:
    seeds = [2, 3]
    _, *engines = pool.run(3, train_or_serve, seeds)
    for rank, loads in enumerate(engines):
        for seed, loaded in zip(seeds, loads, strict=True):
            for name, tensor in whole_weights(seed).items():
                own = slice(rank * E // 2, (rank + 1) * E // 2)
                assert_same_bits(loaded[name], tensor[own] if name.startswith("experts.") else tensor)


def test_weights_of_two_publications_are_not_mixed(world: World) -> None:
    train = wired(2, "train")
    try:
        offers = each(train, lambda each_world: offer_weights(layer_of(each_world, 2), readers=1))
        layer = layer_of(world, 1)
        before = weights_of(layer)
        each(train, lambda each_world: offers[each_world.rank].publish())
        offers[0].publish()
        with open_weights(world, [offer.descriptor() for offer in offers]) as opened:
            with pytest.raises(ConfigError, match=r"have published \[2, 1\] times; all publish before a load"):
                layer.load(opened)
            assert_has(layer, before)
            offers[1].publish()
            assert layer.load(opened) == 2
        for offer in offers:
            offer.close()
    finally:
        close(train)


def test_a_publication_waits_for_readers_and_readers_wait_for_it(world: World) -> None:
    with World.open(rank=0, size=1, timeout_s=0.2) as train:
        train.wire([train.descriptor()])
        with offer_weights(layer_of(train, 2), readers=1) as offer, open_weights(world, [offer.descriptor()]) as opened:
            offer.publish()
            with opened.reading() as (epoch, pieces):
                assert epoch == 1
                first = next(iter(pieces))
                with pytest.raises(RaymoeError, match=r"publish waited 0.0 s for readers \[0\]"):
                    offer.publish(timeout_s=0.0)
                assert first.values.isfinite().all()
            assert offer.publish() == 2
            offer._memory.words.words("epoch")[0] = 5  # as an owner that ended while it wrote
            world.timeout_s = 0.0
            with pytest.raises(RaymoeError, match="for weights that rank 0 of their owners writes"):
                layer_of(world, 1).load(opened)
            offer._memory.words.words("epoch")[0] = 4


def test_offers_are_those_of_all_ranks_in_order(world: World) -> None:
    with offer_weights(layer_of(world, 2), readers=1) as offer:
        good = offer.descriptor()
        for wrong, says in (
            ([], "no offers were given"),
            ([good | {"size": 2}], "of rank 0 of 2; give those of all ranks"),
            ([good | {"readers": 3}], "offered to 3 readers; this world has 1 ranks"),
        ):
            with pytest.raises(ConfigError, match=says):
                open_weights(world, wrong)
    with pytest.raises(WiringError):  # after its close nobody can map an offer
        open_weights(world, [good])
    with pytest.raises(ConfigError, match="readers is 0"):
        offer_weights(layer_of(world, 2), readers=0)
