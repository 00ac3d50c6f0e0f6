"""Dispatch and combine on GPUs, each as one kernel, or as two that leave room for work between them.

Nothing waits for the host: a call enqueues a launch whose parameters are addresses, and what changes from run to run
(epochs, counts, tokens) the kernels read from device memory. So a captured call can be replayed with new tokens, new
routing and a new `num_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from raymoe.device import combine, dispatch
from raymoe.device.combine import CombineGrid, CombineParams, RefusalRecord, combine_source
from raymoe.device.dispatch import DispatchParams, Got, dispatch_source
from raymoe.device.dispatch_grid import DispatchGrid
from raymoe.device.host_words import HostWords
from raymoe.device.kernels import Function
from raymoe.device.launch import Launch, Shape
from raymoe.device.params import Params
from raymoe.exchange.backend import Tokens
from raymoe.exchange.build import Build, refuse
from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.refusal import Refusal, raise_first
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.workspace import Workspace
from raymoe.job.errors import ConfigError
from raymoe.memory.world import World


@dataclass
class Home:
    """What a dispatch leaves on the device for its combine."""

    entries: torch.Tensor  # int64[R, T, K]: place and weight
    masks: torch.Tensor  # int32[T']: ranks that each token went to
    got: torch.Tensor  # the struct Got
    tokens: Tokens  # a receive that comes later reads them again


class FusedBackend:
    """Its own workspace, or one that it shares with the other exchanges of its stream."""

    capturable = True

    def __init__(self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int | str) -> None:
        self.world, self.spec = world, spec
        refuse(spec)
        self._own_workspace = workspace is None
        self.workspace = Workspace(world, spec) if workspace is None else workspace
        if self.workspace.world is not world:
            raise ConfigError("the workspace belongs to another world; make one of this exchange's own world")
        self.build = Build.of(self.workspace, spec)
        gpu, stamped = world.gpu, self.workspace.stamped
        self.dispatch_grid, self.combine_grid = self._grids(None if sms == "auto" else int(sms))
        kernels = self.workspace.kernels
        warps, traces = self.combine_grid.warps, self.workspace.traces
        self._dispatch = kernels.function(dispatch_source(spec.dtype, self.build.fp8, stamped, traces))
        self._combine = kernels.function(combine_source(spec.dtype, stamped, traces, spec.combine_wire, warps))
        self._refusals = HostWords(gpu, RefusalRecord.nbytes() // 8)
        self._raised = 0
        self._slot_view = self._slot_scales = None
        if spec.layout == "rank":
            self._slot_view, self._slot_scales = self.build.view_slots()
        self._dispatch_base = self.build.dispatch_params(self.dispatch_grid)
        self._combine_base = self.build.combine_params(self.combine_grid, self._refusals.device_address())

    @property
    def sms(self) -> int:
        """The most multiprocessors that one of its launches occupies."""
        # Blocks go to multiprocessors that have none, as long as there are some.
        return min(self.world.gpu.sms, max(shape.blocks for shape in self._largest()))

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self.workspace.begin("dispatch")
        got = self._new(tokens, out)
        self._launch_dispatch(got, dispatch.ALL_PARTS)
        return got

    def dispatch_send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """The half that puts rows on their way. What it gives holds nothing before `dispatch_receive`."""
        self.workspace.begin("dispatch", self)
        got = self._new(tokens, out)
        self._launch_dispatch(got, dispatch.ROUTE | dispatch.SEND)
        return got

    def dispatch_receive(self, got: Dispatched) -> None:
        """The half that waits for rows and places them."""
        self.workspace.end("dispatch", self)
        self._launch_dispatch(got, dispatch.PLACE)

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        self.workspace.begin("combine")
        self._launch_combine(rows, got, weighted, out, combine.ALL_PARTS)

    def combine_send(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        """The half that sums this rank's rows and puts the sums on their way."""
        self.workspace.begin("combine", self)
        self._launch_combine(rows, got, weighted, out, combine.REDUCE)

    def combine_receive(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        """The half that waits for the ranks' sums and adds them up."""
        self.workspace.end("combine", self)
        self._launch_combine(rows, got, weighted, out, combine.SUM)

    def check(self) -> None:
        torch.cuda.synchronize(self.world.device)  # bounded: every wait of the kernels is
        self.workspace.error.check()
        words = self._refusals.words
        epoch = int(words[0])
        if epoch > self._raised:
            self._raised = epoch
            packed = bytes(words)[16:]
            size = Refusal.NBYTES
            refusals = [Refusal.unpack(packed[size * rank : size * (rank + 1)]) for rank in range(self.world.size)]
            raise_first(refusals, self.spec)

    def close(self, together: bool) -> None:  # noqa: ARG002
        torch.cuda.synchronize(self.world.device)
        self._refusals.close()
        if self._own_workspace:
            self.workspace.close()

    def _grids(self, sms: int | None) -> tuple[DispatchGrid, CombineGrid]:
        return self.build.grids(sms)

    def _largest(self) -> list[Shape]:
        """The launches that no other one exceeds."""
        return [self.dispatch_grid.shape(dispatch.ALL_PARTS), self.combine_grid.shape(combine.ALL_PARTS)]

    def _new(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """Memory for what a dispatch finds out; it belongs to what is given back, so several may be outstanding."""
        device, spec = self.world.device, self.spec
        self.workspace.error.check()

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        x = self._slot_view if out is None else out
        assert x is not None
        return Dispatched(
            x=x,
            weights=empty(self.build.capacity, dtype=torch.float32),
            expert_offsets=empty(self.build.local + 1, dtype=torch.int32),
            expert_counts=empty(self.build.local, dtype=torch.int32),
            index=empty(self.build.capacity, dtype=torch.int64) if spec.layout == "rank" else None,
            tokens=len(tokens.x),
            _home=Home(
                entries=empty(self.world.size, spec.tokens, spec.topk, dtype=torch.int64),
                masks=empty(len(tokens.x), dtype=torch.int32),
                got=empty(Got.nbytes(), dtype=torch.uint8),
                tokens=tokens,
            ),
            _owner=self,
            scales=self._new_scales(),
        )

    def _new_scales(self) -> torch.Tensor | None:
        """Those of raw rows: block after block, as DeepGEMM takes them. With layout rank they stay in the slots too."""
        if not self.build.raw or self._slot_scales is not None:
            return self._slot_scales
        whole = torch.empty(self.spec.scales, self.build.scale_stride, dtype=torch.float32, device=self.world.device)
        return whole.T[: self.build.capacity]

    def _launch_dispatch(self, got: Dispatched, parts: int) -> None:
        self._launch(self._dispatch, self.dispatch_grid.shape(parts), self._of(got, parts))

    def _of(self, got: Dispatched, parts: int) -> DispatchParams:
        home = got._home
        assert isinstance(home, Home)
        tokens = home.tokens
        return replace(
            self._dispatch_base,
            x=tokens.x.data_ptr(),
            x_scales=0 if tokens.scales is None else tokens.scales.data_ptr(),
            ids=tokens.ids.data_ptr(),
            weights=tokens.weights.data_ptr(),
            num_tokens=0 if tokens.num_tokens is None else tokens.num_tokens.data_ptr(),
            out=0 if got.index is not None else got.x.data_ptr(),
            scales=0 if got.scales is None or got.index is not None else got.scales.data_ptr(),
            out_weights=got.weights.data_ptr(),
            expert_offsets=got.expert_offsets.data_ptr(),
            expert_counts=got.expert_counts.data_ptr(),
            index=0 if got.index is None else got.index.data_ptr(),
            home=home.entries.data_ptr(),
            masks=home.masks.data_ptr(),
            got=home.got.data_ptr(),
            wide_ids=int(tokens.ids.dtype == torch.int64),
            tokens=got.tokens,
            parts=parts,
        )

    def _launch_combine(
        self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor, parts: int
    ) -> None:
        params = self._sums_of(rows, got, weighted, out, parts)
        self._launch(self._combine, self.combine_grid.shape(parts), params)

    def _sums_of(
        self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor, parts: int
    ) -> CombineParams:
        home = got._home
        assert isinstance(home, Home)
        self.workspace.error.check()
        return replace(
            self._combine_base,
            expert_rows=rows.data_ptr(),
            home=home.entries.data_ptr(),
            masks=home.masks.data_ptr(),
            got=home.got.data_ptr(),
            y=out.data_ptr(),
            tokens=got.tokens,
            weighted=int(weighted),
            parts=parts,
        )

    def _launch(self, function: Function, shape: Shape, params: Params) -> None:
        Launch(function, shape, params)(torch.cuda.current_stream(self.world.device).cuda_stream)
