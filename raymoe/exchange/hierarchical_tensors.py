"""The arithmetic of an exchange between domains of GPU ranks, as torch operations without a wait of the host.

N domains of L ranks, T tokens, E experts, `local` experts a rank, domain `index`. A domain's own exchange has N*T
tokens a rank: those of the ranks with one place in each domain. They are numbered chunk by chunk, in a chunk domain by
domain. So their order is that in which rows come over the rail. With one chunk, token s*T + t is token t of the rank in
domain s. Each of its experts has N ids
there, one for each source domain: expert j of place p, for rows from domain s, is p*local*N + j*N + s. So its N ids are
neighbours, in the order of the domains. Rows in the order of these ids are in the order of the contract.

All functions can be captured in a CUDA graph: shapes are fixed, and no value is read by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from raymoe.exchange.refusal import NO_REFUSAL, Cause, Refusal

_BAD_COUNT = -(2**62)
"""The id that stands for a bad `num_tokens`: _BAD_COUNT + T' * 2**32 + the 32 bits of num_tokens."""
_LOWEST_ID = -(2**61)  # lower ids of the caller become this one, which is refused too
_LOW_32 = 2**32 - 1


@dataclass(frozen=True)
class DomainShape:
    """The sizes of a world's domains, of one rank."""

    domains: int
    per_domain: int
    index: int
    """This rank's domain."""
    tokens: int
    local: int
    """Experts a rank."""
    chunk: int = 0
    """Tokens of a chunk; the last one may have fewer. 0: all tokens are one."""

    @property
    def experts(self) -> int:
        return self.domains * self.per_domain * self.local

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The first token of each chunk, and its end."""
        each = self.chunk or self.tokens
        return [(begin, min(begin + each, self.tokens)) for begin in range(0, self.tokens, each)]

    def blocks(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """View rows of the tokens inside, [N*T, ...], as one block for each chunk, [N, tokens of the chunk, ...]."""
        N = self.domains
        return [rows[N * begin : N * end].view(N, end - begin, *rows.shape[1:]) for begin, end in self.chunks]

    def inside(self, blocks: torch.Tensor) -> torch.Tensor:
        """Put blocks of the domains' tokens, [N, T, ...], into the order of tokens inside, [N*T, ...].

        >>> shape = DomainShape(domains=2, per_domain=1, index=0, tokens=3, local=1, chunk=2)
        >>> shape.inside(torch.tensor([[1, 2, 3], [10, 20, 30]])).tolist()
        [1, 2, 10, 20, 3, 30]
        """
        if len(self.chunks) == 1:
            return blocks.flatten(0, 1)
        return torch.cat([blocks[:, begin:end].flatten(0, 1) for begin, end in self.chunks])

    def by_domain(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Do the reverse of `inside`: copy rows, [N*T, ...], to `out`, [N, T, ...]."""
        for block, (begin, end) in zip(self.blocks(rows), self.chunks, strict=True):
            out[:, begin:end].copy_(block)

    def source_of(self, number: int) -> tuple[int, int]:
        """Return the domain and the token of a token inside.

        >>> shape = DomainShape(domains=2, per_domain=1, index=0, tokens=3, local=1, chunk=2)
        >>> [shape.source_of(number) for number in range(6)]
        [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
        """
        each = self.chunk or self.tokens
        begin, end = self.chunks[number // (self.domains * each)]
        source, token = divmod(number - self.domains * begin, end - begin)
        return source, begin + token


def told_ids(topk_idx: torch.Tensor, num_tokens: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write this rank's ids into `out`, int64[T, K]: -1 for tokens that are not sent.

    A `num_tokens` out of range leaves only an id that no expert has, which says so. Ids out of range stay as they are,
    so the exchanges inside all domains refuse them.

    >>> out = torch.empty(3, 2, dtype=torch.int64)
    >>> told_ids(torch.tensor([[4, 9], [1, 0]]), torch.tensor([1]), out)
    >>> out.tolist()
    [[4, 9], [-1, -1], [-1, -1]]
    >>> told_ids(torch.tensor([[4, 9], [1, 0]]), torch.tensor([3]), out)
    >>> out[1:].tolist(), refused_count(int(out[0, 0]))
    ([[-1, -1], [-1, -1]], Refusal(cause=<Cause.TOKENS: 5>, other=2, number=3))
    """
    given = len(topk_idx)
    out.fill_(-1)
    ids = topk_idx.long().clamp(min=_LOWEST_ID)
    if num_tokens is None:
        out[:given] = ids
        return
    count = num_tokens.long()
    good = (count >= 0) & (count <= given)
    sent = (torch.arange(given, device=out.device) < count) & good
    out[:given] = torch.where(sent[:, None], ids, -1)
    code = (count & _LOW_32) + (_BAD_COUNT + (given << 32))
    out[0, :1] = torch.where(good, out[0, :1], code)


def refused_count(number: int) -> Refusal | None:
    """Return the refusal that an id stands for; None where it is an id."""
    told = number - _BAD_COUNT
    if not 0 <= told < 2**57:
        return None
    count = told & _LOW_32
    return Refusal(Cause.TOKENS, told >> 32, count - 2**32 if count >= 2**31 else count)


def ids_inside(ids: torch.Tensor, shape: DomainShape) -> torch.Tensor:
    """Return the ids inside this rank's domain, int64[N*T, K], of the ids that its rail gathered, int64[N, T, K].

    Experts of other domains become -1. Ids that no expert has stay ids that none has.

    >>> two_domains = DomainShape(domains=2, per_domain=1, index=1, tokens=2, local=2)  # experts 2 and 3 are here
    >>> ids_inside(torch.tensor([[[0, 2], [3, 1]], [[2, 3], [-1, 4]]]), two_domains).tolist()
    [[-1, 0], [2, -1], [1, 3], [-1, 4]]
    """
    N, local = shape.domains, shape.local
    expert = ids - shape.index * shape.per_domain * local
    here = (expert >= 0) & (expert < shape.per_domain * local)
    source = torch.arange(N, device=ids.device)[:, None, None]
    inside = expert * N + source  # p*local*N + j*N + s, because expert is p*local + j
    bad = (ids < -1) | (ids >= shape.experts)
    return shape.inside(torch.where(here, inside, torch.where(bad, ids, -1)))


def of_experts(offsets: torch.Tensor, counts: torch.Tensor, domains: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the offsets, int32[local + 1], and counts, int32[local], of those inside: N experts there are one.

    >>> offsets, counts = torch.tensor([0, 1, 4, 4, 8]), torch.tensor([1, 2, 0, 1])
    >>> [each.tolist() for each in of_experts(offsets, counts, domains=2)]
    [[0, 4, 8], [3, 1]]
    """
    return offsets[::domains].contiguous(), counts.view(-1, domains).sum(dim=1, dtype=torch.int32)


def refusals_of_ranks(words: Sequence[int], shape: DomainShape) -> list[Refusal]:
    """Return the status of each rank of the world, from those that the domains' exchanges had: two words a rank.

    A status inside names the token of a rail, and a place of its domain. Here it becomes that of the rank whose token
    it is, and names ranks of the world.

    >>> shape = DomainShape(domains=2, per_domain=2, index=0, tokens=8, local=2)
    >>> inside = [0, 0, 0, 0, 0, 0, Cause.ID + (9 << 32), 77]  # token 1 of the rail's rank in domain 1
    >>> refusals_of_ranks(inside, shape)[3]
    Refusal(cause=<Cause.ID: 1>, other=1, number=77)
    """
    L = shape.per_domain
    pairs = zip(words[::2], words[1::2], strict=True)
    found = [Refusal(Cause(first & _LOW_32), first >> 32, number) for first, number in pairs]
    statuses = [NO_REFUSAL if each else each for each in found]
    for rank, refusal in enumerate(found):
        domain, place = divmod(rank, L)
        if refusal.cause is Cause.ID:
            source, token = shape.source_of(refusal.other)
            bad_count = refused_count(refusal.number)
            statuses[source * L + place] = bad_count or replace(refusal, other=token)
        elif refusal.cause in (Cause.COUNT, Cause.EXPERT):
            statuses[rank] = statuses[rank] or replace(refusal, other=domain * L + refusal.other)
        elif refusal:
            statuses[rank] = statuses[rank] or refusal
    return statuses
