"""Backend `fused`: dispatch and combine on GPUs, each as one kernel, or as two that leave room for work between them.

Nothing waits for the host. A call enqueues a launch whose parameters are addresses. The kernels read everything that
changes from run to run (epochs, counts, tokens) from device memory. So a captured call can be replayed with new tokens,
new routing and a new `num_tokens`. Launches are made once; a call sets the addresses of its tensors and enqueues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from struct import Struct

import torch

from raymoe.cuda.current import capturing
from raymoe.cuda.gpu import HostWords
from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Function, Launch, Shape
from raymoe.errors import CaptureError, ConfigError
from raymoe.exchange.backend import Dispatched, Ids, Tokens
from raymoe.exchange.peer import combine, dispatch
from raymoe.exchange.peer.build import Build, refuse
from raymoe.exchange.peer.combine import CombineGrid, CombineParams, combine_source
from raymoe.exchange.peer.dispatch import DispatchParams, RefusalRecord, dispatch_source, routed_again
from raymoe.exchange.peer.dispatch_grid import DispatchGrid
from raymoe.exchange.peer.kernel_result import KernelDispatched, Metadata, SavedMetadata, keep_for_current_stream
from raymoe.exchange.peer.workspace import Workspace
from raymoe.exchange.refusal import NO_REFUSAL, Refusal, judge_backward, judge_statuses
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World

DISPATCH_ADDRESSES = (
    *("x", "x_scales", "topk_idx", "topk_weights", "num_tokens", "out", "scales"),
    *("out_weights", "expert_offsets", "expert_counts", "index", "home", "masks", "got"),
)
COMBINE_ADDRESSES = ("expert_rows", "home", "masks", "got", "y")
"""The parameters that a call sets, in their order."""

_RECORD_WORDS = RefusalRecord.nbytes() // 8
COMBINES, BACKWARD = 0, 1
"""Kinds of refused operations: combines, and dispatches in backward passes."""


def _refuse_in_capture(device: torch.device) -> None:
    if capturing(device):
        raise CaptureError("the first backward pass of an exchange inside a capture; run one before, eagerly")


class FusedBackend:
    """Backend `fused`, on a workspace of its own or on one that it shares with other exchanges."""

    capturable = True
    whole_combine: tuple[int, ...] = (combine.ALL_PARTS,)
    """The parts of each launch of a combine that is one call."""

    def __init__(self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int) -> None:
        self.world, self.spec = world, spec
        self._carrying: tuple[Launch, ...] = ()
        self._known: Launch | None = None
        self._again: dict[int, Launch] = {}
        refuse(spec)
        self._own_workspace = workspace is None
        self.workspace = Workspace(world, spec) if workspace is None else workspace
        if self.workspace.world is not world:
            raise ConfigError("the workspace belongs to another world; make one of this exchange's own world")
        self.build = Build.of(self.workspace, spec)
        gpu = world.gpu
        self.dispatch_grid, self.combine_grid = self._grids(sms)
        # The GPU gives blocks to SMs that have none, as long as there are some.
        self.sms = min(gpu.sms, max(shape.blocks for shape in self._largest_shapes()))
        kernels = self.workspace.kernels
        self._dispatch = kernels.function(self.build.finding_places(self._dispatch_source(known=False)))
        summing = kernels.function(self._combine_source(carries=False))
        # Of combines, then of dispatches in backward passes.
        self._refusals = HostWords(gpu, 2 * _RECORD_WORDS)
        self._device_records: torch.Tensor | None = None
        self._mark: torch.Tensor | None = None
        self._raised_epochs = [0, 0]
        self._zero_padding = spec.padding == "zero"
        self._slot_rows = self._slot_scales = None
        if spec.layout == "rank":
            self._slot_rows, self._slot_scales = self.build.view_slots()
        self._metadata = Metadata.of(
            world.size, spec.tokens, spec.topk, self.build.local, self.build.capacity, indexed=spec.layout == "rank"
        )
        self._dispatches = {parts: self._dispatch_launch(self._dispatch, parts) for parts in self._dispatch_parts()}
        self._combines = {parts: self._combine_launch(summing, parts) for parts in self._combine_parts()}

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        return self._whole_dispatch(self._dispatches, tokens, out)

    def _whole_dispatch(self, launches: Mapping[int, Launch], tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """Enqueue a dispatch by these launches of kernels/peer/dispatch.cu, by the parts that each does."""
        self.workspace.begin("dispatch")
        got = self._new_result(tokens, out)
        self._enqueue("dispatch", self._set_dispatch_addresses(launches[dispatch.ALL_PARTS], got, tokens))
        return got

    def dispatch_send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """Send the rows. The result holds nothing before `dispatch_receive`."""
        self.workspace.begin("dispatch")
        got = self._new_result(tokens, out)
        self._enqueue("dispatch", self._dispatch_at(got, tokens, dispatch.ROUTE | dispatch.SEND))
        self.workspace.sent("dispatch", self)
        return got

    def dispatch_receive(self, got: Dispatched, tokens: Tokens) -> None:
        """Wait for the rows and copy them to their places."""
        self.workspace.begin_receive("dispatch", self)
        self._keep_for_receive(got, tokens)
        self._enqueue("dispatch", self._dispatch_at(got, tokens, dispatch.PLACE))
        self.workspace.received("dispatch")

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        self.workspace.begin("combine")
        self._enqueue("combine", self._combine_at(rows, got, weighted, out, combine.ALL_PARTS))

    def combine_send(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        """Sum the rows of this rank's experts, and send the sums."""
        self.workspace.begin("combine")
        self._enqueue("combine", self._combine_at(rows, got, weighted, out, combine.REDUCE))
        self.workspace.sent("combine", self)

    def combine_receive(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        """Wait for the ranks' sums and add them."""
        self.workspace.begin_receive("combine", self)
        self._enqueue("combine", self._combine_at(rows, got, weighted, out, combine.SUM))
        self.workspace.received("combine")

    @property
    def metadata_words(self) -> int:
        return self._metadata.nbytes // 4

    def pack(self, got: Dispatched) -> torch.Tensor:
        saved = got.saved(SavedMetadata)
        return saved.memory

    def unpack(self, metadata: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: Ids) -> Dispatched:  # noqa: ARG002
        """Make the result of a dispatch again. Its weights are in `metadata` too."""
        # An operator's tensor does not say on which stream it was allocated, and callers do not see this one.
        keep_for_current_stream(metadata)
        saved = SavedMetadata(metadata, metadata.data_ptr(), self._metadata, self.workspace.stream())
        return KernelDispatched.over(rows, None, len(ids.topk_idx), saved, self)

    def combine_gradients(
        self, rows: torch.Tensor, weights: torch.Tensor, got: Dispatched, out: torch.Tensor, out_weights: torch.Tensor
    ) -> None:
        """Combine without weights, by kernels/peer/combine.cu with CARRIES: the number of each place goes home too."""
        self.workspace.begin("combine")
        carrying, weights = self._prepared_carrying(), weights.contiguous()
        launches = [self._set_combine_addresses(each, rows, got, False, out) for each in carrying]
        for launch in launches:
            launch.fields.numbers, launch.fields.numbers_home = weights.data_ptr(), out_weights.data_ptr()
        self._enqueue("combine", *launches)

    @property
    def keeps_places(self) -> bool:
        return not self.build.fp8

    def dispatch_known(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> None:
        self.workspace.begin("dispatch")
        self._keep_for_this_stream(got)
        self._enqueue("dispatch", *self._known_launches(x, got, out))

    def dispatch_again(self, tokens: Tokens, out: torch.Tensor | None, forward: Dispatched) -> Dispatched:
        if not self._again:
            _refuse_in_capture(self.world.device)
            self._again = self._again_launches()
        self._keep_for_this_stream(forward)
        for prepared in self._again.values():
            self._set_pass(prepared, forward)
        return self._whole_dispatch(self._again, tokens, out)

    def _again_launches(self) -> dict[int, Launch]:
        """The launches of a dispatch in a backward pass that routes its rows again, by the parts that each does."""
        source = self.build.finding_places(self._dispatch_source(known=False))
        function = self.workspace.kernels.function(routed_again(source))
        return {parts: self._dispatch_launch(function, parts) for parts in self._whole_parts()}

    def _whole_parts(self) -> tuple[int, ...]:
        """The parts of each launch of kernels/peer/dispatch.cu in a dispatch that is one call."""
        return (dispatch.ALL_PARTS,)

    def _set_pass(self, prepared: Launch, forward: Dispatched) -> None:
        """Let a launch say that it belongs to the backward pass of the dispatch `forward`."""
        saved, fields = forward.saved(SavedMetadata), prepared.fields
        fields.forward, fields.record = saved.address + self._metadata.at["got"], self._record(BACKWARD)
        fields.site, fields.mark = forward.site, 0 if self._mark is None else self._mark.data_ptr()

    def _known_launches(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> tuple[Launch, ...]:
        return (self._set_known_addresses(self._prepared_known(), x, got, out),)

    def _known_parts(self) -> int:
        return dispatch.SEND | dispatch.PLACE

    def _prepared_known(self) -> Launch:
        """The launch of kernels/peer/dispatch.cu for known routing, made at the first backward pass."""
        if self._known is None:
            _refuse_in_capture(self.world.device)
            space = self.workspace
            # With layout rank too, rows go to their places: their slots change with the parity of the epoch.
            params = replace(self._dispatch_params(self._known_parts()), rank_layout=0)
            shape = self.dispatch_grid.shape(self._known_parts())
            function = space.kernels.function(self._dispatch_source(known=True))
            self._known = Launch(function, shape, params, addresses=DISPATCH_ADDRESSES)
        return self._known

    def _set_known_addresses(self, prepared: Launch, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> Launch:
        """Set the addresses of a launch that reads the metadata of `got`. It reads no ids and no weights."""
        saved, at = got.saved(SavedMetadata), self._metadata.at
        memory = saved.address
        sent = memory + at["got"] + 4 * self.world.rank  # of Got.tokens: those that the dispatch has sent
        results = (memory + at[name] for name in ("weights", "expert_offsets", "expert_counts"))
        kept = (memory + at[name] for name in ("home", "masks", "got"))
        prepared.set_addresses(x.data_ptr(), 0, 0, 0, sent, out.data_ptr(), 0, *results, 0, *kept)
        prepared.fields.tokens = got.tokens
        self._set_pass(prepared, got)
        return prepared

    def _keep_for_this_stream(self, got: Dispatched) -> None:
        """Keep the metadata of a dispatch for an operation on the current stream."""
        saved = got.saved(SavedMetadata)
        self.workspace.error.check()
        if saved.stream != self.workspace.stream():
            keep_for_current_stream(saved.memory)

    def _prepared_carrying(self) -> tuple[Launch, ...]:
        """The launches of a combine that carries numbers, made at the first backward pass."""
        if not self._carrying:
            _refuse_in_capture(self.world.device)
            function = self.workspace.kernels.function(self._combine_source(carries=True))
            self._carrying = tuple(self._combine_launch(function, parts, carries=True) for parts in self.whole_combine)
        return self._carrying

    def check(self) -> None:
        torch.cuda.synchronize(self.world.device)  # bounded, because every wait of the kernels is
        # A step whose backward passes differ may refuse its combines too, or leave ranks out of step, because of that.
        combines = self._take_refused(COMBINES)
        refused = judge_backward(self._take_refused(BACKWARD)) or judge_statuses(combines, self.spec)
        if (failed := self.workspace.error.error()) is not None:
            raise failed from refused
        if refused is not None:
            raise refused

    def _take_refused(self, kind: int) -> list[Refusal]:
        """The statuses of all ranks in the last refused operation of this kind, once; else no refusals."""
        words = self._refusals.words[kind * _RECORD_WORDS : (kind + 1) * _RECORD_WORDS]
        if (epoch := int(words[0])) <= self._raised_epochs[kind]:
            return [NO_REFUSAL] * self.world.size
        self._raised_epochs[kind] = epoch
        packed, size = Struct(f"={len(words)}Q").pack(*words)[16:], Refusal.NBYTES
        return [Refusal.unpack(packed[size * rank : size * (rank + 1)]) for rank in range(self.world.size)]

    # Between domains (raymoe/exchange/domains/hierarchical_gpu.py).

    def refusal_record(self) -> torch.Tensor:
        """Let refused operations write their statuses to words on the device from now on, instead of to the host."""
        words = torch.zeros(2, _RECORD_WORDS, dtype=torch.int64, device=self.world.device)
        self._device_records = words  # keeps the memory while kernels may write to it
        for prepared in self._all_combines():
            prepared.fields.record = self._record(COMBINES)
        return words[COMBINES]

    def backward_record(self) -> torch.Tensor:
        """The same words for dispatches in backward passes, after `refusal_record`."""
        assert self._device_records is not None
        return self._device_records[BACKWARD]

    def mark_passes(self, word: torch.Tensor) -> None:
        """Let backward passes that begin where `word`, int64[1], is not 0 be refused by the whole domain."""
        self._mark = word

    def _record(self, kind: int) -> int:
        """The address of the words to which refused operations of this kind write their statuses."""
        words = self._device_records
        return self._refusals.device_address(kind * _RECORD_WORDS) if words is None else words[kind].data_ptr()

    def check_waits(self) -> None:
        self.workspace.error.check()

    def close(self, together: bool) -> None:  # noqa: ARG002
        torch.cuda.synchronize(self.world.device)
        self._refusals.close()
        if self._own_workspace:
            self.workspace.close()

    def _grids(self, sms: int) -> tuple[DispatchGrid, CombineGrid]:
        return self.build.grids(sms)

    def _dispatch_parts(self) -> tuple[int, ...]:
        """The parts of each launch of kernels/peer/dispatch.cu: all of them, or those of a send, or of a receive."""
        return dispatch.ALL_PARTS, dispatch.ROUTE | dispatch.SEND, dispatch.PLACE

    def _combine_parts(self) -> tuple[int, ...]:
        return combine.ALL_PARTS, combine.REDUCE, combine.SUM

    def _all_combines(self) -> list[Launch]:
        return [*self._combines.values(), *self._carrying]

    def _largest_shapes(self) -> list[Shape]:
        """The shapes of the largest launches."""
        return [self.dispatch_grid.shape(dispatch.ALL_PARTS), self.combine_grid.shape(combine.ALL_PARTS)]

    def _dispatch_launch(self, function: Function, parts: int) -> Launch:
        shape, params = self.dispatch_grid.shape(parts), self._dispatch_params(parts)
        return Launch(function, shape, params, addresses=DISPATCH_ADDRESSES)

    def _dispatch_source(self, known: bool) -> KernelSource:
        """The kernel of a dispatch, with known routing or without."""
        space = self.workspace
        return dispatch_source(self.spec.dtype, self.build.fp8, space.stamped, space.traces, known=known)

    def _combine_source(self, carries: bool) -> KernelSource:
        space, spec, warps = self.workspace, self.spec, self.combine_grid.warps
        return combine_source(spec.dtype, space.stamped, space.traces, spec.combine_wire, warps, carries)

    def _combine_launch(self, function: Function, parts: int, carries: bool = False) -> Launch:
        params = self._combine_params(parts, carries)
        return Launch(function, self.combine_grid.shape(parts), params, addresses=COMBINE_ADDRESSES)

    def _dispatch_params(self, parts: int) -> DispatchParams:
        """The parameters, but for those that calls set."""
        return self.build.dispatch_params(self.dispatch_grid, parts)

    def _combine_params(self, parts: int, carries: bool = False) -> CombineParams:
        return self.build.combine_params(self.combine_grid, parts, self._record(COMBINES), carries)

    def _new_result(self, tokens: Tokens, out: torch.Tensor | None) -> KernelDispatched:
        """Allocate a dispatch's metadata; it belongs to the result, so several results can be in use at once."""
        self.workspace.error.check()
        memory = torch.empty(self._metadata.nbytes // 4, dtype=torch.int32, device=self.world.device)
        x = self._slot_rows if out is None else out
        assert x is not None
        saved = SavedMetadata(memory, memory.data_ptr(), self._metadata, self.workspace.stream())
        return KernelDispatched.over(x, self._new_scales(), tokens.x.shape[0], saved, self)

    def _new_scales(self) -> torch.Tensor | None:
        """Allocate the scales of raw rows, block after block as DeepGEMM takes them, unless the slots hold them."""
        if not self.build.raw or self._slot_scales is not None:
            return self._slot_scales
        whole = torch.empty(self.spec.scales, self.build.scale_stride, dtype=torch.float32, device=self.world.device)
        return whole.T[: self.build.capacity]

    def _keep_for_receive(self, got: Dispatched, tokens: Tokens) -> None:
        """Keep the memory that a receive reads, which may be on another stream than the send."""
        saved = got.saved(SavedMetadata)
        if saved.stream != self.workspace.stream():
            keep_for_current_stream(saved.memory, tokens.num_tokens, got.scales if self._slot_scales is None else None)

    def _enqueue(self, op: str, *launches: Launch) -> None:
        """Enqueue launches on the current stream."""
        sms = launches[0].sms if len(launches) == 1 else max(launch.sms for launch in launches)
        self.workspace.enqueue(op, sms, launches)

    def _dispatch_at(self, got: Dispatched, tokens: Tokens, parts: int) -> Launch:
        """Return the launch of these parts of a dispatch, with the addresses of this call's tensors."""
        return self._set_dispatch_addresses(self._dispatches[parts], got, tokens)

    def _set_dispatch_addresses(self, prepared: Launch, got: Dispatched, tokens: Tokens) -> Launch:
        saved, at = got.saved(SavedMetadata), self._metadata.at
        memory = saved.address
        in_slots = self._slot_rows is not None
        prepared.set_addresses(
            tokens.x.data_ptr(),
            0 if tokens.scales is None else tokens.scales.data_ptr(),
            tokens.topk_idx.data_ptr(),
            tokens.topk_weights.data_ptr(),
            0 if tokens.num_tokens is None else tokens.num_tokens.data_ptr(),
            0 if in_slots else got.x.data_ptr(),
            0 if in_slots or got.scales is None else got.scales.data_ptr(),
            memory + at["weights"],
            memory + at["expert_offsets"],
            memory + at["expert_counts"],
            memory + at["index"] if in_slots else 0,
            memory + at["home"],
            memory + at["masks"],
            memory + at["got"],
        )
        fields = prepared.fields
        fields.wide_topk_idx = tokens.topk_idx.dtype is torch.int64
        fields.zero_padding = self._zero_padding and tokens.zero_gaps
        fields.tokens = got.tokens
        return prepared

    def _combine_at(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor, parts: int) -> Launch:
        """Return the launch of these parts of a combine, with the addresses of this call's tensors."""
        return self._set_combine_addresses(self._combines[parts], rows, got, weighted, out)

    def _set_combine_addresses(
        self, prepared: Launch, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor
    ) -> Launch:
        saved, at = got.saved(SavedMetadata), self._metadata.at
        self._keep_for_this_stream(got)
        memory = saved.address
        addresses = memory + at["home"], memory + at["masks"], memory + at["got"]
        prepared.set_addresses(rows.data_ptr(), *addresses, out.data_ptr())
        fields = prepared.fields
        fields.tokens = got.tokens
        fields.weighted = weighted
        fields.site = got.site
        return prepared
