"""A backend over NVLink as data: the launches of each operation. `peer_backend.py` runs any such table.

`fused.py`, `staged.py`, `fused_ll.py` and `fused_chunks.py` have the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Field, Launch, Shape
from raymoe.cuda.launcher import Copies, Launcher
from raymoe.cuda.params import Params
from raymoe.exchange.peer.build import Build, Grids
from raymoe.exchange.peer.column_pieces import pieces_of, tiles_of_piece
from raymoe.exchange.peer.combine import ALL_PARTS, CombineCall, beside_product, combine_source, with_ll_statuses
from raymoe.exchange.peer.dispatch import (
    ChunkedDispatchParams,
    DispatchCall,
    DispatchParams,
    dispatch_source,
    in_mixed_blocks,
    routed_again,
)

DISPATCH_ADDRESSES = (
    *("x", "x_scales", "topk_idx", "topk_weights", "num_tokens", "out", "scales"),
    *("out_weights", "expert_offsets", "expert_counts", "index", "entry_places", "masks", "summary"),
)
COMBINE_ADDRESSES = ("expert_rows", "entry_places", "masks", "summary", "y")
"""The addresses that a call sets, in their order."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A launch of an operation: the build of a kernel, its shape, and the parameters that stay the same in all calls.

    Operations that list the same stage share one launch.
    """

    source: KernelSource
    shape: Shape
    params: DispatchCall | CombineCall
    deal: Callable[[Any, int], None] | None = None
    """Sets the parameters (the first argument) that depend on the number of tokens of a call."""

    def ready(self, launcher: Launcher, common: Mapping[type[Params], Mapping[str, Field]]) -> Launch:
        """Make the launch. `common` has parameters that all launches of a kind share."""
        addresses = DISPATCH_ADDRESSES if isinstance(self.params, DispatchCall) else COMBINE_ADDRESSES
        fields = [fields for kind, fields in common.items() if isinstance(self.params, kind)]
        memory = {name: field for values in fields for name, field in values.items()}
        return launcher.ready(self.source, self.shape, self.params, *addresses, **memory)


@dataclass(frozen=True, eq=False)
class CopyStage:
    """Copies of a call's rows, from this rank's slots to the same slots of all other ranks, by the copy engine."""

    source: int
    targets: tuple[int, ...]
    row_bytes: int

    def ready(self, launcher: Launcher, common: Mapping[type[Params], Mapping[str, Field]]) -> Copies:  # noqa: ARG002
        return Copies(launcher.copy, self.source, self.targets, self.row_bytes)


AnyStage: TypeAlias = Stage | CopyStage


@dataclass(frozen=True)
class LaunchTable:
    """The stages of each operation, in the order of their work."""

    dispatch: tuple[AnyStage, ...]
    dispatch_send: tuple[AnyStage, ...]
    dispatch_receive: tuple[AnyStage, ...]
    dispatch_again: tuple[AnyStage, ...]
    """A dispatch in a backward pass, which routes its rows again."""
    combine: tuple[Stage, ...]
    combine_send: tuple[Stage, ...]
    combine_receive: tuple[Stage, ...]
    combine_gradients: tuple[Stage, ...]
    """A combine that also returns a number of each entry: the gradients of weights."""
    dispatch_known: tuple[AnyStage, ...] = ()
    """A dispatch to the places of an earlier one; empty if the backend keeps no places."""
    combine_beside_product: tuple[Stage, ...] = ()
    """A combine of rows that a product stores in pieces of columns; empty if the backend has none."""
    dispatch_beside: tuple[AnyStage, ...] = ()
    """Stages after `dispatch_send` on a stream of their own, which `dispatch_receive` joins."""

    def launches(self) -> Iterator[Stage]:
        """Yield the stages that are launches, some more than once."""
        for stages in vars(self).values():
            yield from (stage for stage in stages if isinstance(stage, Stage))


@dataclass(frozen=True)
class BackendKind:
    """A kind of backend: how it lays out its launches on some SMs, and its table."""

    name: str
    grids: Callable[[Build, int], Grids]
    table: Callable[[Build, Grids], LaunchTable]


@dataclass(frozen=True)
class Stages:
    """Makes the stages that launch kernels/peer/dispatch.cu and combine.cu."""

    build: Build
    grids: Grids
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of all launches of a dispatch that differ from those of backend `fused`."""
    rail_op: int | None = None
    """The number of the operation that an error names where rows come in chunks; None: they do not."""

    def dispatch(self, parts: int, *, again: bool = False, known: bool = False) -> Stage:
        """Make the launch of these parts, for `dispatch_again` or `dispatch_known` if so asked."""
        build, space = self.build, self.build.space
        chunked = self.rail_op is not None
        source = dispatch_source(build.spec.dtype, build.fp8, space.stamped, space.traces, known=known, chunked=chunked)
        source = in_mixed_blocks(source, self.grids.dispatch.mixed)
        params = self._dispatch_params(parts)
        if known:
            # With layout rank too, rows go to their places: their slots change with the parity of the epoch.
            params = replace(params, rank_layout=0)
        else:
            source = build.finding_places(source)
        return Stage(routed_again(source) if again else source, self.grids.dispatch.shape(parts), params)

    def kernel(self, source: KernelSource, shape: Shape, parts: int) -> Stage:
        """Make the launch of another kernel, which takes the parameters of a dispatch."""
        return Stage(source, shape, self._dispatch_params(parts))

    def combine(self, parts: int, *, carries: bool = False, ll_statuses: bool = False) -> Stage:
        """Make the launch of these parts. With `carries` it also returns a number of each entry.

        With `ll_statuses` ranks read one another's statuses where combine_ll.cu does.
        """
        space, spec, grid = self.build.space, self.build.spec, self.grids.combine
        source = combine_source(spec.dtype, space.stamped, space.traces, spec.combine_wire, grid.warps, carries)
        params = self.build.combine_params(grid, parts, carries)
        if ll_statuses:
            source, params = with_ll_statuses(source), replace(params, statuses=space.buffers("ll_statuses"))
        return Stage(source, grid.shape(parts), params)

    def combine_beside_product(self) -> Stage:
        """Make the launch that sends pieces of columns as a product stores them."""
        space, spec = self.build.space, self.build.spec
        grid = self.grids.combine.beside_product(pieces_of(spec.hidden), tiles_of_piece(spec.hidden))
        source = combine_source(spec.dtype, space.stamped, space.traces, spec.combine_wire, grid.warps)
        params = self.build.combine_params(grid, ALL_PARTS)
        return Stage(beside_product(source), replace(grid.shape(ALL_PARTS), early=True), params)

    def _dispatch_params(self, parts: int) -> DispatchParams:
        params = replace(self.build.dispatch_params(self.grids.dispatch, parts), **self.changes)
        return params if self.rail_op is None else ChunkedDispatchParams(**vars(params), rail_op=self.rail_op)
