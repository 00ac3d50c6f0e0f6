"""The order in which a batch is enqueued: peers in turns, one stream, one batch of memory operations between copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.errors import WiringError  # noqa: E402
from raymoe.net.nccl import NcclGroup  # noqa: E402
from raymoe.transport import copy_engine  # noqa: E402
from raymoe.transport.copy_engine import MAX_BATCH, CopyEngineMover  # noqa: E402
from raymoe.transport.gpu_mover import OrderedBatch  # noqa: E402
from raymoe.transport.spec import (  # noqa: E402
    ChannelSpec,
    Requests,
    turn_of,
)
from raymoe.transport.tma import MAX_SMS, spread_of  # noqa: E402


def all_pairs(size: int) -> tuple[tuple[int, int], ...]:
    return tuple((a, b) for a in range(size) for b in range(size) if a != b)


@pytest.mark.parametrize("size", range(2, 9))
def test_in_every_turn_all_ranks_send_to_different_peers(size):
    spec = ChannelSpec(all_pairs(size), (8,))
    for end in range(2):
        for turn in range(size - 1):
            peers = [
                pair[1 - end]
                for rank in range(size)
                for pair in spec.pairs
                if pair[end] == rank and turn_of(spec.mailbox(*pair), rank, size) == turn
            ]
            assert sorted(peers) == list(range(size))


def batch_of(rank: int, spec: ChannelSpec) -> Requests:
    batch = Requests()
    for pair in spec.pairs:
        if pair[0] == rank:
            batch.sends.append((spec.mailbox(*pair), torch.zeros(spec.shape, dtype=torch.uint8)))
        if pair[1] == rank:
            batch.receives.append(spec.mailbox(*pair))
            batch.releases.append(spec.mailbox(*pair))
    return batch


def test_equal_batches_have_equal_orders_and_different_ones_do_not():
    spec, world = ChannelSpec(all_pairs(4), (8,)), SimpleNamespace(rank=1, size=4)
    batch = batch_of(1, spec)
    ordered = OrderedBatch.of(batch, world)
    assert [mailbox.destination for mailbox, _ in ordered.sends] == [2, 3, 0]
    assert [mailbox.source for mailbox in ordered.receives] == [2, 3, 0]
    batch.sends.reverse()
    batch.receives.reverse()
    assert OrderedBatch.of(batch, world) == ordered and hash(OrderedBatch.of(batch, world)) == hash(ordered)
    batch.sends[0] = batch.sends[0][0], torch.zeros(8, dtype=torch.uint8)
    assert OrderedBatch.of(batch, world) != ordered


def driver_calls(monkeypatch, spec: ChannelSpec, rank: int) -> list[Any]:
    """Return the driver calls of the copy engine's mover: names of memory operations, and copies."""
    calls: list[Any] = []

    def call(name: str, *arguments: Any) -> None:
        stream = arguments[0] if name == "cuStreamBatchMemOp" else arguments[-1]
        assert stream == 7
        if name == "cuStreamBatchMemOp":
            assert arguments[1] == len(arguments[2])
            calls.append(list(arguments[2]))
        else:
            assert name == "cuMemcpyAsync" and arguments[2] == spec.nbytes
            calls.append(("copy", arguments[0]))

    monkeypatch.setattr(copy_engine, "call", call)
    mover = CopyEngineMover.__new__(CopyEngineMover)
    mover.spec = spec
    landing = {mailbox.number: torch.zeros(spec.nbytes, dtype=torch.uint8) for mailbox in spec.mailboxes}
    mover.slot, mover.received = lambda mailbox: mailbox.number, lambda mailbox: landing[mailbox.number]
    keys = [(word, mailbox.number) for mailbox in spec.mailboxes for word in ("sent", "taken")]
    mover._waits = {(word, number): [f"wait {word}"] * 4 for word, number in keys}
    mover._signals = {(word, number): [word] for word, number in keys}
    mover.enqueue(OrderedBatch.of(batch_of(rank, spec), SimpleNamespace(rank=rank, size=4)), 7)
    return calls


def test_puts_enqueue_one_copy_between_memory_operations(monkeypatch):
    spec = ChannelSpec(all_pairs(4), (1000,), protocol="put", transport="copy_engine")
    slot = [spec.mailbox(0, peer).number for peer in (1, 2, 3)]
    wait, received = ["wait taken"] * 4, ["wait sent"] * 4
    assert driver_calls(monkeypatch, spec, 0) == [
        ["taken"] * 3 + wait,
        ("copy", slot[0]),
        ["sent", *wait],
        ("copy", slot[1]),
        ["sent", *wait],
        ("copy", slot[2]),
        ["sent", *received * 3],
    ]


def test_gets_signal_each_message_right_after_its_copy(monkeypatch):
    spec = ChannelSpec(((1, 0), (2, 0)), (1000,), protocol="get", transport="copy_engine")
    kinds = [entry if isinstance(entry, list) else entry[0] for entry in driver_calls(monkeypatch, spec, 0)]
    wait = ["wait sent"] * 4
    assert kinds == [["taken"] * 2 + wait, "copy", ["taken", *wait], "copy", ["taken"]]


def test_batches_of_memory_operations_keep_the_drivers_limit(monkeypatch):
    spec = ChannelSpec(((1, 0),), (0,), protocol="put", transport="copy_engine", slots=100)
    monkeypatch.setattr(OrderedBatch, "of", lambda *_: OrderedBatch((), (), tuple(spec.mailboxes)))
    lengths = [len(entry) for entry in driver_calls(monkeypatch, spec, 0)]
    assert sum(lengths) == 400 and max(lengths) == MAX_BATCH


@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize("sms", [None, 1, 3, 8, 32])
@pytest.mark.parametrize("messages", [1, 3, 7, 32])
@pytest.mark.parametrize("nbytes", [1, 4096, 65_537, 1 << 20, 100 << 20])
def test_copies_use_at_most_the_given_sms(nbytes, messages, sms, pushes):
    spread = spread_of(nbytes, messages, sms, pushes)
    assert 1 <= spread.blocks * (1 if spread.in_turn else messages) <= (sms or MAX_SMS)
    assert spread.ring.shared_bytes <= 227 * 1024 - 1024
    assert bool(spread.gbps) == (pushes and nbytes >= 8 << 20)


class Communicator:
    """Replaces NCCL's communicator."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def exchange(self, sends: list[Any], receives: list[Any], stream: int) -> None:  # noqa: ARG002
        self.asked.append(([(rank, nbytes) for rank, _, nbytes in sends], [(rank, n) for rank, _, n in receives]))


def test_an_nccl_group_of_some_ranks_addresses_them_by_place(monkeypatch):
    monkeypatch.setattr(NcclGroup, "_stream", lambda _: 0)
    group, communicator = NcclGroup.__new__(NcclGroup), Communicator()
    here = torch.device("cpu")
    group.world, group.members, group._places = SimpleNamespace(rank=3, size=4, device=here), (1, 3), {1: 0, 3: 1}
    group._entered, group._words = [0] * 4, [[0] * 4 for _ in range(4)]
    group._communicator = communicator
    group.exchange({1: torch.zeros(5)}, {1: torch.zeros(7), 3: torch.zeros(0)})
    assert communicator.asked == [([(0, 20)], [(0, 28)])]
    assert (group._entered, [words[3] for words in group._words]) == ([0, 1, 0, 1], [0, 1, 0, 1])
    group.world, group._communicator = SimpleNamespace(rank=0, size=4), None
    with pytest.raises(WiringError, match=r"rank 0 .* of ranks \(1, 3\) alone"):
        group.exchange({}, {})
