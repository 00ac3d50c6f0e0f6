"""Torch is told when a second stream uses a dispatch's memory; otherwise it would reuse the memory too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from raymoe.exchange.kernel_result import keep_for_current_stream
from raymoe.exchange.nccl_kernels import Kept
from tests.emulator.machine import Emulator
from tests.emulator.ranks import EmulatedOrder, backend, spec_for, workspaces
from tests.emulator.steps import Steps
from tests.unit.exchange_cases import Case

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
        mock.patch("raymoe.exchange.fused.keep_for_current_stream") as lent,
    ):
        (space,) = workspaces(emulator, spec)
        made = backend(kind, space, spec)
        for name in ("dispatch", "dispatch_send"):
            setattr(made, name, streams.on(FIRST, getattr(made, name)))
        for name in later:
            setattr(made, name, streams.on(second, getattr(made, name)))
        steps = Steps(emulator, Case(1, spec, kind, ("uniform",), ragged=False), [made])
        steps.enqueue(0, form)
        emulator.run(0)
        steps.judge()
    if second == FIRST:
        lent.assert_not_called()
    else:
        assert len(lent.call_args_list) >= len(later)
        assert len({id(call.args[0]) for call in lent.call_args_list}) == 1  # one dispatch has one memory


def test_nccl_backends_lend_memory_to_a_second_stream() -> None:
    kept = Kept(torch.zeros(4), FIRST)
    with mock.patch("raymoe.exchange.nccl_kernels.keep_for_current_stream") as lent:
        assert kept.used_on(FIRST) is kept.memory
        lent.assert_not_called()
        assert kept.used_on(SECOND) is kept.memory
        lent.assert_called_once_with(kept.memory)


def test_memory_is_lent_to_the_current_stream() -> None:
    memory, stream = mock.Mock(), object()
    with mock.patch.object(torch.cuda, "current_stream", return_value=stream):
        keep_for_current_stream(memory, None)
    memory.record_stream.assert_called_once_with(stream)
