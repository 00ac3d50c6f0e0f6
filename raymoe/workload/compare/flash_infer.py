"""FlashInfer's one-sided exchange, of the package flashinfer-python, without a wait of the host.

A dispatch stores a token once into the memory of each rank that needs it, with the ids and weights of all its experts.
Each source has a block of T rows there, which come in any order. Then the ids of places without a row are marked.

A combine reads rows from all ranks and adds them. The weights, and the sum of a rank's rows of a token, are applied
where rows are computed, off the clock. The rows are written where the combine reads them, so it copies none.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.workload.compare.unordered_rows import Came, Part, SentRows, sources_of
from raymoe.workload.inputs import Batch, Inputs
from raymoe.workload.measure import Line
from raymoe.workload.oracle import wrong_result


class Ranks:
    """The ranks of a world, by the names under which FlashInfer swaps handles of memory."""

    def __init__(self, world: World) -> None:
        self._world = world

    def Get_rank(self) -> int:  # noqa: N802
        return self._world.rank

    def Get_size(self) -> int:  # noqa: N802
        return self._world.size

    def allgather(self, data: Any) -> tuple[Any, ...]:
        return tuple(self._world.swap(data, "flashinfer: gathered"))

    def bcast(self, data: Any, root: int) -> Any:
        return self._world.swap(data, "flashinfer: sent to all")[root]

    def barrier(self) -> None:
        self._world.barrier("flashinfer: barrier")

    def Split(self, color: int, key: int) -> Ranks:  # noqa: N802
        del color, key  # all ranks are one group, in their order
        return self


class FlashInfer:
    """Its dispatch and combine, with the tokens of this rank. All ranks make one."""

    def __init__(self, world: World, spec: ExchangeSpec, inputs: Inputs) -> None:
        self._world, self._spec, self._inputs = world, spec, inputs
        dispatch, combine = "rows by expert", "weights, the sum of a rank's rows"
        self.left_out = {"dispatch": dispatch, "combine": combine, "exchange": f"{dispatch}, {combine}"}
        self._module: Any = importlib.import_module("flashinfer.comm.trtllm_moe_alltoall")
        self._memory = self._new_memory()
        first = inputs.at(0)
        self._batch = Batch(first.x.clone(), first.ids.to(torch.int32), first.weights.clone())
        self._y, self._other_y = torch.zeros_like(self._batch.x), torch.zeros_like(self._batch.x)
        self._sent = SentRows(world, spec, inputs)
        self._index = 0
        self._x, self._ids, self._weights = self._delivered()
        world.barrier("flashinfer: first dispatch")
        shape = [world.size, spec.tokens]
        end = self._offset + self._x.numel() * self._x.element_size()
        self._rows: torch.Tensor = self._module.moe_a2a_wrap_payload_tensor_in_workspace(
            self._memory.workspace[world.rank, :], shape, self._offset, end, self._x.dtype
        )
        """The rows that a combine sends; on steps that are not verified any numbers."""

    @property
    def keys(self) -> Line:
        return {"sms": None}

    def take(self, index: int, *, fresh: bool) -> None:
        self._batch.copy_(self._inputs.at(index, fresh=fresh))
        self._index = index
        self._rows.uniform_(-1, 1)  # a verified step leaves NaN
        if fresh:
            for memory in (self._x, self._weights):
                memory.fill_(torch.nan)
            self._ids.fill_(-7)
            self._y.fill_(torch.nan)

    def dispatch(self) -> None:
        self._delivered()

    def combine(self) -> None:
        self._combine_into(self._y)

    def exchange(self) -> None:
        self._delivered()
        self._combine_into(self._other_y)

    def wrong_dispatch(self) -> str | None:
        """Return what is wrong, or None; then the experts have computed the rows of the combine."""
        local = self._spec.local_experts(self._world.size)
        ids = self._ids.long() - self._world.rank * local
        came = Came(self._x, torch.where((ids >= 0) & (ids < local), ids, -1), self._weights)
        return self._sent.wrong(self._index, self._parts(), came, self._rows, weigh=True)

    def wrong_combine(self) -> str | None:
        batch = Batch(self._inputs.at(self._index, fresh=True).x, self._batch.ids.long(), self._batch.weights)
        return wrong_result(self._y, batch, self._sent.experts, self._spec)

    def _new_memory(self) -> Any:
        """Make its memory on all ranks, which map one another's."""
        world, spec = self._world, self._spec
        size = {"world_size": world.size, "tp_size": world.size, "moe_ep_size": world.size}
        mapping = importlib.import_module("flashinfer.comm.mapping").Mapping(
            rank=world.rank, gpus_per_node=world.size, **size
        )
        config = importlib.import_module("flashinfer.comm.mnnvl").MnnvlConfig(comm_backend=Ranks(world))
        numbers = {"max_num_tokens": spec.tokens, "top_k": spec.topk, "num_experts": spec.experts}
        return self._module.MoeAlltoAll(mapping, hidden_size=spec.hidden, mnnvl_config=config, **numbers)

    def _delivered(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Enqueue a dispatch; return its views of what came: rows, ids and weights [R, T, …]."""
        spec, memory, batch = self._spec, self._memory, self._batch
        ranks = self._world.rank, self._world.size
        (x, ids, weights), offset, *_ = self._module.moe_a2a_dispatch(
            batch.ids,
            [batch.x, batch.ids, batch.weights],
            *(memory.workspace, memory.metainfo, spec.tokens, *ranks, spec.topk, spec.experts),
        )
        self._module.moe_a2a_sanitize_expert_ids(ids, memory.workspace, memory.metainfo, self._world.rank, spec.experts)
        self._offset = int(offset)
        return x, ids, weights

    def _combine_into(self, y: torch.Tensor) -> None:
        spec, memory, ranks = self._spec, self._memory, (self._world.rank, self._world.size)
        self._module.moe_a2a_combine(
            *(self._rows, len(y), memory.workspace, memory.metainfo, spec.tokens, *ranks, spec.topk, self._offset),
            payload_in_workspace=True,
            output=y,
        )

    def _parts(self) -> Iterator[Part]:
        """Each source's rows are the first places of its block: those whose ids are not marked."""
        marked = (self._ids == self._spec.experts).all(dim=2)
        for rank in range(self._world.size):
            wanted = (self._sent.ids_of(rank, self._index) >= 0).any(dim=1)
            nobody = torch.zeros(0, dtype=torch.bool, device=wanted.device)
            ranks, tokens = sources_of([wanted if other == rank else nobody for other in range(self._world.size)])
            places = (~marked[rank]).nonzero().flatten() + rank * self._spec.tokens
            yield Part(f"from rank {rank}", places, ranks, tokens)
