"""The protocol, as the steps of every thread that takes part.

A thread stands for blocks of a kernel that do one thing: a lane that sends rows, a router, a placer, the last block on
its way out. words.py has those of the way of many tokens, blocks.py what differs where rows go by the copy engine,
lines.py the way of few tokens. `docs/protocol.md` is the same in words; the kernels are what both describe.
"""

from __future__ import annotations

from dataclasses import replace

from tests.explorer.blocks import BlockKernel
from tests.explorer.case import Case, Launch
from tests.explorer.kernel import Kernel
from tests.explorer.lines import LineKernel
from tests.explorer.memory import Memory
from tests.explorer.steps import Thread
from tests.explorer.words import WordKernel

_WAYS = {"words": WordKernel, "stages": WordKernel, "blocks": BlockKernel, "lines": LineKernel}


def _kernel(case: Case, memory: Memory, launch: Launch, rank: int, first: int) -> Kernel:
    ours = launch.kind in ("dispatch", "combine", "copies")
    if launch.kind == "combine":
        launch = replace(launch, dispatch=case.combined(rank, launch.number))
    return (_WAYS[launch.way] if ours else Kernel)(case, memory, launch, rank, first)


def threads(case: Case, memory: Memory) -> list[Thread]:
    """Of all ranks, by rank and launch."""
    found: list[Thread] = []
    for rank in range(case.ranks):
        for place, launch in enumerate(case.launches()):
            steps = _kernel(case, memory, launch, rank, len(found)).threads()
            found += [Thread(rank, place, role, each) for role, each in steps.items()]
    return found
