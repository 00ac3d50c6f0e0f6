"""What the kernels of a fused or staged exchange are given that no call changes: its grids, regions and sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raymoe.device import combine, dispatch, dispatch_grid
from raymoe.device.combine import CombineGrid, CombineParams
from raymoe.device.dealing import NOTHING_DEALT
from raymoe.device.dispatch import STAMP_BYTES, DispatchParams
from raymoe.device.dispatch_grid import DispatchGrid, Rows
from raymoe.device.structs import Peers
from raymoe.errors import ConfigError
from raymoe.exchange.spec import FP8, ExchangeSpec
from raymoe.exchange.workspace import Slots, Workspace, slot_bytes_of
from raymoe.memory.layout import WORD_STRIDE, round_up

SCALES_ALIGNMENT = 4
"""Floats: bulk loads of a column of scales begin at multiples of 16 bytes."""

STATIC_SHARED = 1024
"""What the kernels keep in shared memory beside what they are launched with, rounded up."""


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
    """A row of dispatch in its slot, with its stamp where slots have one."""
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
        """Where the slots of dispatch lie."""
        return "dispatch_blocks" if self.spec.by_copy_engine else "dispatch_rows"

    def grids(self, sms: int) -> tuple[DispatchGrid, CombineGrid]:
        """Launches of at most one block on each of `sms` SMs. They are the same on all ranks, because the reader of a
        lane's words must know how many lanes there are."""
        spec, world = self.spec, self.space.world
        gpu, retypes = world.gpu, spec.combine_wire != spec.dtype
        warps = combine.block_warps(gpu.capability, self.space.stamped, retypes)
        gpus: list[tuple[int, ...]] = world.swap((gpu.shared_bytes, warps), "grids")  # type: ignore[assignment]
        least_shared, warps = (min(facts) for facts in zip(*gpus, strict=True))
        room = least_shared - STATIC_SHARED
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
        share = combine.reducing_share(world.size, spec.topk)
        summing = combine.grid_of(spec.row_bytes, spec.tokens, sms, room, share, warps)
        return dispatch_grid.grid_of(rows, sms, room), summing

    def view_slots(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All dispatch slots as rows of this spec, the row of zeros last, and their scales where they have some."""
        stride, count = self.slot_bytes, self.slots.zero + 1
        slots = self.space.heap.tensor(self.rows_region)[: count * stride].view(count, stride)
        dtype: torch.dtype = getattr(torch, self.spec.output_dtype)
        if not self.raw:
            return slots[:, : self.spec.row_bytes].view(dtype), None
        elements, behind = self.spec.hidden, self.spec.hidden + 4 * self.spec.scales
        return slots[:, :elements].view(dtype), slots[:, elements:behind].view(torch.float32)

    def _ll(self, region: str) -> tuple[int, int]:
        """The buffers of a region that a workspace has if one of its specs has few tokens."""
        return self.space.buffers(region) if self.space.bounds.ll_entries else (0, 0)

    def dispatch_params(self, grid: DispatchGrid, parts: int) -> DispatchParams:
        """Those of a launch of these parts; a call sets the addresses that are 0 here."""
        space, spec = self.space, self.spec
        rows = space.offset(self.rows_region)
        return DispatchParams(
            peers=Peers.of(space.bases(), space.world.rank),
            watch=space.watch,
            rows=(rows, rows + self.slots.buffer_slots * self.slot_bytes),
            told=space.buffers("told"),
            counts=space.buffers("counts"),
            arrivals=space.offset("dispatch_arrivals"),
            done=space.offset("dispatch_done"),
            heads=space.offset("dispatch_heads"),
            ll_rows=self._ll("ll_dispatch_rows"),
            ll_told=self._ll("ll_told"),
            ll_counts=self._ll("ll_counts"),
            **dict.fromkeys(("x", "x_scales", "ids", "weights", "num_tokens", "out", "scales", "out_weights"), 0),
            **dict.fromkeys(
                ("expert_offsets", "expert_counts", "index", "home", "masks", "got", "wide_ids", "tokens"), 0
            ),
            parts=parts,
            trace=space.trace_of("dispatch"),
            operation=space.own("dispatch"),
            scratch=space.own("scratch"),
            taken=space.own("dispatch_taken"),
            router_words=space.heap.address("router_words"),
            router_counts=space.heap.address("router_counts"),
            half_slots=self.slots.buffer_slots,
            zero_slot=self.slots.zero,
            slot_tokens=spec.tokens,
            topk=spec.topk,
            experts=spec.experts,
            local=self.local,
            local_inverse=dispatch.local_inverse(self.local),
            row_bytes=spec.row_bytes,
            out_row_bytes=spec.hidden if self.raw else spec.row_bytes,
            slot_bytes=self.slot_bytes,
            hidden=spec.hidden,
            scale_stride=self.scale_stride,
            alignment=spec.alignment,
            capacity=self.capacity,
            zero_padding=int(spec.padding == "zero"),
            rank_layout=int(spec.layout == "rank"),
            op=space.error.number("dispatch"),
            senders=grid.senders,
            sender_lanes=grid.sender_lanes,
            sender_stages=grid.sender_stages,
            together=grid.together,
            at_once=0,
            arrival_stride=round_up(space.bounds.tokens, WORD_STRIDE),
            ll_lines=space.bounds.ll_lines,
            ll_entries=space.bounds.ll_entries,
            ll_sent=NOTHING_DEALT,
            ll_placed=NOTHING_DEALT,
            routers=grid.routers,
            router_runs=0,
            placers=grid.placers,
            placer_lanes=grid.placer_lanes,
            placer_stages=grid.placer_stages,
        )

    def combine_params(self, grid: CombineGrid, parts: int, record: int) -> CombineParams:
        """`record` is where the kernel tells the host of refusals."""
        space, spec = self.space, self.spec
        return CombineParams(
            peers=Peers.of(space.bases(), space.world.rank),
            watch=space.watch,
            rows=space.buffers("combine_rows"),
            statuses=space.buffers("statuses"),
            arrivals=space.offset("combine_arrivals"),
            done=space.offset("combine_done"),
            heads=space.offset("combine_heads"),
            ll_rows=self._ll("ll_combine_rows"),
            ll_statuses=self._ll("ll_statuses"),
            **dict.fromkeys(("expert_rows", "home", "masks", "got", "y", "tokens", "weighted"), 0),
            parts=parts,
            trace=space.trace_of("combine"),
            operation=space.own("combine"),
            record=record,
            taken=space.own("combine_taken"),
            arrival_stride=space.bounds.pieces,
            ll_lines=space.bounds.ll_lines,
            ll_reduced=NOTHING_DEALT,
            ll_summed=NOTHING_DEALT,
            slot_tokens=spec.tokens,
            topk=spec.topk,
            row_bytes=spec.row_bytes,
            wire_row_bytes=spec.home_row_bytes,
            slot_bytes=spec.home_row_bytes + space.stamped * grid.pieces * STAMP_BYTES,
            op=space.error.number("combine"),
            reducers=grid.reducers,
            reducer_lanes=grid.reducer_lanes,
            together=grid.together,
            summers=grid.summers,
            pieces=grid.pieces,
        )


def refuse(spec: ExchangeSpec) -> None:
    """What only the kernels cannot do; the same on all ranks, which have one spec."""
    if spec.dispatch_wire == FP8 and spec.output != "raw" and spec.layout == "rank":
        raise ConfigError("layout rank with rows that cross as fp8 gives what is in the slots: take output raw")
    if spec.output == "raw" and spec.hidden % 16:
        raise ConfigError(f"output raw with hidden {spec.hidden}; rows of fp8 need a multiple of 16 elements")
