"""Layers that keep a row of each token in the place of the dispatched rows: the same bits, from fewer kept bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.exchange.backend import EntryPlaces, Tokens
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer, kept_rows
from raymoe.moe.activation import GPT_OSS
from raymoe.moe.differentiable import dispatch, expert_major
from raymoe.moe.expert_kernels import Places
from raymoe.moe.expert_rows import Groups
from raymoe.moe.experts import local
from raymoe.moe.kept_rows import KeptRowsCopy
from tests.emulator.build import Change, compiler
from tests.emulator.machine import Emulator, EmulatorError
from tests.emulator.ranks import backend, workspaces
from tests.unit.moe.bits import assert_same_bits
from tests.unit.moe.test_recomputed_layers import kept_by
from tests.unit.ranks import RankPool
from tests.unit.rows.emulated_pipe import run_call, tensors_of
from tests.unit.worlds import wired

H, F, T, E, K = 32, 24, 24, 8, 4
SPEC = ExchangeSpec(tokens=T, hidden=H, experts=E, topk=K, depth=0)

# Gradients and memory.


def ids_of(kind: str, tokens: int, rank: int) -> torch.Tensor:
    """Choose K of E experts for tokens: `skew`: the same for all; `few`: none of one rank; `masked`: -1 for some."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(tokens, E // 2 if kind == "few" else E, generator=generator).topk(K).indices
    if kind == "skew":
        return torch.arange(K).expand(tokens, K).contiguous()
    if kind == "masked":
        ids[torch.rand(tokens, K, generator=torch.Generator().manual_seed(9)) < 0.4] = -1
        ids[: tokens // 3] = -1
    return ids


def gradients(layer: MoELayer, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the output, and the gradients of x, of the weights and of the experts."""
    layer.zero_grad()
    generator = torch.Generator().manual_seed(7 + layer.world.rank)
    device, hidden = layer.world.device, layer.exchange.spec.hidden
    drawn = torch.randn(2, len(ids), hidden, generator=generator).bfloat16().to(device)
    x, share = drawn[0].clone().requires_grad_(), torch.rand(ids.shape, generator=generator).to(device).requires_grad_()
    y = layer.apply_experts(x, ids.to(device), share)
    y.backward(drawn[1])
    own = [local(parameter.grad) for parameter in layer.experts.parameters()]
    assert x.grad is not None and share.grad is not None
    return [y.detach(), *(each.clone() for each in (x.grad, share.grad, *own) if each is not None)]


def assert_equal_bits(layer: MoELayer, ids: torch.Tensor) -> None:
    layer.keeps_rows = True
    wanted = gradients(layer, ids)
    layer.keeps_rows = False
    for found, want in zip(gradients(layer, ids), wanted, strict=True):
        assert_same_bits(found, want)


CASES: dict[str, tuple[ExchangeSpec, LayerForm, str, str]] = {
    "gpt_oss, masks": (SPEC, LayerForm(F, activation=GPT_OSS, biases=True), "auto", "masked"),
    "uniform": (SPEC, LayerForm(F, shared=8), "auto", "drawn"),
    "batch, empty experts": (SPEC, LayerForm(F, deterministic="batch"), "auto", "few"),
    "slots": (replace(SPEC, slots=6), LayerForm(F), "auto", "masked"),
    "capacity": (replace(SPEC, capacity=160, alignment=1), LayerForm(F), "auto", "drawn"),
    "layout rank": (replace(SPEC, layout="rank"), LayerForm(F), "auto", "drawn"),
    "float32 weights, skew": (SPEC, LayerForm(F, weights="float32"), "auto", "skew"),
    "activation again": (SPEC, LayerForm(F, recompute="activation"), "auto", "masked"),
    "another backend": (SPEC, LayerForm(F), "allgather", "masked"),
}


def run_case_of_ranks(world: World, name: str) -> None:
    spec, form, backend, kind = CASES[name]
    layer = MoELayer(world, spec, form, backend=backend, seed=1)
    assert not layer.keeps_rows
    for tokens in (T, (5, T)[world.rank], (0, 3)[world.rank]):
        assert_equal_bits(layer, ids_of(kind, tokens, world.rank))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_ragged_ranks_have_the_bits_of_layers_that_keep_all_rows(pool: RankPool, name: str) -> None:
    pool.run(2, run_case_of_ranks, name)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_one_rank_have_the_bits_of_a_layer_that_keeps_all_rows(name: str) -> None:
    (world,) = wired(1)
    with world:
        spec, form, _, kind = CASES[name]
        layer = MoELayer(world, spec if spec.slots is None else replace(spec, slots=9), form, seed=1)
        for tokens in (T, 0):
            assert_equal_bits(layer, ids_of(kind, tokens, 0))


def kept_bytes(world: World) -> tuple[list[int], list[int]]:
    """Return the bytes that a layer keeps with and without its dispatched rows, and what docs/layer.md says."""
    layer = MoELayer(world, SPEC, LayerForm(F, recompute="activation"), seed=1)
    ids, x = ids_of("drawn", T, world.rank), torch.ones(T, H, dtype=torch.bfloat16).requires_grad_()
    weights = {local(each).untyped_storage().data_ptr() for each in layer.parameters()}  # type: ignore[union-attr]
    found = []
    for layer.keeps_rows in (True, False):
        kept = kept_by(lambda: layer.apply_experts(x, ids, torch.rand(T, K)))
        sizes = {at: tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in weights}
        assert (x.data_ptr() in sizes) == (not layer.keeps_rows)
        wide = [tensor for tensor in kept.values() if tensor.dim() == 2 and tensor.shape[1] == H]
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in wide if tensor.dtype == torch.bfloat16))
    _, capacity, *_ = layer.exchange.numbers
    return found, [2 * H * capacity, 2 * H * T * world.size]


def test_a_rank_keeps_a_row_of_each_token_of_each_rank(pool: RankPool) -> None:
    for found, said in pool.run(2, kept_bytes):
        assert found == said


def test_what_would_save_little_or_cannot_be_found_is_kept() -> None:
    (world,) = wired(1)
    with world:
        assert not MoELayer(world, SPEC, LayerForm(F)).keeps_rows
        layer = MoELayer(world, replace(SPEC, topk=1), LayerForm(F))
        layer.exchange.entry_places = None
        with pytest.raises(ConfigError, match="keeps_rows is False with "):
            layer.keeps_rows = False


def test_frozen_experts_keep_no_rows_and_others_notice_rows_that_changed() -> None:
    (world,) = wired(1)
    with world:
        layer, ids, share = MoELayer(world, SPEC, LayerForm(F)), ids_of("drawn", T, 0), torch.rand(T, K)
        x = torch.ones(T, H, dtype=torch.bfloat16).requires_grad_() * 2
        y = layer.routed(x, ids, share)
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        layer.experts.requires_grad_(False)
        assert x.data_ptr() not in {
            tensor.data_ptr() for tensor in kept_by(lambda: layer.routed(x, ids, share)).values()
        }


def run_one_expert(world: World) -> bool:
    return MoELayer(world, replace(SPEC, experts=9, topk=1, alignment=1), LayerForm(F)).keeps_rows


def test_a_row_for_each_token_is_no_fewer_rows_with_one_expert_each(pool: RankPool) -> None:
    assert pool.run(3, run_one_expert) == [True] * 3


def check_operators(world: World) -> None:
    layer, ids = MoELayer(world, SPEC, LayerForm(F), seed=1), ids_of("masked", T, world.rank)
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(world.rank)).bfloat16()
    got = dispatch(layer.exchange, x, ids, torch.rand(T, K), site=layer.number)
    groups, numbers = Groups(got.expert_offsets, got.expert_counts), layer.exchange.numbers
    dispatch_of = got.routing[1], got.routing[0]
    kept = kept_rows.RowSources(layer.exchange, x, *dispatch_of).keep(got.x, groups)
    again = kept_rows.rows_again(got.x, kept, groups)
    assert_same_bits(again, got.x)
    places = *dispatch_of, groups.offsets, groups.counts
    torch.library.opcheck(torch.ops.raymoe.keep_rows, (numbers, got.x, *places, len(kept.others)))
    torch.library.opcheck(torch.ops.raymoe.rows_again, (numbers, got.x, x, kept.others, *places))


@pytest.mark.thorough
def test_operators_pass_opcheck(pool: RankPool) -> None:
    pool.run(2, check_operators)


@pytest.mark.thorough
def test_a_compiled_layer_keeps_no_dispatched_row() -> None:
    """This backend divides a graph as Inductor does, and compiles nothing."""
    (world,) = wired(1)
    torch.compiler.reset()
    with world:
        layer = MoELayer(world, SPEC, LayerForm(F, norm=1e-6), seed=1)
        x = torch.randn(T, H, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        layer(x).float().sum().backward()
        wanted = x.grad
        compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
        x.grad = None
        compiled(x).float().sum().backward()
        torch.testing.assert_close(x.grad, wanted, rtol=0.02, atol=0.02)
        shapes = [tuple(tensor.shape) for tensor in kept_by(lambda: compiled(x)).values()]
        assert (SPEC.rows(1), H) not in shapes and (SPEC.rows(1), 2 * F) in shapes, shapes


# The kernel.

UNTOUCHED = 77.0
needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles kernels for a CPU")


@dataclass
class Case:
    """The entries of some ranks' tokens, in a random order among the rows of `experts` experts, and their rows."""

    sent: Sequence[int]
    rank: int = 0
    slot_tokens: int = 6
    topk: int = 3
    experts: int = 4
    columns: int = 24
    gap: int = 8
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        ranks, generator = len(self.sent), torch.Generator().manual_seed(len(self.sent))
        expert = torch.randint(-1, self.experts, (ranks, self.slot_tokens, self.topk), generator=generator)
        expert[expert == 1] = -1  # an expert without rows
        for source, count in enumerate(self.sent):
            expert[source, count:] = -1
        counts = torch.stack([(expert == each).sum() for each in range(self.experts)])
        lengths = (counts + self.gap - 1) // self.gap * self.gap
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        places = torch.full_like(expert, -1)
        for each in range(self.experts):
            count = int(counts[each])
            places[expert == each] = int(offsets[each]) + torch.randperm(count, generator=generator)
        self.end, self.capacity = int(offsets[-1]), int(offsets[-1]) + 5
        self.places = Places(offsets.int(), counts.int())
        pairs = torch.full((ranks, self.slot_tokens, self.topk, 2), 12345, dtype=torch.int32)
        pairs[..., 0] = places
        for source, count in enumerate(self.sent):  # left over from another dispatch
            pairs[source, count:, :, 0] = 1
        self.entries = EntryPlaces(pairs[..., 0], torch.tensor(self.sent, dtype=torch.int32))
        self.at = places
        drawn = torch.randn(ranks, self.slot_tokens, self.columns, generator=generator).to(self.dtype)
        self.tokens = drawn
        self.own = drawn[self.rank, : self.sent[self.rank]].contiguous()
        self.others = drawn[[each for each in range(ranks) if each != self.rank]].flatten(0, 1)
        self.rows = torch.zeros(self.capacity, self.columns, dtype=self.dtype)
        self.rows[self.end :] = UNTOUCHED
        source, token, k = torch.nonzero(places >= 0, as_tuple=True)
        self.rows[places[source, token, k]] = drawn[source, token]

    def call(self, own: torch.Tensor, others: torch.Tensor, rows: torch.Tensor, again: bool) -> KeptRowsCopy:
        return KeptRowsCopy(self.entries, self.rank, own, others, rows, self.places, self.gap, again)


def run(call: KeptRowsCopy, sms: int, changes: Sequence[Change]) -> None:
    reached = [*tensors_of(call), *tensors_of(call.places), *tensors_of(call.entries)]
    run_call(call.kernel_call(), reached, sms=sms, changes=changes)


def run_case(case: Case, sms: int = 2, changes: Sequence[Change] = ()) -> None:
    """Keep rows, and make those of experts again: both must have the bits of the dispatch."""
    kept = torch.full_like(case.others, UNTOUCHED)
    run(case.call(case.own[:0], kept, case.rows, False), sms, changes)
    peers = [each for each in range(len(case.sent)) if each != case.rank]
    there = (case.at[peers] >= 0).any(dim=2).flatten()
    assert torch.equal(kept[there], case.others[there]) and bool((kept[~there] == UNTOUCHED).all())
    rows = torch.full_like(case.rows, UNTOUCHED)
    run(case.call(case.own, kept, rows, True), sms, changes)
    assert torch.equal(rows, case.rows)


@needs_compiler
@pytest.mark.parametrize("sent", [(6,), (6, 4), (0, 6, 2)], ids=str)
def test_the_kernel_brings_each_row_back_to_its_places(sent: tuple[int, ...]) -> None:
    for rank in range(len(sent)):
        run_case(Case(sent, rank))


@needs_compiler
@pytest.mark.parametrize(("columns", "dtype"), [(8, torch.float16), (1032, torch.bfloat16), (260, torch.float32)])
def test_the_kernel_copies_rows_of_any_width(columns: int, dtype: torch.dtype) -> None:
    run_case(Case((6, 3), 1, columns=columns, dtype=dtype), sms=1)


@needs_compiler
def test_tokens_may_have_more_experts_than_a_warp_has_lanes() -> None:
    run_case(Case((3, 2), slot_tokens=3, topk=37, experts=6, columns=16))


@needs_compiler
def test_a_refused_dispatch_brings_no_row_back() -> None:
    """Its offsets are 0, and its entries may be anything."""
    case = Case((6, 4))
    places = Places(torch.zeros_like(case.places.offsets), torch.zeros(case.experts, dtype=torch.int32))
    rows, kept = torch.full_like(case.rows, UNTOUCHED), torch.full_like(case.others, UNTOUCHED)
    for call in (case.call(case.own, kept, rows, True), case.call(case.own[:0], kept, rows, False)):
        run(replace(call, places=places), 2, ())
    assert bool((rows == UNTOUCHED).all()) and bool((kept == UNTOUCHED).all())


def dispatched(kind: str, spec: ExchangeSpec, counts: Sequence[int]) -> list[KeptRowsCopy]:
    """Dispatch on emulated GPUs; return a copy of each rank's rows from those of tokens, all in new memory."""
    dtype = getattr(torch, spec.dtype)
    with Emulator(len(counts)) as emulator:
        backends = [backend(kind, space, spec) for space in workspaces(emulator, spec)]
        given = []
        for rank, tokens in enumerate(counts):
            generator = torch.Generator().manual_seed(rank)
            ids = torch.randint(-1, spec.experts, (tokens, spec.topk), generator=generator)
            x = torch.randn(tokens, spec.hidden, generator=generator).to(dtype)
            given.append(Tokens(x, ids, torch.rand(ids.shape), None))
        shape, in_slots = (spec.rows(len(counts)), spec.hidden), spec.layout == "rank"
        got = [
            each.dispatch(tokens, None if in_slots else each.new(shape, dtype, "out"))
            for each, tokens in zip(backends, given, strict=True)
        ]
        emulator.run(seed=1)
        calls = []
        for rank, (each, tokens, result) in enumerate(zip(backends, given, got, strict=True)):
            each.check()
            entries = each.entry_places(each.pack(result).clone(), tokens.topk_idx)
            rows = expert_major(result).clone()
            places = Places(result.expert_offsets.clone(), result.expert_counts.clone())
            others = torch.zeros((len(counts) - 1) * spec.tokens, spec.hidden, dtype=dtype)
            calls.append(KeptRowsCopy(entries, rank, tokens.x, others, rows, places, spec.alignment, True))
        return calls


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "layout"), [("fused", "expert"), ("fused", "rank"), ("ll", "expert"), ("staged", "expert")]
)
def test_the_kernel_reads_what_dispatches_of_gpus_leave(kind: str, layout: str) -> None:
    spec = ExchangeSpec(7, 64, experts=6, topk=3, alignment=4, padding="zero", depth=0, layout=layout)
    for call in dispatched(kind, spec, (7, 4, 0)):
        run(replace(call, again=False), 2, ())
        rows, end = torch.full_like(call.rows, UNTOUCHED), int(call.places.offsets[-1])
        assert end > 0
        run(replace(call, rows=rows), 2, ())
        assert torch.equal(rows[:end], call.rows[:end]) and bool((rows[end:] == UNTOUCHED).all())


