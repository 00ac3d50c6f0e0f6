"""Backend `collective` on GPUs waits for nothing on the device without a limit, also with gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from raymoe.errors import PeerTimeout
from raymoe.exchange.backend import Ids
from raymoe.exchange.nccl import nccl_kernels
from raymoe.exchange.nccl.nccl_backends import HostNumbers, NcclCollective, NumbersByMetadata
from raymoe.exchange.nccl.nccl_kernels import RoundKernels, SharedLauncher
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.wait import Waiter
from raymoe.memory.world import World
from raymoe.moe.differentiable import combine, dispatch
from raymoe.net.nccl_rounds import NcclRounds
from tests.unit.exchange.exchange_cases import Case, batches, open_exchange
from tests.unit.exchange.nccl.emulated_rounds import Named
from tests.unit.exchange.nccl.gloo_rounds import GlooRounds
from tests.unit.moe.gradient_cases import judge_gradients, run_gradients
from tests.unit.ranks import RankPool

SPEC = ExchangeSpec(tokens=5, hidden=16, experts=4, topk=3, dtype="float32", padding="zero")
CASE = Case(2, SPEC, "tensor collective", ("uniform", "repeated", "masked", "none"), seed=3)


@contextmanager
def no_host_copies() -> Iterator[None]:
    """Refuse what waits for the device, or copies pageable memory to it."""
    with ExitStack() as patched:
        for name in ("tolist", "item", "cpu", "to", "__int__", "__bool__"):
            refused = AssertionError(f"Tensor.{name} would wait for the device")
            patched.enter_context(mock.patch.object(torch.Tensor, name, side_effect=refused))
        refused = AssertionError("torch.tensor would copy from the host")
        patched.enter_context(mock.patch("torch.tensor", side_effect=refused))
        yield


def count_reads(world: World, case: Case) -> int:
    """Pack and unpack a dispatch, and combine it, forward and backward; return how often the host reads the device."""
    with (
        open_exchange(world, case) as exchange,
        mock.patch.object(GlooRounds, "read", autospec=True, side_effect=GlooRounds.read) as read,
    ):
        batch = batches(case, 0)[world.rank]
        got = exchange.dispatch(batch.x, batch.ids, batch.weights, out=torch.zeros(case.spec.rows(2), case.spec.hidden))
        with no_host_copies():
            metadata = exchange.pack(got)
            again = exchange.unpack(metadata, got.x, got.weights, Ids(batch.ids))
        exchange.combine(got.x, again)
        x = batch.x.requires_grad_()
        got = dispatch(exchange, x, batch.ids, batch.weights)
        combine(exchange, torch.tanh(got.x), got).sum().backward()
        reads = read.call_count
        exchange.check()
        return reads


def test_the_metadata_of_a_dispatch_is_made_again_without_a_read(pool: RankPool) -> None:
    assert pool.run(2, count_reads, CASE) == [0, 0]


def run_with_copies(world: World, case: Case) -> tuple[int, Any]:
    """Let autograd keep copies of what backward passes need, as `save_on_cpu` does."""
    with (
        torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone),
        mock.patch.object(NcclCollective, "unpack", autospec=True, side_effect=NcclCollective.unpack) as unpacked,
        mock.patch.object(GlooRounds, "read", autospec=True, side_effect=GlooRounds.read) as read,
    ):
        gradients = run_gradients(world, case)
    reads = sum(call.args[1] == "combine" for call in read.call_args_list)
    assert unpacked.call_count == 3 * len(case.routing)
    return reads, gradients


def test_copies_of_the_metadata_are_read_with_a_limit(pool: RankPool) -> None:
    results = pool.run(2, run_with_copies, CASE)
    assert [reads for reads, _ in results] == [8, 8], "the backward of each dispatch and of each combine"
    judge_gradients(CASE, [gradients for _, gradients in results], bound=2e-6)


def test_numbers_are_those_of_the_storage_that_lives() -> None:
    known, live, gone = NumbersByMetadata(), [], 0
    for number in range(1, 2000):
        metadata = torch.full((64,), number, dtype=torch.int32)
        assert known.of(metadata) is None, "an address of a dead storage is no key"
        known.add(metadata, HostNumbers(number, [number], [0]))
        if number % 10 == 0:
            live.append((number, metadata))
        else:
            gone += 1
        del metadata
    for number, metadata in live:
        numbers = known.of(metadata.view(8, 8)[2:].detach())
        assert numbers is not None and numbers.number == number
        assert known.of(metadata.clone()) is None
    assert len(known._known) <= 3 * len(live) + 64 < gone


def group() -> Any:
    """A group of NCCL whose peer 1 lags behind."""
    return SimpleNamespace(lagging=lambda peers: (peers[0], 3, 4), abort=mock.Mock(), close=mock.Mock())


def rounds_of(timeout_s: float, synchronise: Callable[[], None]) -> tuple[NcclRounds, Any]:
    """The rounds of rank 0 of two, over such a group."""
    rounds, world = NcclRounds.__new__(NcclRounds), mock.Mock(rank=0, size=2, timeout_s=timeout_s)
    world.waiter, world.gpu.synchronise = Waiter(0, timeout_s), synchronise
    rounds._world, rounds._group, rounds._forget = world, group(), lambda: None
    return rounds, rounds._group


@pytest.fixture
def event() -> Any:
    """An event of torch that is not done; memory is not page-locked."""
    recorded = mock.Mock()
    recorded.query.return_value = False
    empty = torch.empty

    def pageable(*shape: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory, "the copy of pageable memory waits without a limit"
        return empty(*shape, **options)

    cuda = SimpleNamespace(Event=lambda: recorded, current_stream=lambda _: 5)
    with mock.patch("raymoe.net.nccl_rounds._cuda", cuda), mock.patch("torch.empty", pageable):
        yield recorded


def test_a_read_that_takes_too_long_names_the_peer_and_ends_nccl(event: Any) -> None:
    rounds, nccl = rounds_of(0.2, lambda: None)
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match="rank 1") as raised:
        rounds.read("combine", torch.arange(4))
    assert time.monotonic() - start < 2 and raised.value.op == "combine"
    nccl.abort.assert_called_once_with()
    event.record.assert_called_once_with(5)


def test_a_read_gives_the_bytes_when_the_copy_is_done(event: Any) -> None:
    rounds, nccl = rounds_of(5.0, lambda: None)
    event.query.side_effect = [False, False, True]
    assert rounds.read("combine", torch.arange(4)).tolist() == [0, 1, 2, 3]
    nccl.abort.assert_not_called()


def test_a_close_does_not_wait_for_ever_for_the_device() -> None:
    rounds, nccl = rounds_of(0.2, lambda: time.sleep(1))
    with pytest.raises(PeerTimeout):
        rounds.close(together=True)
    assert nccl.abort.called and not nccl.close.called


@pytest.mark.parametrize("idle", [True, False])
def test_a_launcher_frees_its_memory_only_when_the_gpu_is_idle(monkeypatch: pytest.MonkeyPatch, idle: bool) -> None:
    monkeypatch.setattr(nccl_kernels, "CLOSING_S", 0.2)
    made: Any = SharedLauncher.__new__(SharedLauncher)
    made._gpu = SimpleNamespace(synchronise=lambda: time.sleep(0 if idle else 1))
    made._words, made.order, made._kernels = [mock.Mock()], mock.Mock(), mock.Mock()
    start = time.monotonic()
    made.close(together=True)
    assert time.monotonic() - start < 0.9
    for each in (*made._words, made.order, made._kernels):
        assert each.close.called == idle


def test_an_exchange_is_made_without_a_copy_from_the_host() -> None:
    """Such a copy waits for the stream, where a kernel of NCCL may wait for a peer that is gone."""
    launcher, world = mock.MagicMock(threads=64, sms=4), Named(0, 2, torch.device("cpu"))
    launcher.resident.return_value = 4
    with no_host_copies():
        RoundKernels(world, SPEC, launcher, compact=True)  # type: ignore[arg-type]
    launcher.ordered.assert_called_once_with("exchange")
    scratch = next(call.kwargs["scratch"] for call in launcher.ready.call_args_list if "scratch" in call.kwargs)
    assert scratch.tolist() == [-1, 0, 0]
