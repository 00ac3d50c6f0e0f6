"""Backend `fused` for few tokens: rows travel in lines that hold their epoch, so no flag follows them.

The kernels for many tokens keep the links busy. For few tokens most of the time is the wait, the fence and the flag
after each row. peer/ll/lines.cuh explains the idea, dispatch_ll.cu and combine_ll.cu the protocol.
Epochs are those of `fused`, so both kinds of exchange share a workspace. The split form is that of `fused`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raymoe.exchange.peer import combine, ll
from raymoe.exchange.peer.build import Build, Grids
from raymoe.exchange.peer.dispatch import routed_again
from raymoe.exchange.peer.fused import fused_table
from raymoe.exchange.peer.ll import LlGrid
from raymoe.exchange.peer.table import BackendKind, LaunchTable, Stage, Stages


def few_tokens_table(build: Build, grids: Grids) -> LaunchTable:
    """Return the table for specs for which `is_ll` is true."""
    dispatch, many_tokens = _dispatch(build, grids.sms), Stages(build, grids)
    return replace(
        fused_table(build, grids),
        dispatch=(dispatch,),
        dispatch_again=(replace(dispatch, source=routed_again(dispatch.source)),),
        # No line of this path comes without counts: they tell a sender that its peers' readers are done.
        dispatch_known=(),
        combine=(_combine(build, grids.sms),),
        combine_beside_product=(),  # the combine of few tokens takes less time than it would save
        combine_gradients=(many_tokens.combine(combine.ALL_PARTS, carries=True, ll_statuses=True),),
    )


FEW_TOKENS = BackendKind("fused for few tokens", Build.grids, few_tokens_table)


def _dispatch(build: Build, sms: int) -> Stage:
    space, spec, fp8, ranks = build.space, build.spec, build.fp8, build.space.world.size
    # A unit is the least that a warp moves of a row.
    units, groups = ll.row_units(spec.row_bytes, spec.hidden, fp8), 1 if fp8 else ll.SENT
    grid = ll.dispatch_ll_grid(units, spec.tokens, ranks, sms, _is_whole(build, sms), fp8)
    source = grid.build_of(build.finding_places(ll.dispatch_ll_source(spec.dtype, fp8, space.traces)))
    sent = grid.leave(units, groups, spec.tokens)
    placed = grid.arrive(units, 1 if fp8 else ll.PLACED, spec.tokens, ranks)
    params = build.dispatch_ll_params(grid, sent, placed)
    shape = grid.shape(ll.ll_shared_bytes(spec.experts, grid, fp8))
    return Stage(source, shape, params, _deal_sent(grid, units, groups, spec.topk))


def _deal_sent(grid: LlGrid, units: int, groups: int, topk: int) -> Callable[[Any, int], None]:
    """Return a function that deals a call's tokens out to counting blocks and senders. It keeps each result."""
    known: dict[int, tuple[int, int, Any]] = {}

    def deal(fields: Any, tokens: int) -> None:
        dealing = known.get(tokens)
        if dealing is None:
            rows = grid.leave(units, groups, tokens).packed()
            dealing = known[tokens] = (*ll.ll_counting_blocks(tokens * topk, grid.arriving), rows)
        fields.counting_blocks, fields.counting_runs, fields.sent = dealing

    return deal


def _combine(build: Build, sms: int) -> Stage:
    space, spec, ranks = build.space, build.spec, build.space.world.size
    units = ll.row_units(spec.row_bytes, spec.hidden, fp8=False)
    grid = ll.combine_ll_grid(units, spec.tokens, ranks, sms, _is_whole(build, sms))
    reduced = grid.leave(units, ll.REDUCED, spec.tokens, ranks - 1)
    params = build.combine_ll_params(grid, reduced, grid.arrive(units, ll.SUMMED, spec.tokens))
    source = grid.build_of(ll.combine_ll_source(spec.dtype, space.traces))
    return Stage(source, grid.shape(), params, _deal_summed(grid, units))


def _deal_summed(grid: LlGrid, units: int) -> Callable[[Any, int], None]:
    """Return a function that deals a call's tokens out to the warps of the final reduction. It keeps each result."""
    known: dict[int, Any] = {}

    def deal(fields: Any, tokens: int) -> None:
        rows = known.get(tokens)
        if rows is None:
            rows = known[tokens] = grid.arrive(units, ll.SUMMED, tokens).packed()
        fields.summed = rows

    return deal


def _is_whole(build: Build, sms: int) -> bool:
    """Return whether these are all SMs of the GPU."""
    return sms == build.space.world.gpu.sms
