"""The events, the options and the handles of `raymoe.integrations.deep_ep`, which shows them under DeepEP's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar, cast

import torch

from raymoe.errors import ConfigError
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.exchange import Exchange

# Events.


class EventHandle:
    """An event on the current stream of this process's GPU; nothing where there is none."""

    def __init__(self) -> None:
        self._event: Any = torch.cuda.Event() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()

    def current_stream_wait(self) -> None:
        """Let the current stream wait for the event."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """The event after a call. It is None, and nothing has to wait, unless the call was asynchronous."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Let the current stream wait for the call's results."""
        if self.event is not None:
            self.event.current_stream_wait()
        if release_handle:
            self.event = None

    def __call__(self, release_handle: bool = False) -> EventOverlap:  # noqa: ARG002 - waiting twice costs nothing
        """Return itself, for `with event(): …`."""
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()


# The arguments of calls. Each class has the names and the order of DeepEP's.


@dataclass(frozen=True)
class BufferOptions:
    """The settings of a buffer after its group."""

    num_bytes: int | None = None
    num_cpu_bytes: int = 0
    num_max_tokens_per_rank: int = 0
    hidden: int = 0
    num_topk: int = 0
    use_fp8_dispatch: bool = False
    deterministic: bool = False  # results always are
    allow_hybrid_mode: bool = True
    allow_multiple_reduction: bool = True
    prefer_overlap_with_compute: bool = True
    sl_idx: int = 3
    num_allocated_qps: int = 0
    num_cpu_timeout_secs: int = 300
    num_gpu_timeout_secs: int = 100
    explicitly_destroy: bool = False


@dataclass(frozen=True)
class CallOptions:
    """The settings that dispatch and combine share."""

    num_sms: int = 0
    num_qps: int = 0
    previous_event: EventHandle | EventOverlap | None = None
    previous_event_before_epilogue: EventHandle | EventOverlap | None = None
    async_with_compute_stream: bool = False
    allocate_on_comm_stream: bool = False


@dataclass(frozen=True)
class DispatchOptions(CallOptions):
    """The settings of a dispatch that follow its tokens and sizes."""

    expert_alignment: int | None = None
    handle: EPHandle | None = None
    do_handle_copy: bool = True
    do_cpu_sync: bool | None = None
    do_expand: bool = False
    do_zero_padding: bool = False
    use_tma_aligned_col_major_sf: bool = False


O = TypeVar("O")  # noqa: E741 - options


def options_of(kind: type[O], what: str, given: Mapping[str, Any]) -> O:
    """Make the options of a call. Names that DeepEP does not have are refused."""
    known = [each.name for each in fields(cast(Any, kind))]
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(f"{what} was given {unknown[0]!r}, which is none of its options: {', '.join(known)}")
    return kind(**given)


# The result of a dispatch.


@dataclass
class EPHandle:
    """The layout of a dispatch: what its combine needs, and dispatches of other rows to the same places."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    """[T', K] as the caller gave them."""
    got: Dispatched = field(repr=False)
    exchange: Exchange = field(repr=False)
    rows: int
    """The rows that the dispatch returned: those that came if the host waited, else the most that could."""
    num_recv_tokens_per_expert_list: list[int]
    """The rows of each local expert, rounded up to the alignment. Empty if the host did not wait."""
    recv_topk_idx: torch.Tensor | None = field(repr=False)

    @property
    def received_ids(self) -> torch.Tensor | None:
        """[n, K] the local experts of each row; None in the expanding layout."""
        return None if self.recv_topk_idx is None else self.recv_topk_idx[: self.rows]

    @property
    def num_expanded_tokens(self) -> int:
        """The rows in the expanding layout."""
        if not self.do_expand and not self.num_recv_tokens_per_expert_list:
            raise self._lacks("num_expanded_tokens", "without do_cpu_sync in the compact layout")
        return self.rows if self.do_expand else sum(self.num_recv_tokens_per_expert_list)

    @property
    def num_recv_tokens(self) -> int:
        """The tokens that came, each once."""
        if self.do_expand:
            raise self._lacks("num_recv_tokens", "in the expanding layout")
        return self.rows

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        """int32[L]: the rows of each local expert."""
        return self.got.expert_counts

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """int32[L]: where the rows of each expert end; in the compact layout the sums of their aligned counts."""
        counts = self.got.expert_counts
        if self.do_expand:
            return self.got.expert_offsets[:-1] + counts
        aligned = (counts + self.expert_alignment - 1) // self.expert_alignment * self.expert_alignment
        return aligned.cumsum(0, dtype=torch.int32)

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor | None:
        """int32[R]: the sums of the tokens that came from each rank; None in the expanding layout."""
        if self.got.sources is None:
            return None
        ranks = torch.arange(self.exchange.world.size, dtype=torch.int32, device=self.got.sources.device)
        source = self.got.sources[:, 0]
        return ((source >= 0)[:, None] & (source[:, None] <= ranks)).sum(0, dtype=torch.int32)

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """int32[n, 2 + K]: the number of each row's token among those of all ranks, then its row, then -1."""
        if self.got.sources is None:
            raise self._lacks("recv_src_metadata", "in the expanding layout")
        sources = self.got.sources[: self.rows]
        metadata = sources.new_full((len(sources), 2 + self.topk_idx.shape[1]), -1)
        there = sources[:, 0] >= 0
        metadata[:, 0] = torch.where(there, sources[:, 0] * self.num_max_tokens_per_rank + sources[:, 1], -1)
        metadata[:, 1] = torch.arange(len(sources), device=sources.device)
        return metadata

    def _lacks(self, name: str, where: str) -> ConfigError:
        return ConfigError(f"{name} of a handle asked for {where}, where raymoe does not count it")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a handle of raymoe has no {name!r}: that is a part of DeepEP's own memory; dispatch and combine take the "
            "handle as it is"
        )
