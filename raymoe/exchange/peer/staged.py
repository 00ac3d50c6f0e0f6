"""Backend `staged`: each operation is several launches, which do one kind of work each, on all SMs.

Workspace, words and results are those of `fused`. Only the movement of dispatched rows differs. A kernel of ordinary
loads and stores (alltoallv.cu) moves them with all SMs, between a launch that routes and one that places. If
rows cross as 8-bit floats, the senders of `fused` quantise and push them instead. A combine is a launch that sums and
pushes, and one that adds the ranks' sums. The backend can be captured, like `fused`, which is measured against it.
"""

from __future__ import annotations

from dataclasses import replace

from raymoe.cuda.launch import Shape
from raymoe.exchange.peer.build import Build, Grids
from raymoe.exchange.peer.combine import REDUCE, SUM
from raymoe.exchange.peer.dispatch import (
    ANNOUNCE,
    ANNOUNCE_THREADS,
    PLACE,
    ROUTE,
    SEND,
    WIDE,
    alltoallv_source,
    pack_source,
)
from raymoe.exchange.peer.table import BackendKind, CopyStage, LaunchTable, Stages

AT_ONCE = {"at_once": 1}
"""Rows by ordinary stores have no arrival words, so the launch that places waits for `done` of all senders."""


def staged_grids(build: Build, sms: int) -> Grids:
    """Give each launch as many blocks as `fused` has for all kinds of work."""
    grids = build.grids(sms)
    blocks = grids.combine.local_blocks + grids.combine.final_blocks
    summing = replace(grids.combine, local_blocks=blocks, final_blocks=blocks)
    if build.fp8:
        return replace(grids, combine=summing)
    return replace(grids, dispatch=replace(grids.dispatch, senders=blocks, sender_warps=WIDE), combine=summing)


def staged_table(build: Build, grids: Grids) -> LaunchTable:
    stages = Stages(build, grids, AT_ONCE)
    route, place = stages.dispatch(ROUTE), stages.dispatch(PLACE)
    alltoallv = stages.kernel(alltoallv_source(build.space.stamped), Shape(grids.dispatch.senders, WIDE * 32), SEND)
    move = stages.dispatch(SEND) if build.fp8 else alltoallv
    reduce_sums, add_sums = stages.combine(REDUCE), stages.combine(SUM)
    return LaunchTable(
        dispatch=(route, move, place),
        dispatch_send=(route, move),
        dispatch_receive=(place,),
        dispatch_again=(stages.dispatch(ROUTE, again=True), move, stages.dispatch(PLACE, again=True)),
        dispatch_known=() if build.fp8 else (move, stages.dispatch(PLACE, known=True)),
        combine=(reduce_sums, add_sums),
        combine_send=(reduce_sums,),
        combine_receive=(add_sums,),
        combine_gradients=(stages.combine(REDUCE, carries=True), stages.combine(SUM, carries=True)),
    )


STAGED = BackendKind("staged", staged_grids, staged_table)

# `staged` by the copy engine: no SM is busy while rows are on the link.
#
# The copy engine knows no tokens. A rank copies all of its T' rows to every other rank, whatever the ids are. First a
# kernel copies rows into the rank's own slots; pack.cu says why the copies do not start in `x`. Then they go to
# the same slots at the peer. Waits and words are those of the other backends, in kernels of their own.
#
# Stream memory operations cannot replace these kernels. The word that one stores is a constant, so it cannot be an
# epoch and would have to be reset after each run. In a captured step, a rank that has given up would also store it. Its
# rows have not come then, and a peer would place old rows. Waits would need the host to bound them. And it took 6 us
# each way where a kernel takes 1 (4x H200, 2026-11-21).
#
# In the split form the copies run on a stream of their own, beside the work between send and receive. The receive joins
# that stream, so a captured send and its receive are in one graph.


def copied_table(build: Build, grids: Grids) -> LaunchTable:
    # The copies are as one warp of one sender: its word announces all rows.
    stages = Stages(build, grids, AT_ONCE | {"senders": 1, "sender_warps": 1})
    route, place = stages.dispatch(ROUTE), stages.dispatch(PLACE)
    blocks = min(-(-build.spec.tokens // WIDE), grids.combine.final_blocks)  # a warp for each row, if there are enough
    pack = stages.kernel(pack_source(build.space.stamped), Shape(blocks, WIDE * 32), SEND)
    copies = _copies(build)
    send, receive, both = (
        stages.kernel(ANNOUNCE, Shape(1, ANNOUNCE_THREADS), parts) for parts in (SEND, PLACE, SEND | PLACE)
    )
    routed_again, placed_again = (stages.dispatch(part, again=True) for part in (ROUTE, PLACE))
    return replace(
        staged_table(build, grids),
        dispatch=(route, pack, copies, both, place),
        dispatch_send=(route, pack),
        dispatch_beside=(copies, send),
        dispatch_receive=(receive, place),
        dispatch_again=(routed_again, pack, copies, both, placed_again),
        # A rank must not copy before it has the heads of its peers (pack.cu), which only counting blocks store.
        dispatch_known=(),
    )


def _copies(build: Build) -> CopyStage:
    space, world = build.space, build.space.world
    block = space.offset(build.rows_region) + world.rank * build.spec.tokens * build.slot_bytes
    # Each rank begins with another peer, so that no link has two copies at once.
    own, *peers = [(world.rank + step) % world.size for step in range(world.size)]
    targets = tuple(space.heap.base(peer) + block for peer in peers)
    return CopyStage(space.heap.base(own) + block, targets, build.slot_bytes)


COPIED = BackendKind("staged by the copy engine", staged_grids, copied_table)
