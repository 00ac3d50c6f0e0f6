"""Launches and their packed parameters are made once for an exchange, not in every call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from raymoe.cuda.params import Params
from tests.emulator.machine import Emulator
from tests.emulator.ranks import MachineLauncher, backend, spec_for, workspaces
from tests.emulator.steps import Steps
from tests.unit.exchange.exchange_cases import Case


class Counting:
    """Count the calls of a function that come from the raymoe package."""

    def __init__(self) -> None:
        self.count = 0

    def around(self, made: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.count += sys._getframe(1).f_globals["__name__"].startswith("raymoe.")
            return made(*args, **options)

        return counted


@pytest.mark.parametrize("kind", ["fused", "ll", "staged", "copied"])
def test_a_second_dispatch_makes_one_allocation_and_no_launch_object(kind: str) -> None:
    launches, allocations, packed = Counting(), Counting(), Counting()
    spec = spec_for(kind)
    with (
        Emulator(2) as emulator,
        mock.patch.object(MachineLauncher, "ready", launches.around(MachineLauncher.ready)),
        mock.patch.object(Params, "packed", packed.around(Params.packed)),
    ):
        backends = [backend(kind, space, spec) for space in workspaces(emulator, spec)]
        steps = Steps(emulator, Case(2, spec, kind, ("uniform", "uniform"), ragged=False), backends)
        steps.enqueue(0)
        before = launches.count, packed.count
        allocated = sum(each.workspace.launcher.allocations for each in backends)
        with mock.patch("torch.empty", allocations.around(torch.empty)):
            steps.enqueue(1)
        emulator.run(0)
        steps.judge()
        assert (launches.count, packed.count) == before
        assert sum(each.workspace.launcher.allocations for each in backends) - allocated == len(backends)
    assert launches.count > 0
    assert allocations.count == 0
