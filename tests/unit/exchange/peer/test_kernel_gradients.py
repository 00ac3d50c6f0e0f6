"""Gradients of weights on GPU ranks, on emulated kernels: numbers of entries return beside the sums of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch

from raymoe.errors import CaptureError, DataRefused, PeerTimeout, RaymoeError
from raymoe.exchange.backend import Dispatched, Ids, Tokens
from raymoe.exchange.spec import ExchangeSpec
from tests.emulator.build import Change, compiler
from tests.emulator.machine import Emulator, EmulatorError
from tests.emulator.ranks import EmulatedBackend, backend, workspaces

RANKS = 2
SHORT_S = 2e-3
"""A timeout of virtual time."""
SPEC = ExchangeSpec(tokens=7, hidden=64, experts=6, topk=3, alignment=4)
pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: it compiles kernels for the CPU")


def check_weights(
    kind: str,
    spec: ExchangeSpec,
    counts: tuple[int, ...],
    changes: tuple[Change, ...] = (),
    stamped: bool = False,
    seeds: Sequence[int] = (1,),
) -> None:
    """In each of several steps dispatch so many tokens of each rank, and return their weights beside rows of ones.

    Raise if a weight or a sum differs.
    """
    transport = "copy_engine" if kind == "copied" else "auto"
    spec = replace(spec, transport=transport)
    with Emulator(len(counts), changes=changes) as emulator:
        backends = [backend(kind, space, spec) for space in workspaces(emulator, spec, stamped=stamped)]
        for seed in seeds:
            check_step(emulator, backends, counts, seed)


def check_step(emulator: Emulator, backends: Sequence[EmulatedBackend], counts: tuple[int, ...], seed: int) -> None:
    spec, source = backends[0].spec, torch.Generator().manual_seed(seed + 3)
    dtype, given = getattr(torch, spec.dtype), []
    capacity, slots = spec.rows(len(counts)), spec.layout == "rank"
    for tokens in counts:
        ids = torch.randint(-1, spec.experts, (tokens, spec.topk), generator=source)
        ids[: tokens // 3] = ids[: tokens // 3, :1]  # a token may name an expert several times
        x = torch.ones(tokens, spec.hidden, dtype=dtype)
        given.append(Tokens(x, ids, torch.randn(tokens, spec.topk, generator=source), None))
    got = [
        each.dispatch(tokens, None if slots else each.new((capacity, spec.hidden), dtype, "out"))
        for each, tokens in zip(backends, given, strict=True)
    ]
    emulator.run(seed=seed)
    results = []
    for each, tokens, found in zip(backends, given, got, strict=True):
        metadata = each.pack(found)
        assert metadata.dtype == torch.int32 and metadata.numel() == each.metadata_words
        again = each.unpack(metadata, found.x, found.weights, Ids(tokens.topk_idx))
        assert again.expert_offsets.tolist() == found.expert_offsets.tolist()
        # The emulator allows no access after these rows.
        rows = each.new((found.count(), spec.hidden), dtype, "expert rows")
        rows.fill_(1.0)
        y = each.new((len(tokens.x), spec.hidden), dtype, "y")
        entries = each.new((len(tokens.x), spec.topk), torch.float32, "entries")
        each.combine_gradients(rows, found.weights, again, y, entries)
        results.append((y, entries))
    emulator.run(seed=seed + 1)
    for each, tokens, (y, entries) in zip(backends, given, results, strict=True):
        each.check()
        there = tokens.topk_idx >= 0
        assert torch.equal(entries, torch.where(there, tokens.topk_weights, 0.0))
        assert torch.equal(y.float(), there.sum(dim=1, keepdim=True).float().expand(y.shape))


@pytest.mark.parametrize("kind", ["fused", "ll", "staged"])
def test_a_combine_accesses_no_row_after_the_last_offset(kind: str) -> None:
    """The emulator ends a kernel that does. One rank receives no rows at all."""
    spec = replace(SPEC, dtype="float32", alignment=1)
    with Emulator(RANKS) as emulator:
        backends = [backend(kind, space, spec) for space in workspaces(emulator, spec)]
        ids, weights = torch.tensor([[0, 2, -1], [1, 1, 0]]), torch.tensor([[0.5, 2.0, 9.0], [1.0, 0.25, 4.0]])
        tokens = Tokens(torch.ones(2, spec.hidden), ids, weights, None)
        shape = spec.rows(RANKS), spec.hidden
        got = [each.dispatch(tokens, each.new(shape, torch.float32, "out")) for each in backends]
        emulator.run(seed=1)
        assert [found.count() for found in got] == [2 * 5, 0]
        ys = []
        for each, found in zip(backends, got, strict=True):
            rows = each.new((found.count(), spec.hidden), torch.float32, "expert rows").fill_(1.0)
            ys.append(each.new((2, spec.hidden), torch.float32, "y"))
            each.combine(rows, found, True, ys[-1])
        emulator.run(seed=2)
        for each, y in zip(backends, ys, strict=True):
            each.check()
            assert y[:, 0].tolist() == [2.5, 5.25]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["fused", "ll", "staged", "copied"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_of_a_dispatch_return_to_their_entries(kind: str, dtype: str) -> None:
    check_weights(kind, replace(SPEC, dtype=dtype), (7, 4))


@pytest.mark.parametrize(
    ("spec", "counts"),
    [
        (replace(SPEC, hidden=8), (7, 4)),
        (replace(SPEC, topk=1), (5, 7, 0)),
        (replace(SPEC, topk=16, experts=16, hidden=128, dtype="float32"), (0, 3)),
        (replace(SPEC, layout="rank"), (6, 7)),
        (replace(SPEC, dtype="float32", wire={"combine": "bfloat16"}), (7, 1)),
        (replace(SPEC, experts=4), (3, 0, 7, 5)),
        (SPEC, (7,)),
    ],
    ids=["hidden 8", "top-1", "top-16", "layout rank", "returned as bfloat16", "four ranks", "one rank"],
)
def test_weights_return_with_other_shapes(spec: ExchangeSpec, counts: tuple[int, ...]) -> None:
    check_weights("fused", spec, counts)


WIDE = replace(SPEC, hidden=3072)
"""Rows of several pieces."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stamped", [False, True], ids=["", "stamped"])
@pytest.mark.parametrize("kind", ["fused", "staged"])
def test_weights_return_with_rows_of_several_pieces_in_step_after_step(kind: str, stamped: bool) -> None:
    check_weights(kind, WIDE, (7, 5), stamped=stamped, seeds=range(4))