def run_through_the_kernel(world: World) -> list[bool]:
    """Emulate the kernel for ranks on CPUs, with places beside weights as GPUs have them. Return what was launched."""
    layer, launched = MoELayer(world, SPEC, LayerForm(F), seed=1), []
    by_cpu = layer.exchange.entry_places
    assert by_cpu is not None

    def entry_places(*dispatch: torch.Tensor) -> EntryPlaces:
        entries = by_cpu(*dispatch)
        pairs = torch.stack((entries.places, torch.full_like(entries.places, 12345)), dim=-1)
        return EntryPlaces(pairs[..., 0], entries.tokens)

    def emulate(call: KeptRowsCopy) -> None:
        launched.append(call.again)
        run(call, 2, ())

    layer.exchange.entry_places = entry_places
    taking = SimpleNamespace(takes=lambda _: True)
    with mock.patch.object(KeptRowsCopy, "launch", emulate), mock.patch.object(kept_rows, "row_launch", taking):
        assert_equal_bits(layer, ids_of("masked", (T, 5)[world.rank], world.rank))
    return launched


@needs_compiler
def test_layers_on_gpus_take_the_kernel(pool: RankPool) -> None:
    assert pool.run(2, run_through_the_kernel) == [[False, True]] * 2


INJECTED_BUGS = {
    "tokens that were not sent": ("min(most, ptx::load_4(p.tokens + token.source * 4ull))", "most"),
    "the rows of a rank before the own one": ("(token.source > p.rank)", "1"),
    "one place of a row alone": ("left != 0; left &= left - 1", "left != 0; left = 0"),
    "the last part of a row forgotten": ("begin < p.width; begin", "begin + 64 < p.width; begin"),
    "gaps left as they were": ("if (unit >= tokens) {", "if (unit >= tokens + gaps) {"),
    "the own rank's rows kept, and the last one's not": ("(!AGAIN && source >= p.rank)", "0"),
    "entries after the first 32 forgotten": ("first < p.topk; first += 32", "first < 1; first += 32"),
}


@needs_compiler
@pytest.mark.parametrize("name", INJECTED_BUGS)
def test_injected_bugs_are_found(name: str) -> None:
    change = Change("kept_rows.cu", *INJECTED_BUGS[name])
    with pytest.raises((AssertionError, EmulatorError)):
        for case in (Case((6, 4)), Case((3, 2), 1, slot_tokens=3, topk=37, experts=6, columns=1032)):
            run_case(case, changes=[change])


def test_tensors_that_do_not_fit_are_refused() -> None:
    case = Case((6, 4))
    call = case.call(case.own, case.others, case.rows, True)
    packed = replace(case.entries, places=case.entries.places.contiguous())
    for changed, said in (
        (replace(call, own=case.own.float()), "own is torch.float32"),
        (replace(call, others=case.others[1:]), "5 rows of 48 bytes for 1 other ranks' 6"),
        (replace(call, entries=packed), "each lies beside its weight"),
    ):
        with pytest.raises(ConfigError, match=said):
            changed.kernel_call()
