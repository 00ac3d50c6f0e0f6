"""The small kernels of a dispatch between domains, as torch operations."""

from __future__ import annotations

import torch

from raymoe.exchange.domains.domain_shape import BAD_COUNT, DomainShape, refused_count

LOWEST_ID = -(2**61)  # lower ids of the caller become this one, which is refused too
__all__ = ["ids_inside", "of_experts", "published_ids", "refused_count"]


def published_ids(topk_idx: torch.Tensor, num_tokens: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write this rank's ids into `out`, int64[T, K]: -1 for tokens that are not sent.

    A `num_tokens` out of range leaves only an id that no expert has, which says so. Ids out of range stay as they are,
    so the exchanges inside all domains refuse them.

    >>> out = torch.empty(3, 2, dtype=torch.int64)
    >>> published_ids(torch.tensor([[4, 9], [1, 0]]), torch.tensor([1]), out)
    >>> out.tolist()
    [[4, 9], [-1, -1], [-1, -1]]
    >>> published_ids(torch.tensor([[4, 9], [1, 0]]), torch.tensor([3]), out)
    >>> out[1:].tolist(), refused_count(int(out[0, 0]))
    ([[-1, -1], [-1, -1]], Refusal(cause=<Cause.TOKENS: 5>, other=2, number=3))
    """
    x_rows = len(topk_idx)
    out.fill_(-1)
    ids = topk_idx.long().clamp(min=LOWEST_ID)
    if num_tokens is None:
        out[:x_rows] = ids
        return
    count = num_tokens.long()
    good = (count >= 0) & (count <= x_rows)
    sent = (torch.arange(x_rows, device=out.device) < count) & good
    out[:x_rows] = torch.where(sent[:, None], ids, -1)
    code = (count & (2**32 - 1)) + (BAD_COUNT + (x_rows << 32))
    out[0, :1] = torch.where(good, out[0, :1], code)


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
