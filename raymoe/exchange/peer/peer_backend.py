"""Dispatch and combine on GPUs that reach one another by NVLink: runs the table of a backend.

A call sets the addresses of its tensors in launches that were made once, and enqueues them. Nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any, cast

import torch

from raymoe.cuda.current import capturing, keep_for_current_stream
from raymoe.cuda.launch import Field, Launch, Shape, value_of
from raymoe.cuda.launcher import Copies
from raymoe.cuda.params import Params
from raymoe.errors import CaptureError, ConfigError
from raymoe.exchange.backend import Dispatched, EntryPlaces, Ids, Tokens
from raymoe.exchange.packed_refusal import PackedRefusal
from raymoe.exchange.peer.build import Build, refuse
from raymoe.exchange.peer.column_pieces import TILE_VECTORS, WORDS, ColumnPieces, sms_beside
from raymoe.exchange.peer.combine import CombineCall, CombineParams
from raymoe.exchange.peer.dispatch import DispatchCall, DispatchSummary, RefusalRecord
from raymoe.exchange.peer.kernel_result import KernelDispatched, Metadata, SavedMetadata
from raymoe.exchange.peer.table import AnyStage, BackendKind, Stage
from raymoe.exchange.peer.workspace import Workspace
from raymoe.exchange.refusal import NO_REFUSAL, Refusal, judge_backward, judge_statuses
from raymoe.exchange.slot_kernel import MARK_DISPATCH, MarkDispatchParams
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World

_RECORD_WORDS = RefusalRecord.nbytes() // 8
_REFUSAL_AT, _NUMBER_AT = (DispatchSummary.offsets()[name] for name in ("refusal", "number"))
COMBINES, BACKWARD = 0, 1
"""Kinds of refused operations: combines, and dispatches in backward passes."""


@dataclass(slots=True)
class LaunchedOperation:
    """The launches of an operation, which a call enqueues one after another."""

    launches: tuple[Launch | Copies, ...]
    deal: Callable[[Any, int], None] | None
    """Sets the parameters of the one launch that depend on the number of tokens (`Stage.deal`)."""
    sms: int
    """The SMs that the operation occupies."""


class PeerBackend:
    """A backend over NVLink, on a workspace of its own or on one that it shares with other exchanges."""

    capturable = True

    def __init__(
        self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int, kind: BackendKind
    ) -> None:
        self.world, self.spec, self.kind = world, spec, kind
        refuse(spec)
        self._own_workspace = workspace is None
        self.workspace = Workspace(world, spec) if workspace is None else workspace
        if self.workspace.world is not world:
            raise ConfigError("the workspace belongs to another world; make one of this exchange's own world")
        self._launcher = self.workspace.launcher
        self.build = Build.of(self.workspace, spec)
        self.table = kind.table(self.build, kind.grids(self.build, sms))
        self.keeps_places = bool(self.table.dispatch_known)
        self._mark: Launch | None = None
        if spec.placed_experts:
            one = Shape(1, 32)
            self._mark = self._launcher.ready(MARK_DISPATCH, one, MarkDispatchParams(), "refusal", "digest")
        # The GPU gives blocks to SMs that have none, as long as there are some.
        self.sms = min(world.gpu.sms, max(stage.shape.blocks for stage in self.table.launches()))
        self._allocate(spec)
        self._make_operations()
        self._pieces: ColumnPieces | None = None

    def _allocate(self, spec: ExchangeSpec) -> None:
        """Prepare the memory of results, and the records of refused operations."""
        self._zero_padding = spec.padding == "zero"
        self._slot_rows = self._slot_scales = None
        if spec.layout == "rank":
            self._slot_rows, self._slot_scales = self.build.view_slots()
        self._metadata = Metadata.of(spec, self.world.size, self._launcher.red_zone)
        at = self._metadata.at
        entries = at["entry_places"], at["masks"], at["summary"]
        self._written = at["weights"], at["expert_offsets"], at["expert_counts"], at.get("index", 0), *entries
        """The offsets in the metadata of what a dispatch writes, in the order of its addresses."""
        words = self._metadata.nbytes // 4
        self._new_memory = self._launcher.allocator((words,), torch.int32, self._metadata.places())
        self._new_scales = self._launcher.allocator((spec.scales, self.build.scale_stride), torch.float32)
        # The record of combines, then the record of dispatches in backward passes.
        self._refusals = self._launcher.words(2 * _RECORD_WORDS)
        self._raised_epochs = [0, 0]
        self._device_records: torch.Tensor | None = None

    def _make_operations(self) -> None:
        table = self.table
        record = self._refusals.device_address
        self._common: dict[type[Params], dict[str, Field]] = {
            DispatchCall: {"record": record(BACKWARD * _RECORD_WORDS)},
            CombineCall: {"record": record(COMBINES * _RECORD_WORDS)},
        }
        """Parameters that have the same value in all launches of a kind."""
        self._launches: dict[AnyStage, Launch | Copies] = {}
        self._side = self._launcher.side_stream() if table.dispatch_beside else None
        self._dispatch = self._operation(table.dispatch)
        self._dispatch_send = self._operation(table.dispatch_send)
        self._dispatch_beside = self._operation(table.dispatch_beside) if table.dispatch_beside else None
        self._dispatch_receive = self._operation(table.dispatch_receive)
        self._combine = self._operation(table.combine)
        self._combine_send = self._operation(table.combine_send)
        self._combine_receive = self._operation(table.combine_receive)
        self._later: dict[str, LaunchedOperation] = {}
        """The operations so far that not every exchange needs, by name."""

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self.workspace.begin("dispatch")
        got, operation = self._new_result(tokens, out), self._dispatch
        self._set_dispatch(operation, got, tokens)
        self.workspace.enqueue("dispatch", operation.sms, operation.launches)
        return got

    def dispatch_send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """Send the rows. The result holds nothing before `dispatch_receive`."""
        self.workspace.begin("dispatch")
        got, operation = self._new_result(tokens, out), self._dispatch_send
        self._set_dispatch(operation, got, tokens)
        self.workspace.enqueue("dispatch", operation.sms, operation.launches)
        if self._side is not None and self._dispatch_beside is not None:
            self._set_dispatch(self._dispatch_beside, got, tokens)
            stream = self._side.begin()
            for launch in self._dispatch_beside.launches:
                launch.enqueue(stream)
        self.workspace.sent("dispatch", self)
        return got

    def dispatch_receive(self, got: Dispatched, tokens: Tokens) -> None:
        """Wait for the rows and copy them to their places."""
        self.workspace.begin_receive("dispatch", self)
        if self._side is not None:
            self._side.join()
        saved = got.saved(SavedMetadata)
        if saved.stream != self.workspace.stream():  # the send was on another one
            keep_for_current_stream(saved.memory, tokens.num_tokens, got.scales if self._slot_scales is None else None)
        self._set_dispatch(self._dispatch_receive, got, tokens)
        self.workspace.enqueue("dispatch", self._dispatch_receive.sms, self._dispatch_receive.launches)
        self.workspace.received("dispatch")

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        self.workspace.begin("combine")
        self._set_combine(self._combine, rows, got, weighted, out)
        self.workspace.enqueue("combine", self._combine.sms, self._combine.launches)

    def combine_send(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        """Sum the rows of this rank's experts, and send the sums."""
        self.workspace.begin("combine")
        self._set_combine(self._combine_send, rows, got, weighted, out)
        self.workspace.enqueue("combine", self._combine_send.sms, self._combine_send.launches)
        self.workspace.sent("combine", self)

    def combine_receive(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        """Wait for the ranks' sums and add them."""
        self.workspace.begin_receive("combine", self)
        self._set_combine(self._combine_receive, rows, got, weighted, out)
        self.workspace.enqueue("combine", self._combine_receive.sms, self._combine_receive.launches)
        self.workspace.received("combine")

    # A combine beside the product of its rows.

    def column_pieces(self, got: Dispatched) -> ColumnPieces | None:
        """Return what a product needs that stores the rows of a dispatch in pieces for `combine_beside_product`.

        None: this backend has no such combine. All ranks get None, or none does.
        """
        if not self.table.combine_beside_product:
            return None
        if self._pieces is None:
            if capturing(self.world.device):
                raise CaptureError("the first combine beside a product inside a capture; run one before, eagerly")
            words = torch.zeros(WORDS, dtype=torch.int64, device=self.world.device)
            (stage,) = self.table.combine_beside_product
            sms = sms_beside(stage.shape.blocks, self.world.size)
            tiles = cast(CombineParams, stage.params).stored_vectors // TILE_VECTORS
            self._pieces = ColumnPieces(words, 0, self.spec.hidden, tiles, sms)
        number = got.saved(SavedMetadata).address + self._metadata.at["summary"] + _NUMBER_AT
        return replace(self._pieces, dispatch=number)

    def combine_beside_product(
        self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor, pieces: ColumnPieces
    ) -> None:
        """Combine as `combine` does, and begin with the pieces of `rows` that the product has stored.

        All ranks call it, also those whose rows come from elsewhere.
        """
        self.workspace.begin("combine")
        operation = self.later_operation("combine_beside_product")
        self._set_combine(operation, rows, got, weighted, out)
        (launch,) = operation.launches
        launch.fields.stored = pieces.words.data_ptr() if pieces.are_of(rows) else 0
        self.workspace.enqueue("combine", operation.sms, operation.launches)

    # Backward passes.

    @property
    def metadata_words(self) -> int:
        return self._metadata.nbytes // 4

    def pack(self, got: Dispatched) -> torch.Tensor:
        return got.saved(SavedMetadata).memory

    def unpack(self, metadata: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: Ids) -> Dispatched:  # noqa: ARG002
        """Make the result of a dispatch again. Its weights are in `metadata` too."""
        # An operator's tensor does not say on which stream it was allocated, and callers do not see this one.
        keep_for_current_stream(metadata)
        saved = SavedMetadata(metadata, metadata.data_ptr(), self._metadata, self.workspace.stream())
        return KernelDispatched.over(rows, None, len(ids.topk_idx), saved, self)

    def entry_places(self, metadata: torch.Tensor, topk_idx: torch.Tensor) -> EntryPlaces:  # noqa: ARG002
        view, ranks = self._metadata.view, self.world.size
        entries = view(metadata, "entry_places").view(torch.int32).view(ranks, self.spec.tokens, self.spec.topk, 2)
        return EntryPlaces(entries[..., 0], view(metadata, "summary").view(torch.int32)[:ranks])

    def refusal_words(self, got: Dispatched) -> torch.Tensor:
        saved = got.saved(SavedMetadata)
        begin = (self._metadata.at["summary"] + _REFUSAL_AT) // 4
        return saved.memory[begin : begin + PackedRefusal.nbytes() // 4]

    def mark(self, got: Dispatched, digest: torch.Tensor) -> None:
        """Write the digest into the upper half of the number that the combine sends (`DispatchSummary`)."""
        summary, launch = got.saved(SavedMetadata).address + self._metadata.at["summary"], self._mark
        assert launch is not None, "only exchanges over slots mark their dispatches"
        launch.set_addresses(summary + _REFUSAL_AT, digest.data_ptr())
        self.workspace.enqueue("dispatch", launch.sms, (launch,))

    def combine_gradients(
        self, rows: torch.Tensor, weights: torch.Tensor, got: Dispatched, out: torch.Tensor, out_weights: torch.Tensor
    ) -> None:
        """Combine without weights, by kernels/peer/combine.cu with CARRIES: the number of each place returns too."""
        self.workspace.begin("combine")
        operation, weights = self.later_operation("combine_gradients"), weights.contiguous()
        self._set_combine(operation, rows, got, False, out)
        for launch in operation.launches:
            launch.fields.numbers, launch.fields.returned_numbers = weights.data_ptr(), out_weights.data_ptr()
        self.workspace.enqueue("combine", operation.sms, operation.launches)

    def dispatch_known(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> None:
        """Dispatch by launches that read the metadata of `got`. They read no ids and no weights."""
        self.workspace.begin("dispatch")
        self._keep_for_this_stream(got)
        operation = self.later_operation("dispatch_known")
        memory, at = got.saved(SavedMetadata).address, self._metadata.at
        sent = memory + at["summary"] + 4 * self.world.rank  # the tokens that this rank has sent
        results = (memory + at[name] for name in ("weights", "expert_offsets", "expert_counts"))
        saved = (memory + at[name] for name in ("entry_places", "masks", "summary"))
        addresses = (x.data_ptr(), 0, 0, 0, sent, out.data_ptr(), 0, *results, 0, *saved)
        for launch in operation.launches:
            launch.set_addresses(*addresses)
            launch.fields.tokens = got.tokens
        self._set_pass(operation, got)
        self.workspace.enqueue("dispatch", operation.sms, operation.launches)

    def dispatch_again(self, tokens: Tokens, out: torch.Tensor | None, forward: Dispatched) -> Dispatched:
        operation = self.later_operation("dispatch_again")
        self._keep_for_this_stream(forward)
        self.workspace.begin("dispatch")
        got = self._new_result(tokens, out)
        self._set_dispatch(operation, got, tokens)
        self._set_pass(operation, forward)
        self.workspace.enqueue("dispatch", operation.sms, operation.launches)
        return got

    def later_operation(self, name: str) -> LaunchedOperation:
        """Return an operation that not every exchange needs, by its name in the table. The first call makes it."""
        operation = self._later.get(name)
        if operation is None:
            if capturing(self.world.device):
                what = "combine beside a product" if name == "combine_beside_product" else "backward pass"
                raise CaptureError(f"the first {what} of an exchange inside a capture; run one before, eagerly")
            operation = self._later[name] = self._operation(getattr(self.table, name))
        return operation

    def check(self) -> None:
        self._launcher.synchronise()
        # A step whose backward passes differ may refuse its combines too, or leave ranks out of step, because of that.
        combines = self._take_refused(COMBINES)
        refused = judge_backward(self._take_refused(BACKWARD)) or judge_statuses(combines, self.spec)
        if (failed := self.workspace.error.error()) is not None:
            raise failed from refused
        if refused is not None:
            raise refused

    def _take_refused(self, kind: int) -> list[Refusal]:
        """Return the statuses of all ranks in the last refused operation of this kind, once; else no refusals."""
        words = self._refusals.words[kind * _RECORD_WORDS : (kind + 1) * _RECORD_WORDS]
        if (epoch := int(words[0])) <= self._raised_epochs[kind]:
            return [NO_REFUSAL] * self.world.size
        self._raised_epochs[kind] = epoch
        packed, size = Struct(f"={len(words)}Q").pack(*words)[16:], Refusal.NBYTES
        return [Refusal.unpack(packed[size * rank : size * (rank + 1)]) for rank in range(self.world.size)]

    # Between domains (raymoe/exchange/domains/hierarchical_gpu.py).

    def refusal_record(self) -> torch.Tensor:
        """Let refused operations write their statuses to words on the device from now on, instead of to the host."""
        records = torch.zeros(2, _RECORD_WORDS, dtype=torch.int64, device=self.world.device)
        self._device_records = records
        self._set_in_all(CombineCall, record=records[COMBINES])
        self._set_in_all(DispatchCall, record=records[BACKWARD])
        return records[COMBINES]

    def backward_record(self) -> torch.Tensor:
        """Return the words of refused dispatches in backward passes; call `refusal_record` first."""
        assert self._device_records is not None
        return self._device_records[BACKWARD]

    def mark_passes(self, word: torch.Tensor) -> None:
        """Let backward passes that begin where `word`, int64[1], is not 0 be refused by the whole domain."""
        self._set_in_all(DispatchCall, mark=word)

    def check_waits(self) -> None:
        self.workspace.error.check()

    def close(self, together: bool) -> None:  # noqa: ARG002
        self._launcher.synchronise()
        self._refusals.close()
        if self._own_workspace:
            self.workspace.close()

    # Launches and their parameters.

    def _operation(self, stages: tuple[AnyStage, ...]) -> LaunchedOperation:
        launches = tuple(self._launch(stage) for stage in stages)
        (deal,) = {stage.deal for stage in stages if isinstance(stage, Stage)}
        sms = max(launch.sms for launch in launches)
        if self._side is not None and isinstance(stages[-1], Stage) and isinstance(stages[-1].params, DispatchCall):
            sms = self.sms  # the last launches of a dispatch may run beside any operation
        return LaunchedOperation(launches, deal, sms)

    def _launch(self, stage: AnyStage) -> Launch | Copies:
        """Return the launch of a stage, which all operations with the stage share."""
        launch = self._launches.get(stage)
        if launch is None:
            launch = self._launches[stage] = stage.ready(self._launcher, self._common)
        return launch

    def _set_in_all(self, kind: type[Params], **fields: Field) -> None:
        """Set parameters in all launches of a kind, also in those that are made later."""
        self._common[kind] = self._common.get(kind, {}) | fields  # keeps the memory while kernels may use it
        for stage, launch in self._launches.items():
            if isinstance(stage, Stage) and isinstance(stage.params, kind):
                for name, field in fields.items():
                    setattr(launch.fields, name, value_of(field))

    def _new_result(self, tokens: Tokens, out: torch.Tensor | None) -> KernelDispatched:
        """Allocate a dispatch's metadata; it belongs to the result, so several results can be in use at once."""
        self.workspace.error.check()
        memory = self._new_memory()
        x = self._slot_rows if out is None else out
        assert x is not None
        scales = self._slot_scales
        if self.build.raw and scales is None:
            scales = self._new_scales().T[: self.build.capacity]  # block after block, as DeepGEMM takes them
        saved = SavedMetadata(memory, memory.data_ptr(), self._metadata, self.workspace.stream())
        return KernelDispatched.over(x, scales, tokens.x.shape[0], saved, self)

    def _keep_for_this_stream(self, got: Dispatched) -> None:
        """Keep the metadata of a dispatch for an operation on the current stream."""
        saved = got.saved(SavedMetadata)
        self.workspace.error.check()
        if saved.stream != self.workspace.stream():
            keep_for_current_stream(saved.memory)

    def _set_dispatch(self, operation: LaunchedOperation, got: Dispatched, tokens: Tokens) -> None:
        """Set the parameters of a call in all launches of a dispatch."""
        memory, in_slots = got.saved(SavedMetadata).address, self._slot_rows is not None
        weights, expert_offsets, expert_counts, index, entry_places, masks, summary = self._written
        addresses = (
            tokens.x.data_ptr(),
            0 if tokens.scales is None else tokens.scales.data_ptr(),
            tokens.topk_idx.data_ptr(),
            tokens.topk_weights.data_ptr(),
            0 if tokens.num_tokens is None else tokens.num_tokens.data_ptr(),
            0 if in_slots else got.x.data_ptr(),
            0 if in_slots or got.scales is None else got.scales.data_ptr(),
            memory + weights,
            memory + expert_offsets,
            memory + expert_counts,
            memory + index if in_slots else 0,
            memory + entry_places,
            memory + masks,
            memory + summary,
        )
        wide, zeros = tokens.topk_idx.dtype is torch.int64, self._zero_padding and tokens.zero_gaps
        for launch in operation.launches:
            launch.set_addresses(*addresses)
            fields = launch.fields
            fields.wide_topk_idx = wide
            fields.zero_padding = zeros
            fields.tokens = got.tokens
            if operation.deal is not None:
                operation.deal(fields, got.tokens)

    def _set_pass(self, operation: LaunchedOperation, forward: Dispatched) -> None:
        """Let a dispatch say that it belongs to the backward pass of the dispatch `forward`."""
        address = forward.saved(SavedMetadata).address + self._metadata.at["summary"]
        for launch in operation.launches:
            launch.fields.forward, launch.fields.site = address, forward.site

    def _set_combine(
        self, operation: LaunchedOperation, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor
    ) -> None:
        """Set the parameters of a call in all launches of a combine."""
        memory, at = got.saved(SavedMetadata).address, self._metadata.at
        self._keep_for_this_stream(got)
        saved = memory + at["entry_places"], memory + at["masks"], memory + at["summary"]
        addresses = rows.data_ptr(), *saved, out.data_ptr()
        for launch in operation.launches:
            launch.set_addresses(*addresses)
            fields = launch.fields
            fields.tokens = got.tokens
            fields.weighted = weighted
            fields.site = got.site
            if operation.deal is not None:
                operation.deal(fields, got.tokens)
