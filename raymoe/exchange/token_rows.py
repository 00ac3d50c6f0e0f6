"""Layout `token`: one row for each token and rank, with the token's ids and weights, and a combine of the ranks' sums.

It is made of two exchanges with layout `expert` (`ExchangeSpec.parts`), so every backend has it.

- The *rows'* exchange names one expert of each rank that has some, its first one. So a rank gets each token once, in
  the order (source rank, token), and its combine adds one row of each rank.
- The *choices'* exchange brings a row of 2K + 2 float32 to the same places: a token's ids and weights, its rank and its
  number, all exact below 2^24. It is combined only in backward passes, to return the gradients of the weights.

A dispatch is then two operations, one after the other, and a combine is one. Between them GPU ranks launch the kernels
of `token_kernels`, and CPU ranks use torch.

One rank, whose experts multiply a row by their number plus one:

>>> from raymoe import Exchange, World
>>> world = World.open(rank=0, size=1)
>>> world.wire([world.descriptor()])
>>> spec = ExchangeSpec(tokens=2, hidden=8, experts=4, topk=2, dtype="float32", layout="token")
>>> with world, Exchange(world, spec) as exchange:
...     topk_idx, topk_weights = torch.tensor([[3, 0], [-1, -1]]), torch.tensor([[0.5, 0.25], [0.0, 0.0]])
...     got = exchange.dispatch(torch.ones(2, 8), topk_idx, topk_weights)
...     shares = (got.weights * (got.topk_idx + 1)).sum(1, keepdim=True)
...     y = exchange.combine(got.x * shares, got, weighted=False)
>>> got.count(), got.topk_idx[0].tolist(), got.sources[0].tolist(), y[:, 0].tolist()
(1, [3, 0], [0, 0], [2.25, 0.0])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from raymoe.cuda.current import CapturedMemory
from raymoe.errors import ConfigError
from raymoe.exchange.backend import Backend, Dispatched, Ids, Tokens
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.layout import ALIGNMENT, ITEM_BYTES, round_up
from raymoe.memory.world import World

if TYPE_CHECKING:
    from raymoe.cuda.launcher import Launcher
    from raymoe.exchange.peer.workspace import Workspace
    from raymoe.exchange.token_kernels import TokenKernels


@dataclass(slots=True)
class SavedParts:
    """The state that a dispatch saves for its combine: the results of its two parts."""

    rows: Dispatched
    choices: Dispatched
    homes: torch.Tensor
    """[T', K] the first expert of each rank that a token goes to, once; -1 elsewhere."""
    topk_idx: torch.Tensor
    sent: Sequence[object] = ()
    """Memory that a captured dispatch reads at each replay."""

    def of_site(self, site: int) -> SavedParts:
        """Give the parts the number of the call site."""
        self.rows.site = self.choices.site = site
        return self


class TokenBackend:
    """A backend for layout `token`, over one backend for the rows and one for the choices of their tokens."""

    def __init__(
        self,
        world: World,
        spec: ExchangeSpec,
        parts: Sequence[Backend],
        workspace: Workspace | None,
        launcher: Launcher | None = None,
    ) -> None:
        """`workspace` is one that the parts share, and that this closes; None where each has what it needs.

        `launcher` launches the kernels between the parts. By default GPU ranks have one, and CPU ranks use torch.
        """
        self.rows, self._choices = parts
        self._own_workspace, self._spec = workspace, spec
        self._topk, self._local = spec.topk, spec.local_experts(world.size)
        self._first, self._capacity = world.rank * self._local, spec.rows(world.size)
        self._most = world.size * spec.tokens
        self._width = spec.parts(world.size)[1].hidden
        device = world.device
        self._memory = CapturedMemory(device)
        self._earlier = torch.ones(spec.topk, spec.topk, dtype=torch.bool, device=device).tril(-1)
        self._places = torch.arange(self._capacity, dtype=torch.int32, device=device)
        self._sources = torch.zeros(spec.tokens, self._width, dtype=torch.float32, device=device)
        self._sources[:, 2 * spec.topk] = world.rank
        self._sources[:, 2 * spec.topk + 1] = torch.arange(spec.tokens, device=device)
        self.capturable = self.rows.capturable and self._choices.capturable
        self.workspace = getattr(self.rows, "workspace", None)
        self._kernels: TokenKernels | None = None
        if launcher is not None or device.type == "cuda":
            from raymoe.exchange.nccl.nccl_kernels import SharedLauncher
            from raymoe.exchange.token_kernels import Sizes, TokenKernels

            sizes = Sizes(spec.tokens, spec.topk, spec.experts, self._local, self._capacity, self._width, world.rank)
            self._kernels = TokenKernels(launcher or world.shared(SharedLauncher), sizes)

    @property
    def keeps_places(self) -> bool:
        return self.rows.keeps_places

    @property
    def sms(self) -> int | None:
        if self.rows.sms is None or self._choices.sms is None:
            return None
        return max(self.rows.sms, self._choices.sms)

    @torch.no_grad()
    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        with self._memory():
            rows, choices = self.tokens_of(tokens)
            into = torch.empty(self._most, self._width, dtype=torch.float32, device=tokens.x.device)
            return self.result_of(rows, choices, self.rows.dispatch(rows, out), self._choices.dispatch(choices, into))

    def tokens_of(self, tokens: Tokens) -> tuple[Tokens, Tokens]:
        """Return the input of both parts.

        Wrong ids and numbers of tokens stay in the first alone, so that one of the parts refuses them.
        """
        count = None if tokens.num_tokens is None else tokens.num_tokens.clamp(0, len(tokens.topk_idx))
        pack = self._pack if self._kernels is None else self._kernels.pack
        rows_idx, homes, packed = pack(tokens.topk_idx, tokens.topk_weights)
        rows = replace(tokens, topk_idx=rows_idx)
        return rows, Tokens(packed, homes, tokens.topk_weights, count, None, False, tokens.site)

    def _pack(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the ids of the rows' part, the homes of all entries, and the rows of the choices' part."""
        owner = ids.div(self._local, rounding_mode="floor")
        again = ((owner[:, :, None] == owner[:, None, :]) & self._earlier).any(2)
        known = (ids >= 0) & (ids < self._spec.experts)
        homes = torch.where(known & ~again, owner * self._local, -1)
        packed = self._sources[: len(ids)].clone()
        packed[:, : self._topk] = ids
        packed[:, self._topk : 2 * self._topk] = weights
        return torch.where(known, homes, ids), homes, packed

    def result_of(self, sent: Tokens, sent_choices: Tokens, rows: Dispatched, choices: Dispatched) -> Dispatched:
        """Make the result from the input of both parts and from what they dispatched."""
        offsets = rows.expert_offsets
        take = self._take if self._kernels is None else self._kernels.take
        topk_idx, weights, sources, counts = take(choices.x[: self._capacity], offsets)
        got = Dispatched(
            x=rows.x,
            weights=weights,
            expert_offsets=offsets[:2],
            expert_counts=counts,
            index=None,
            tokens=len(sent.x),
            _saved=SavedParts(rows, choices, sent_choices.topk_idx, topk_idx, (sent.topk_idx, sent_choices)),
            _owner=self,
            scales=rows.scales,
            topk_idx=topk_idx,
            sources=sources,
        )
        # The caller alone holds the rows now: a result that is kept for its combine does not need them.
        rows.x, choices.x, rows.scales = rows.x.new_empty(0, 0), choices.x.new_empty(0, 0), None
        got.site = rows.site = choices.site = sent.site
        return got

    def _take(self, brought: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return `topk_idx`, `weights` and `sources` of the rows, and the entries of each expert."""
        K = self._topk
        local = brought[:, :K] - self._first
        came = (self._places < offsets[1])[:, None]
        here = (local >= 0) & (local < self._local) & came
        topk_idx = torch.where(here, local, -1.0).int()
        ends = torch.zeros(1 + self._local, dtype=torch.int32, device=topk_idx.device)
        ends.scatter_add_(0, (topk_idx.flatten() + 1).long(), here.flatten().int())
        sources = torch.where(came, brought[:, 2 * K : 2 * K + 2], -1.0).int()
        return topk_idx, torch.where(here, brought[:, K : 2 * K], 0.0), sources, ends[1:]

    def refusal_words(self, got: Dispatched) -> torch.Tensor:
        """Return why the rows' part refuses the data. The choices' part always has the capacity."""
        saved = got.saved(SavedParts)
        return self.rows.refusal_words(saved.rows)

    def mark(self, got: Dispatched, digest: torch.Tensor) -> None:
        saved = got.saved(SavedParts)
        self.rows.mark(saved.rows, digest)
        self._choices.mark(saved.choices, digest)

    @torch.no_grad()
    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:  # noqa: ARG002
        """Add the ranks' sums. The caller has applied the weights."""
        self.rows.combine(rows, got.saved(SavedParts).of_site(got.site).rows, False, out)

    @torch.no_grad()
    def refuse(self, got: Dispatched) -> None:
        """Let all ranks refuse the step (`Exchange.refuse`)."""
        from raymoe.exchange.cpu.cpu_backend import CpuBackend

        if not isinstance(self.rows, CpuBackend):
            raise ConfigError("refuse on GPU ranks; only CPU ranks can")
        self.rows.refuse(got.saved(SavedParts).of_site(got.site).rows)

    @torch.no_grad()
    def combine_gradients(
        self, rows: torch.Tensor, weights: torch.Tensor, got: Dispatched, out: torch.Tensor, out_weights: torch.Tensor
    ) -> None:
        saved, K = got.saved(SavedParts).of_site(got.site), self._topk
        self.rows.combine(rows, saved.rows, False, out)
        with self._memory():
            gradients = torch.zeros(len(weights), self._width, dtype=torch.float32, device=weights.device)
            gradients[:, K : 2 * K] = torch.where(saved.topk_idx[: len(weights)] >= 0, weights, 0.0)
            entries = torch.empty(len(out_weights), self._width, dtype=torch.float32, device=weights.device)
            self._choices.combine(gradients, saved.choices, False, entries)
            out_weights.copy_(entries[:, K : 2 * K])  # an entry has its expert on one rank; the others add zeros

    @torch.no_grad()
    def dispatch_known(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> None:
        self.rows.dispatch_known(x, got.saved(SavedParts).of_site(got.site).rows, out)

    @torch.no_grad()
    def dispatch_again(self, tokens: Tokens, out: torch.Tensor | None, forward: Dispatched) -> Dispatched:
        """Dispatch gradients of rows. The result has no choices."""
        saved = forward.saved(SavedParts).of_site(forward.site)
        return self.rows.dispatch_again(replace(tokens, topk_idx=saved.homes), out, saved.rows)

    # The metadata of a dispatch is one int32 tensor: that of the rows' part, that of the choices' part, the homes of T
    # tokens, and `topk_idx`, which the differentiable dispatch reads at the end of it. Each begins at a multiple of
    # ALIGNMENT bytes.

    @property
    def metadata_words(self) -> int:
        return sum(self._places_of_metadata) + self._capacity * self._topk

    @property
    def _places_of_metadata(self) -> tuple[int, int, int]:
        """Words of the parts' metadata and of the homes, with what follows them up to the next one."""
        words = self.rows.metadata_words, self._choices.metadata_words, self._spec.tokens * self._topk
        first, second, homes = (round_up(size, ALIGNMENT // ITEM_BYTES["int32"]) for size in words)
        return first, second, homes

    def pack(self, got: Dispatched) -> torch.Tensor:
        saved = got.saved(SavedParts)
        parts = self.rows.pack(saved.rows), self._choices.pack(saved.choices), saved.homes.int().flatten()
        ends = zip(parts, self._places_of_metadata, strict=True)
        with self._memory():
            padded = [torch.nn.functional.pad(part, (0, words - len(part))) for part, words in ends]
            return torch.cat([*padded, saved.topk_idx.flatten()])

    def unpack(self, metadata: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: Ids) -> Dispatched:
        K, tokens = self._topk, len(ids.topk_idx)
        first, second, homes, topk_idx = torch.split(metadata, [*self._places_of_metadata, self._capacity * K])
        first, second = first[: self.rows.metadata_words], second[: self._choices.metadata_words]
        routing = Ids(homes[: tokens * K].view(tokens, K), ids.num_tokens)
        none = weights.new_zeros(0)  # a combine by token multiplies by no weights
        saved = SavedParts(
            self.rows.unpack(first, rows, none, routing),
            self._choices.unpack(second, none, none, routing),
            routing.topk_idx,
            topk_idx.view(-1, K),
        )
        offsets, counts = saved.rows.expert_offsets[:2], saved.rows.expert_counts
        return Dispatched(rows, weights, offsets, counts, None, tokens, saved, self, topk_idx=saved.topk_idx)

    def check(self) -> None:
        """Wait for the device, then raise what failed. Refused data are those of the rows' part."""
        self.rows.check()
        self._choices.check()

    def close(self, together: bool) -> None:
        self._choices.close(together)
        self.rows.close(together)
        self._memory.close()
        if self._own_workspace is not None:
            self._own_workspace.close()
