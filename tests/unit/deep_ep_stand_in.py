"""What DeepEP documents of its calls, done in the open by ranks that are threads: for tests of who calls it."""

from __future__ import annotations

import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class Meeting:
    """Everybody's value, by rank; threads are named by their ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._given: dict[int, Any] = {}

    def swap(self, value: Any) -> tuple[int, list[Any]]:
        me = int(threading.current_thread().name)
        self._given[me] = value
        self._barrier.wait()
        found = [self._given[rank] for rank in range(self.size)]
        self._barrier.wait()
        return me, found


def stand_in(size: int, experts: int) -> ModuleType:
    """A module with the classes of all three versions."""
    meeting, local = Meeting(size), experts // size

    def arrived(x: torch.Tensor, ids: torch.Tensor) -> tuple[int, list[tuple[int, int, torch.Tensor]], torch.Tensor]:
        """This rank, (source, token, its experts here or -1) of each row in the order of sources, and the rows."""
        me, all_ranks = meeting.swap((x.clone(), ids.clone()))
        rows, come = [], []
        for source, (theirs, their_ids) in enumerate(all_ranks):
            here = torch.where(their_ids // local == me, their_ids - me * local, -1)
            here = torch.where(their_ids < 0, -1, here)
            for token in (here >= 0).any(dim=1).nonzero().flatten().tolist():
                rows.append((source, token, here[token]))
                come.append(theirs[token])
        return me, rows, torch.stack(come) if come else x[:0]

    def home(rows: torch.Tensor, keys: list[tuple[int, int]], tokens: int) -> torch.Tensor:
        me, all_ranks = meeting.swap((rows, keys))
        y = torch.zeros(tokens, rows.shape[1])
        for theirs, their_keys in all_ranks:
            for row, (source, token) in zip(theirs, their_keys, strict=True):
                if source == me:
                    y[token] += row.float()
        return y.to(rows.dtype)

    class Config:
        def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
            return hidden_bytes * ranks

    class Buffer:
        num_sms = 20
        get_dispatch_config = get_combine_config = staticmethod(lambda _: Config())

        def __init__(self, _: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
            assert num_nvl_bytes > 0 == num_rdma_bytes

        def get_dispatch_layout(self, topk_idx, num_experts):
            assert topk_idx.dtype == torch.int64 and num_experts == experts
            return "to rank", None, "to expert", "in rank", None

        def dispatch(
            self, x, *, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, config
        ):
            assert (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert) == ("to rank", "in rank", "to expert")
            assert topk_weights.dtype == torch.float32 and isinstance(config, Config)
            _, rows, came = arrived(x, topk_idx)
            wanted = torch.stack([here for *_, here in rows]) if rows else topk_idx[:0]
            return came, wanted, None, [], ([(s, t) for s, t, _ in rows], len(x)), None

        def combine(self, x, handle, *, config):
            assert isinstance(config, Config)
            return home(x, *handle), None, None

    class ByExpert:
        def rows(self, x, ids, alignment):
            _, rows, come = arrived(x, ids)
            keys, parts, ends = [], [], []
            for expert in range(local):
                mine = [place for place, (_, _, here) in enumerate(rows) if bool((here == expert).any())]
                gap = -sum(map(len, parts)) % alignment
                parts += [torch.full((gap, x.shape[1]), 7.0, dtype=x.dtype), come[mine]]
                keys += [(-1, -1)] * gap + [rows[place][:2] for place in mine]
                ends.append(sum(map(len, parts)))
            return torch.cat(parts), keys, ends

    class ElasticBuffer(ByExpert):
        def __init__(self, _: Any, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int) -> None:
            assert min(num_max_tokens_per_rank, hidden, num_topk) > 0

        def get_theoretical_num_sms(self, *_: int) -> int:
            return 24

        def dispatch(self, x, *, topk_idx, topk_weights, num_experts, expert_alignment, do_cpu_sync, do_expand):
            assert (num_experts, do_cpu_sync, do_expand) == (experts, False, True) and topk_weights is not None
            rows, keys, ends = self.rows(x, topk_idx, expert_alignment)
            handle = SimpleNamespace(psum_num_recv_tokens_per_expert=torch.tensor(ends), keys=keys, tokens=len(x))
            return rows, None, None, handle, None

        def combine(self, x, handle):
            return home(x, handle.keys, handle.tokens), None, None

    class HybridEPBuffer(ByExpert):
        def __init__(self, _: Any, *, hidden_dim: int, max_num_of_tokens_per_rank: int, num_local_experts: int) -> None:
            assert num_local_experts == local and min(hidden_dim, max_num_of_tokens_per_rank) > 0

        def dispatch_with_permute(self, *, hidden, topk_idx, topk_weights, num_of_experts_per_rank, num_of_experts):
            assert (num_of_experts_per_rank, num_of_experts) == (local, experts) and topk_weights is not None
            rows, keys, ends = self.rows(hidden, topk_idx, 1)
            counts = torch.tensor(ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
            return rows, None, None, counts, (keys, len(hidden))

        def combine_with_unpermute(self, *, hidden, handle):
            return home(hidden, *handle), None

    module = ModuleType("deep_ep")
    module.__dict__.update(
        Buffer=Buffer, ElasticBuffer=ElasticBuffer, HybridEPBuffer=HybridEPBuffer, topk_idx_t=torch.int64
    )
    return module