_LATE = "if (leads_) {\n            if (unannounced_"
NOT_HANDED_ON = (
    Change("local_reduction.cuh", "push_numbers(slot, entry);\n        }\n        u32", "}\n        u32"),
    Change("local_reduction.cuh", _LATE, f"if (begin == 0) {{ push_numbers(slot, entry); }}\n        {_LATE}"),
)
"""Numbers are stored after the last __syncwarp of a piece, so nothing orders them before its word."""

INJECTED_BUGS = [
    Change("local_reduction.cuh", "if (CARRIES && begin == 0)", "if (CARRIES && last == p_.vectors())"),
    Change(
        "local_reduction.cuh",
        "const u32 number = p_.number_of(entry);",
        "const u32 number = p_.number_of(entry) & 0xFFFF;",
    ),
    Change("local_reduction.cuh", "wire_row_bytes + k * 4, number", "wire_row_bytes + k * 8, number"),
    Change("final_reduction.cuh", "u32 number = p_.number_of(entry);", "u32 number = 0;"),
    Change("final_reduction.cuh", "number |= ptx", "number = ptx"),
    Change("final_reduction.cuh", "if (CARRIES && step == 0) {", "if (false) {"),
    Change(
        "final_reduction.cuh",
        "slot_at(me, epoch_ & 1, __ffs(left) - 1, token)",
        "slot_at(me, 0, __ffs(left) - 1, token)",
    ),
    Change("combine.cuh", "wire_row_bytes + number_bytes + ", "wire_row_bytes + "),
    Change("combine.cuh", "numbers + place * 4ull", "numbers + place * 8ull"),
]


@pytest.mark.parametrize(
    "changes", [*((change,) for change in INJECTED_BUGS), NOT_HANDED_ON], ids=lambda each: each[0].old
)
def test_an_injected_bug_is_found(changes: tuple[Change, ...]) -> None:
    with pytest.raises((AssertionError, EmulatorError, RaymoeError)):
        check_weights("fused", WIDE, (7, 5), changes, stamped=True, seeds=range(6))


def dispatch_ones(emulator: Emulator, backends: Sequence[EmulatedBackend]) -> list[Dispatched]:
    """Dispatch rows of ones from each rank, to all experts in turn, with weights of one."""
    x, weights = torch.ones(SPEC.tokens, SPEC.hidden).bfloat16(), torch.ones(SPEC.tokens, SPEC.topk)
    tokens = Tokens(x, torch.arange(weights.numel()).view(weights.shape) % SPEC.experts, weights, None)
    outs = [each.new((SPEC.rows(RANKS), SPEC.hidden), x.dtype, "out") for each in backends]
    got = [each.dispatch(tokens, out) for each, out in zip(backends, outs, strict=True)]
    emulator.run(seed=5)
    return got


