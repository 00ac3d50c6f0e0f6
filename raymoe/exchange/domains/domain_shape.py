"""The sizes and the numbers of an exchange between domains of GPU ranks.

N domains of L ranks, T tokens, E experts, `local` experts a rank, domain `index`. A domain's own exchange has N*T
tokens a rank: those of the ranks with one place in each domain. They are numbered chunk by chunk, in a chunk domain by
domain. So their order is that in which rows come over the rail. With one chunk, token s*T + t is token t of the rank in
domain s.

Each expert has N ids there, one for each source domain: expert j of place p, for rows from domain s, is
p*local*N + j*N + s. So its N ids are neighbours, in the order of the domains. Rows in the order of these ids are in the
order of the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from raymoe.exchange.refusal import NO_REFUSAL, Cause, Refusal

BAD_COUNT = -(2**62)
"""The id that stands for a bad `num_tokens`: BAD_COUNT + T' * 2**32 + the 32 bits of num_tokens. As in
kernels/domains/publish_tokens.cu."""
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
        size = self.chunk or self.tokens
        return [(begin, min(begin + size, self.tokens)) for begin in range(0, self.tokens, size)]

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
        begin, end = self.chunks[number // (self.domains * (self.chunk or self.tokens))]
        source, token = divmod(number - self.domains * begin, end - begin)
        return source, begin + token


def refused_count(number: int) -> Refusal | None:
    """Return the refusal that an id stands for; None where it is an id."""
    packed = number - BAD_COUNT
    if not 0 <= packed < 2**57:
        return None
    count = packed & _LOW_32
    return Refusal(Cause.TOKENS, packed >> 32, count - 2**32 if count >= 2**31 else count)


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
    inside = [Refusal(Cause(first & _LOW_32), first >> 32, number) for first, number in pairs]
    statuses = [NO_REFUSAL if status else status for status in inside]
    for rank, refusal in enumerate(inside):
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
