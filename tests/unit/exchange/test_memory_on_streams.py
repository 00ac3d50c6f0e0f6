"""Torch is told when a second stream uses a dispatch's memory; otherwise it would reuse the memory too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from raymoe.cuda.current import keep_for_current_stream
from raymoe.exchange.backend import Ids, Tokens
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.nccl.nccl_kernels import RoundKernels, SavedMemory
from raymoe.exchange.spec import ExchangeSpec
from raymoe.moe.differentiable import combine, dispatch
from tests.emulator.machine import Emulator
from tests.emulator.ranks import EmulatedOrder, backend, spec_for, workspaces
from tests.emulator.steps import Steps
from tests.unit.exchange.exchange_cases import Case
from tests.unit.exchange.nccl.emulated_launcher import EmulatedLauncher
from tests.unit.exchange.nccl.emulated_rounds import Named
from tests.unit.worlds import wired

FIRST, SECOND = 1, 2


class Streams:
    """Keeps the current stream."""

    current = FIRST

    def on(self, stream: int, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            self.current = stream
            return method(*arguments)

        return called


@pytest.mark.parametrize("second", [FIRST, SECOND])
@pytest.mark.parametrize("form", ["whole", "halves"])
@pytest.mark.parametrize("kind", ["fused", "ll", "staged", "copied"])
def test_memory_that_a_second_stream_reads_is_lent_to_it(kind: str, form: str, second: int) -> None:
    streams, spec = Streams(), spec_for(kind)
    later = ("combine",) if form == "whole" else ("dispatch_receive", "combine_send", "combine_receive")
    with (
        Emulator(1) as emulator,
        mock.patch.object(EmulatedOrder, "current", lambda _: streams.current),
        mock.patch("raymoe.exchange.peer.peer_backend.keep_for_current_stream") as lent,
    ):
        (space,) = workspaces(emulator, spec)
        on_streams = backend(kind, space, spec)
        for name in ("dispatch", "dispatch_send"):
            setattr(on_streams, name, streams.on(FIRST, getattr(on_streams, name)))
        for name in later:
            setattr(on_streams, name, streams.on(second, getattr(on_streams, name)))
        steps = Steps(emulator, Case(1, spec, kind, ("uniform",), ragged=False), [on_streams])
        steps.enqueue(0, form)
        emulator.run(0)
        steps.judge()
    if second == FIRST:
        lent.assert_not_called()
    else:
        assert len(lent.call_args_list) >= len(later)
        assert len({id(call.args[0]) for call in lent.call_args_list}) == 1  # one dispatch has one memory


def test_nccl_backends_lend_memory_to_a_second_stream() -> None:
    saved = SavedMemory(torch.zeros(4), FIRST)
    with mock.patch("raymoe.exchange.nccl.nccl_kernels.keep_for_current_stream") as lent:
        assert saved.used_on(FIRST) is saved.memory
        lent.assert_not_called()
        assert saved.used_on(SECOND) is saved.memory
        lent.assert_called_once_with(saved.memory)


def storages(lent: mock.Mock) -> set[int]:
    """The addresses of the allocations that were lent."""
    tensors = (tensor for call in lent.call_args_list for tensor in call.args if tensor is not None)
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("op", ["combine", "combine_gradients", "dispatch_known"])
@pytest.mark.parametrize("kind", ["fused", "ll", "staged", "copied"])
def test_metadata_that_went_through_an_operator_is_lent_to_the_stream_that_reads_it(kind: str, op: str) -> None:
    """The tensor alone does not say on which stream it was allocated."""
    spec = spec_for(kind)
    with (
        Emulator(1) as emulator,
        mock.patch.object(EmulatedOrder, "current", lambda _: SECOND),
        mock.patch("raymoe.exchange.peer.peer_backend.keep_for_current_stream") as lent,
    ):
        (space,) = workspaces(emulator, spec)
        emulated: Any = backend(kind, space, spec)
        if op == "dispatch_known" and not emulated.keeps_places:
            pytest.skip(f"{kind} keeps no places")
        dtype, tokens = getattr(torch, spec.dtype), 4
        x, ids = torch.ones(tokens, spec.hidden, dtype=dtype), torch.zeros(tokens, spec.topk, dtype=torch.int64)
        rows, y, entries = (
            emulated.new(shape, of, "tensor")
            for shape, of in (
                ((spec.rows(1), spec.hidden), dtype),
                ((tokens, spec.hidden), dtype),
                ((tokens, spec.topk), torch.float32),
            )
        )
        first = emulated.dispatch(Tokens(x, ids, torch.ones(tokens, spec.topk), None), rows)
        metadata = emulated.pack(first)
        lent.assert_not_called()
        got = emulated.unpack(metadata, rows, first.weights, Ids(ids))
        if op == "combine":
            emulated.combine(rows, got, True, y)
        elif op == "combine_gradients":
            weights = emulated.new((spec.rows(1),), torch.float32, "weights")
            emulated.combine_gradients(rows, weights, got, y, entries)
        else:
            emulated.dispatch_known(x, got, rows)
        assert metadata.untyped_storage().data_ptr() in storages(lent)


@pytest.mark.parametrize("compact", [True, False], ids=["collective", "allgather"])
def test_metadata_of_nccl_backends_is_lent_to_the_stream_that_reads_it(compact: bool) -> None:
    spec = ExchangeSpec(tokens=4, hidden=8, experts=4, topk=2)
    world: Any = Named(0, 1, torch.device("cpu"))
    kernels = RoundKernels(world, spec, EmulatedLauncher(), compact=compact)
    metadata = torch.zeros(kernels.metadata_words, dtype=torch.int32)
    with mock.patch("raymoe.exchange.nccl.nccl_kernels.keep_for_current_stream") as lent:
        kernels.unpacked(metadata, torch.zeros(4), Ids(torch.zeros(4, 2)), kernels)
    assert storages(lent) == {metadata.data_ptr()}


def test_ids_that_a_backward_pass_sends_again_are_lent_to_its_stream() -> None:
    """The caller gave them to the dispatch, and does not see that the backward of its combine reads them."""
    (world,) = wired(1)
    spec = ExchangeSpec(tokens=4, hidden=8, experts=2, topk=2, dtype="float32", depth=0)
    with world, Exchange(world, spec) as exchange:
        assert not exchange.keeps_places
        ids, count = torch.zeros(4, 2, dtype=torch.int64), torch.tensor([3], dtype=torch.int32)
        got = dispatch(exchange, torch.ones(4, 8, requires_grad=True), ids, torch.ones(4, 2), count)
        y = combine(exchange, got.x, got)
        with mock.patch("raymoe.moe.differentiable.keep_for_current_stream") as lent:
            y.sum().backward()
    assert storages(lent) == {ids.data_ptr(), count.data_ptr()}


@pytest.mark.parametrize("on_gpu", [True, False])
def test_memory_of_gpus_is_lent_to_the_current_stream(on_gpu: bool) -> None:
    memory, stream = mock.Mock(is_cuda=on_gpu), object()
    with mock.patch.object(torch.cuda, "current_stream", return_value=stream):
        keep_for_current_stream(memory, None)
    assert memory.record_stream.call_args_list == [mock.call(stream)] * on_gpu