def new_results(made: EmulatedBackend) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate y and entries, filled with a number that no combine gives."""
    y = made.new((SPEC.tokens, SPEC.hidden), torch.bfloat16, "y").fill_(7.0)
    return y, made.new((SPEC.tokens, SPEC.topk), torch.float32, "entries").fill_(7.0)


def check_two_sizes(kinds: Sequence[str], changes: tuple[Change, ...] = ()) -> None:
    """Let exchanges of two sizes take turns on one workspace, so that each finds the slots of the other."""
    specs, counts = (replace(SPEC, hidden=3072, topk=5), replace(SPEC, tokens=13)), ((7, 5), (13, 9))
    with Emulator(RANKS, changes=changes) as emulator:
        spaces = workspaces(emulator, *specs, stamped=False)
        made = [[backend(kind, space, spec) for space in spaces] for kind, spec in zip(kinds, specs, strict=True)]
        for seed in range(6):
            for number in (0, 1) if seed % 2 else (1, 0):  # so each has both buffers
                check_step(emulator, made[number], counts[number], seed)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kinds", [("fused", "fused"), ("fused", "staged"), ("ll", "fused")], ids="-".join)
def test_exchanges_of_two_sizes_take_turns_on_one_workspace(kinds: tuple[str, str]) -> None:
    check_two_sizes(kinds)


def test_reading_the_own_slot_is_found_where_sizes_take_turns() -> None:
    with pytest.raises((AssertionError, EmulatorError, RaymoeError)):
        check_two_sizes(("fused", "fused"), (Change("final_reduction.cuh", "mask & ~(1u << me); left", "mask; left"),))


def test_weights_are_nan_where_a_peer_does_not_come() -> None:
    with Emulator(RANKS) as emulator:
        backends = [backend("fused", space, SPEC) for space in workspaces(emulator, SPEC, timeout_s=SHORT_S)]
        first, found = backends[0], dispatch_ones(emulator, backends)[0]
        y, entries = new_results(first)
        first.combine_gradients(found.x, found.weights, found, y, entries)
        emulator.run(seed=8)
        assert y.isnan().all() and entries.isnan().all()
        with pytest.raises(PeerTimeout):
            first.check()


@pytest.mark.parametrize("before", [False, True])
def test_refused_gradients_are_written_where_the_exchange_between_domains_reads_them(before: bool) -> None:
    with Emulator(1) as emulator:
        (space,) = workspaces(emulator, SPEC, stamped=False)
        made = backend("fused", space, SPEC)
        if before:
            made.later_operation("combine_gradients")
        words = made.refusal_record()
        (launch,) = made.later_operation("combine_gradients").launches
        assert launch.fields.record == words.data_ptr()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["fused", "ll", "staged"])
def test_the_weights_of_a_refused_step_are_nan_on_all_ranks(kind: str) -> None:
    with Emulator(RANKS) as emulator:
        backends = [backend(kind, space, SPEC) for space in workspaces(emulator, SPEC, stamped=False)]
        x, weights = torch.ones(SPEC.tokens, SPEC.hidden).bfloat16(), torch.ones(SPEC.tokens, SPEC.topk)
        got = []
        for rank, each in enumerate(backends):
            ids = torch.full((SPEC.tokens, SPEC.topk), rank)
            ids[3, 1] = SPEC.experts if rank == 1 else 0  # no expert has this id
            got.append(each.dispatch(Tokens(x, ids, weights, None), each.new((SPEC.rows(RANKS), 64), x.dtype, "out")))
        emulator.run(seed=3)
        results = []
        for each, found in zip(backends, got, strict=True):
            rows = each.new((SPEC.rows(RANKS), SPEC.hidden), x.dtype, "expert rows")
            results.append(each.new((SPEC.tokens, SPEC.topk), torch.float32, "entries"))
            results[-1].fill_(7.0)
            each.combine_gradients(rows, found.weights, found, each.new(tuple(x.shape), x.dtype, "y"), results[-1])
        emulator.run(seed=4)
        assert all(entries.isnan().all() for entries in results)
        for each in backends:
            with pytest.raises(DataRefused, match="rank 1 asked for expert 6 for its token 3"):
                each.check()


def test_a_backward_pass_of_some_ranks_is_refused_on_all_ranks() -> None:
    with Emulator(RANKS) as emulator:
        backends = [backend("fused", space, SPEC) for space in workspaces(emulator, SPEC, stamped=False)]
        (first, second), got = backends, dispatch_ones(emulator, backends)
        (y, _), (other, entries) = new_results(first), new_results(second)
        first.combine(got[0].x, got[0], False, y)
        second.combine_gradients(got[1].x, got[1].weights, got[1], other, entries)
        emulator.run(seed=6)
        assert y.isnan().all() and other.isnan().all() and entries.isnan().all()
        for each in backends:
            with pytest.raises(DataRefused, match="with weighted=False and rank 1 with gradients; all ranks run"):
                each.check()


def test_a_first_backward_pass_inside_a_capture_is_refused() -> None:
    with Emulator(1) as emulator:
        (space,) = workspaces(emulator, SPEC, stamped=False)
        made = backend("fused", space, SPEC)
        with (
            mock.patch("raymoe.exchange.peer.peer_backend.capturing", return_value=True),
            pytest.raises(CaptureError, match="first backward pass of an exchange inside a capture"),
        ):
            made.later_operation("combine_gradients")
        operation = made.later_operation("combine_gradients")
        with mock.patch("raymoe.exchange.peer.peer_backend.capturing", return_value=True):
            assert made.later_operation("combine_gradients") is operation
