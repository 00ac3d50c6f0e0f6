"""Parameters of the kernels of a fused or staged exchange that no call changes: grids, regions and sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.structs import Peers
from raymoe.errors import ConfigError
from raymoe.exchange.peer import combine, dispatch, dispatch_grid
from raymoe.exchange.peer.column_pieces import TILE_VECTORS, pieces_of
from raymoe.exchange.peer.combine import CombineCall, CombineGrid, CombineParams
from raymoe.exchange.peer.dealing import Dealing
from raymoe.exchange.peer.dispatch import STAMP_BYTES, DispatchCall, DispatchParams
from raymoe.exchange.peer.dispatch_grid import DispatchGrid, Rows
from raymoe.exchange.peer.ll import CombineLlParams, DispatchLlParams, LlGrid, ll_counting_blocks
from raymoe.exchange.peer.workspace import Slots, Workspace, slot_bytes_of
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8
from raymoe.memory.layout import WORD_STRIDE, round_up

SCALES_ALIGNMENT = 4
"""Floats: bulk loads of a column of scales begin at multiples of 16 bytes."""

STATIC_SHARED = 1024
"""Bytes of static shared memory in the kernels, beside the dynamic size at launch, rounded up."""


@dataclass(frozen=True)
class Grids:
    """How launches of many tokens on at most so many SMs are laid out."""

    sms: int
    dispatch: DispatchGrid
    combine: CombineGrid


@dataclass(frozen=True)
class Build:
    """A spec on a workspace."""

    space: Workspace
    spec: ExchangeSpec
    capacity: int
    local: int
    """Experts a rank."""
    fp8: bool
    raw: bool
    slot_bytes: int
    """Bytes of a row of dispatch in its slot, with its stamp if slots have one."""
    slots: Slots
    scale_stride: int

    @classmethod
    def of(cls, space: Workspace, spec: ExchangeSpec) -> Build:
        ranks = space.world.size
        space.bounds.check(spec, space.stamped)
        slot_bytes = slot_bytes_of(spec, space.stamped)
        capacity = spec.rows(ranks)
        return cls(
            space,
            spec,
            capacity,
            spec.local_experts(ranks),
            spec.dispatch_wire == FP8,
            spec.output == "raw",
            slot_bytes,
            Slots(0, ranks * spec.tokens) if spec.by_copy_engine else Slots.of(space.bounds, slot_bytes, ranks),
            round_up(capacity, SCALES_ALIGNMENT),
        )

    @property
    def rows_region(self) -> str:
        """The region that holds the slots of dispatch."""
        return "dispatch_blocks" if self.spec.by_copy_engine else "dispatch_rows"

    def finding_places(self, source: KernelSource) -> KernelSource:
        """Return the build of a kernel that finds places from counts: for groups of experts if the spec has them."""
        return dispatch.in_groups(source) if self.spec.expert_group > 1 else source

    def fused_grids(self, sms: int) -> Grids:
        """Lay out launches as `grids` does; on few SMs every block of a dispatch sends and places."""
        return self.grids(sms, mixes=True)

    @functools.cached_property
    def _of_all_gpus(self) -> tuple[int, int, bool]:
        """What all ranks' GPUs have: dynamic shared memory of a block, warps of a combine's block, and whether wgmma.

        Their capability 9.0 is the only one with it.
        """
        gpu, retypes = self.space.world.gpu, self.spec.combine_wire != self.spec.dtype
        warps = combine.block_warps(gpu.capability, self.space.stamped, retypes)
        facts = gpu.shared_bytes, warps, gpu.capability == (9, 0)
        gpus: list[tuple[int, int, bool]] = self.space.world.swap(facts, "grids")  # type: ignore[assignment]
        least_shared, warps, has_wgmma = (min(each) for each in zip(*gpus, strict=True))
        return least_shared - STATIC_SHARED, warps, bool(has_wgmma)

    @property
    def sends_pieces(self) -> bool:
        """Whether a combine can run beside the product of its rows: raymoe's own product, of several pieces."""
        spec, (*_, has_wgmma) = self.spec, self._of_all_gpus
        has_product = has_wgmma and spec.dtype != "float32" and spec.hidden % 16 == 0
        return has_product and spec.layout == "expert" and pieces_of(spec.hidden) > 1

    def grids(self, sms: int, mixes: bool = False) -> Grids:
        """Lay out launches of at most one block on each of `sms` SMs.

        Grids are equal on all ranks, because the reader of a sender warp's words must know the number of these warps.
        """
        spec, world, (room, warps, _) = self.spec, self.space.world, self._of_all_gpus
        placed = spec.layout == "expert"
        rows = Rows(
            self.slot_bytes,
            spec.row_bytes,
            spec.tokens,
            spec.topk,
            spec.experts,
            world.size,
            placed,
            fp8=self.fp8,
            dequantised=self.fp8 and placed and not self.raw,
        )
        share = combine.local_share(world.size, spec.topk)
        summing = combine.grid_of(spec.row_bytes, spec.tokens, sms, room, share, warps)
        moving = dispatch_grid.grid_of(rows, sms, room)
        if mixes and dispatch_grid.is_mixed(sms, rows):
            moving = dispatch_grid.mixed(rows, moving, sms, room)
        return Grids(sms, moving, summing)

    def view_slots(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """View all dispatch slots as rows of this spec, the row of zeros last, and as scales if they have some."""
        stride, count = self.slot_bytes, self.slots.zero + 1
        slots = self.space.heap.tensor(self.rows_region)[: count * stride].view(count, stride)
        dtype: torch.dtype = getattr(torch, self.spec.output_dtype)
        if not self.raw:
            return slots[:, : self.spec.row_bytes].view(dtype), None
        elements, end = self.spec.hidden, self.spec.hidden + 4 * self.spec.scales
        return slots[:, :elements].view(dtype), slots[:, elements:end].view(torch.float32)

    def dispatch_params(self, grid: DispatchGrid, parts: int) -> DispatchParams:
        """Return the parameters of a launch of these parts; a call sets the addresses that are 0 here."""
        space = self.space
        rows = space.offset(self.rows_region)
        return DispatchParams(
            **self._dispatch_call(),
            rows=(rows, rows + self.slots.buffer_slots * self.slot_bytes),
            routing_entries=space.buffers("routing_entries"),
            counts=space.buffers("counts"),
            passes=space.buffers("passes"),
            arrivals=space.offset("dispatch_arrivals"),
            done=space.offset("dispatch_done"),
            heads=space.offset("dispatch_heads"),
            taken=space.own("dispatch_taken"),
            counting_words=space.heap.address("counting_words"),
            counting_sums=space.heap.address("counting_sums"),
            half_slots=self.slots.buffer_slots,
            zero_slot=self.slots.zero,
            slot_bytes=self.slot_bytes,
            rank_layout=int(self.spec.layout == "rank"),
            parts=parts,
            senders=grid.senders,
            sender_warps=grid.sender_warps,
            sender_stages=grid.sender_stages,
            together=grid.together,
            at_once=0,
            arrival_stride=round_up(space.bounds.tokens, WORD_STRIDE),
            counting_blocks=grid.counting_blocks,
            placement_blocks=grid.placement_blocks,
            placement_warps=grid.placement_warps,
            placement_stages=grid.placement_stages,
        )

    def dispatch_ll_params(self, grid: LlGrid, sent: Dealing, placed: Dealing) -> DispatchLlParams:
        """Return the parameters of a launch for the most tokens of a call.

        A call with fewer tokens sets `counting_blocks`, `counting_runs` and `sent` for its own number.
        """
        space, spec = self.space, self.spec
        counting_blocks, runs = ll_counting_blocks(spec.tokens * spec.topk, grid.arriving)
        return DispatchLlParams(
            **self._dispatch_call(),
            rows=space.buffers("ll_dispatch_rows"),
            routing_entries=space.buffers("ll_routing_entries"),
            counts=space.buffers("ll_counts"),
            lines=space.bounds.ll_lines,
            entries=space.bounds.ll_entries,
            sent=sent,
            placed=placed,
            counting_blocks=counting_blocks,
            counting_runs=runs,
            leaving_sms=grid.leaving,
            arriving_sms=grid.arriving,
        )

    def combine_params(self, grid: CombineGrid, parts: int, carries: bool = False) -> CombineParams:
        """Return the parameters of a launch of these parts.

        With `carries` a number of each entry is returned beside the sums.
        """
        space, spec = self.space, self.spec
        numbers = combine.number_bytes(spec.topk) if carries else 0
        return CombineParams(
            **self._combine_call(),
            rows=space.buffers("combine_rows"),
            statuses=space.buffers("statuses"),
            arrivals=space.offset("combine_arrivals"),
            done=space.offset("combine_done"),
            heads=space.offset("combine_heads"),
            taken=space.own("combine_taken"),
            stored=0,
            numbers=0,
            returned_numbers=0,
            arrival_stride=space.bounds.pieces,
            wire_row_bytes=spec.combine_row_bytes,
            slot_bytes=spec.combine_row_bytes + numbers + space.stamped * grid.pieces * STAMP_BYTES,
            parts=parts,
            local_blocks=grid.local_blocks,
            local_warps=grid.local_warps,
            together=grid.together,
            final_blocks=grid.final_blocks,
            pieces=grid.pieces,
            first_token=0,
            most_tokens=spec.tokens,
            number_bytes=numbers,
            stored_vectors=grid.piece_tiles * TILE_VECTORS,
        )

    def combine_ll_params(self, grid: LlGrid, reduced: Dealing, summed: Dealing) -> CombineLlParams:
        """Return the parameters as `dispatch_ll_params` does; a call with fewer tokens sets `summed`."""
        space = self.space
        return CombineLlParams(
            **self._combine_call(),
            rows=space.buffers("ll_combine_rows"),
            statuses=space.buffers("ll_statuses"),
            lines=space.bounds.ll_lines,
            reduced=reduced,
            summed=summed,
            leaving_sms=grid.leaving,
            arriving_sms=grid.arriving,
        )

    def _dispatch_call(self) -> dict[str, Any]:
        """Return the fields of a DispatchCall; those that the backend or a call sets are 0."""
        space, spec = self.space, self.spec
        call = DispatchCall(
            peers=Peers.of(space.bases(), space.world.rank),
            watch=space.watch,
            **dict.fromkeys(("x", "x_scales", "topk_idx", "topk_weights", "num_tokens", "out", "scales"), 0),
            **dict.fromkeys(("out_weights", "expert_offsets", "expert_counts", "index"), 0),
            **dict.fromkeys(("entry_places", "masks", "summary"), 0),
            forward=0,
            mark=0,
            record=0,
            trace=space.trace_of("dispatch"),
            operation=space.own("dispatch"),
            scratch=space.own("scratch"),
            wide_topk_idx=0,
            tokens=0,
            slot_tokens=spec.tokens,
            topk=spec.topk,
            experts=spec.experts,
            local=self.local,
            local_inverse=dispatch.local_inverse(self.local),
            row_bytes=spec.row_bytes,
            out_row_bytes=spec.hidden if self.raw else spec.row_bytes,
            hidden=spec.hidden,
            scale_stride=self.scale_stride,
            alignment=spec.alignment,
            capacity=self.capacity,
            zero_padding=int(spec.padding == "zero"),
            op=space.error.number("dispatch"),
            group=spec.expert_group,
            site=0,
            unused=0,
        )
        return vars(call)

    def _combine_call(self) -> dict[str, Any]:
        """Return the fields of a CombineCall; those that the backend or a call sets are 0."""
        space, spec = self.space, self.spec
        call = CombineCall(
            peers=Peers.of(space.bases(), space.world.rank),
            watch=space.watch,
            **dict.fromkeys(("expert_rows", "entry_places", "masks", "summary", "y"), 0),
            trace=space.trace_of("combine"),
            operation=space.own("combine"),
            record=0,
            slot_tokens=spec.tokens,
            tokens=0,
            topk=spec.topk,
            row_bytes=spec.row_bytes,
            weighted=0,
            op=space.error.number("combine"),
            site=0,
            unused=0,
        )
        return vars(call)


def refuse(spec: ExchangeSpec) -> None:
    """Refuse what these kernels cannot do. All ranks have one spec, so all refuse alike."""
    if spec.dispatch_wire == FP8 and spec.output != "raw" and spec.layout == "rank":
        raise ConfigError("layout rank returns the slots, so rows that cross as fp8 stay fp8; set output to raw")
    if spec.output == "raw" and spec.hidden % 16:
        raise ConfigError(f"output raw with hidden {spec.hidden}; rows of fp8 need a multiple of 16 elements")
