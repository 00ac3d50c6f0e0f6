"""The protocol as the steps of all threads that take part.

A thread of the model stands for a part of a kernel: a warp that sends rows, a counting block, a placement block, the
last block out. words.py has the path with words, lines.py the LL path. blocks.py and chunks.py have the differences
where rows go by the copy engine, and where they come in chunks.
`docs/internals/protocol.md` describes the same protocol, and the kernels implement it.
"""

from __future__ import annotations

from dataclasses import replace

from tests.explorer.blocks import BlockKernel
from tests.explorer.case import Case, Launch
from tests.explorer.chunks import ChunkedKernel, CrossingKernel
from tests.explorer.kernel import Kernel
from tests.explorer.lines import LineKernel
from tests.explorer.memory import Memory
from tests.explorer.steps import Thread
from tests.explorer.words import WordKernel

_PATHS = {"words": WordKernel, "stages": WordKernel, "blocks": BlockKernel, "lines": LineKernel}


def _kernel(case: Case, memory: Memory, launch: Launch, rank: int, first: int) -> Kernel:
    in_workspace = launch.kind in ("dispatch", "combine", "copies")
    if launch.kind == "combine":
        launch = replace(launch, dispatch=case.combined(rank, launch.number))
    if launch.kind == "crossing":
        return CrossingKernel(case, memory, launch, rank, first)
    if launch.crossing:
        return ChunkedKernel(case, memory, launch, rank, first)
    return (_PATHS[launch.path] if in_workspace else Kernel)(case, memory, launch, rank, first)


def threads(case: Case, memory: Memory) -> list[Thread]:
    """The threads of all ranks, in the order (rank, launch)."""
    found: list[Thread] = []
    for rank in range(case.ranks):
        for index, launch in enumerate(case.launches()):
            steps = _kernel(case, memory, launch, rank, len(found)).threads()
            found += [Thread(rank, index, role, each) for role, each in steps.items()]
    return found
