"""Cases of the gradient tests: what a rank runs, and autograd through plain float64 arithmetic to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raymoe.errors import DataRefused
from raymoe.memory.world import World
from raymoe.moe.differentiable import ExpertRows, combine, dispatch, dispatch_exact
from raymoe.moe.expert_rows import Groups
from tests.unit.exchange.exchange_cases import Batch, Case, batches, expert_major, open_exchange


@dataclass
class Gradients:
    """The result and the gradients of one rank in one step."""

    y: torch.Tensor
    x: torch.Tensor
    weights: torch.Tensor
    scale: torch.Tensor  # of the experts, [L, H]


def scales_of(case: Case) -> torch.Tensor:
    """One scale a column for each expert: f_e(x) = tanh(scale_e * x) + e / 8, not linear and not zero at zero."""
    source = torch.Generator().manual_seed(case.seed)
    return torch.rand(case.spec.experts, case.spec.hidden, generator=source, dtype=torch.float64) + 0.5


def loss_weights(case: Case, rank: int, tokens: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(100 + case.seed + rank)
    return torch.randn(tokens, case.spec.hidden, generator=source, dtype=torch.float64)


def apply(got: ExpertRows, scale: torch.Tensor, first: int, weighted: bool) -> torch.Tensor:
    """Apply the experts; with `weighted` false, the weights too. With layout `token`, add the rows of each token."""
    if got.topk_idx is not None:
        return apply_by_token(got, got.topk_idx, scale, first)
    expert = Groups(got.expert_offsets, got.expert_counts).expert_of_row(len(got.x))
    there, expert = expert < len(scale), expert.clamp(max=len(scale) - 1)
    x = torch.where(there[:, None], got.x.float(), 0.0)  # on GPUs other rows may hold NaN, and so may their gradients
    rows = torch.tanh(x * scale[expert]) + ((first + expert) / 8)[:, None]
    rows = torch.where(there[:, None], rows, 0.0)
    return (rows if weighted else rows * torch.where(there, got.weights, 0.0)[:, None]).to(got.x.dtype)


def apply_by_token(got: ExpertRows, topk_idx: torch.Tensor, scale: torch.Tensor, first: int) -> torch.Tensor:
    """Return the weighted sum of the results of each row's experts. Where there are none, rows may hold NaN."""
    here = topk_idx >= 0
    expert = topk_idx.clamp(min=0).long()
    x = torch.where(here.any(1)[:, None], got.x.float(), 0.0)
    results = torch.tanh(x[:, None] * scale[expert]) + ((first + expert) / 8)[:, :, None]
    return torch.where(here[:, :, None], results * got.weights[:, :, None], 0.0).sum(1).to(got.x.dtype)


def run_gradients(world: World, case: Case) -> list[Gradients]:
    """Run forward and backward of each step on a rank."""
    local = case.spec.local_experts(world.size)
    found = []
    with open_exchange(world, case) as exchange:
        for step in range(len(case.routing)):
            batch = batches(case, step)[world.rank].on(world.device)
            x, weights = batch.x.requires_grad_(), batch.weights.requires_grad_()
            scale = scales_of(case)[world.rank * local :][:local].float().to(world.device).requires_grad_()
            count = torch.tensor([batch.num_tokens], dtype=torch.int32, device=x.device) if case.prefix else None
            got = (dispatch_exact if case.exact else dispatch)(exchange, x, batch.ids, weights, count)
            rows = apply(got, scale, world.rank * local, case.weighted)
            y = combine(exchange, rows, got, weighted=case.weighted)
            (y.double() * loss_weights(case, world.rank, len(x)).to(x.device)).sum().backward()
            assert x.grad is not None and weights.grad is not None and scale.grad is not None
            found.append(Gradients(*(each.cpu() for each in (y.detach(), x.grad, weights.grad, scale.grad))))
    return found


def reference(batch: Batch, scale: torch.Tensor, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return y and the gradients of x, weights and scale, by autograd in float64. One rank's tokens, all experts."""
    x, weights = batch.x.double().detach().requires_grad_(), batch.weights.double().detach().requires_grad_()
    scale = scale.clone().requires_grad_()
    y = torch.zeros_like(x)
    for token in range(batch.num_tokens):
        for k, expert in enumerate(batch.ids[token].tolist()):
            if expert >= 0:
                row = torch.tanh(x[token] * scale[expert]) + expert / 8
                y = y + torch.zeros_like(y).index_put((torch.tensor(token),), weights[token, k] * row)
    (y * loss + 0.0 * (x.sum() + weights.sum() + scale.sum())).sum().backward()
    assert x.grad is not None and weights.grad is not None and scale.grad is not None
    return y.detach(), x.grad, weights.grad, scale.grad


def judge_gradients(case: Case, found: list[list[Gradients]], bound: float) -> None:
    """Compare all ranks with the reference. Expert gradients are the sum over the tokens of all ranks."""
    local = case.spec.local_experts(case.ranks)
    for step in range(len(case.routing)):
        total = torch.zeros(case.spec.experts, case.spec.hidden, dtype=torch.float64)
        for rank, batch in enumerate(batches(case, step)):
            results = found[rank][step]
            y, x, weights, scale = reference(batch, scales_of(case), loss_weights(case, rank, len(batch.x)))
            total += scale
            for name, have, want in (("y", results.y, y), ("x", results.x, x), ("weights", results.weights, weights)):
                close(f"{name} of rank {rank} in step {step}", have, want, bound)
        scales = torch.cat([found[rank][step].scale for rank in range(case.ranks)])
        assert scales.shape == (local * case.ranks, case.spec.hidden)
        close(f"scales in step {step}", scales, total, bound)


Refused = tuple[str, torch.Tensor, torch.Tensor]
"""What `check` says after a combine of gradients, the sums of rows, and the entries' gradients."""


def refuse_gradients(world: World, case: Case) -> list[Refused]:
    """Name an expert that does not exist on the last rank in the second of three steps, and combine gradients."""
    spec, device, found = case.spec, world.device, []
    with open_exchange(world, case) as exchange:
        for bad in (False, True, False):
            ids = torch.arange(spec.tokens * spec.topk).reshape(spec.tokens, spec.topk) % spec.experts
            if bad and world.rank == world.size - 1:
                ids[1, 1] = spec.experts
            x, weights = (
                torch.ones(spec.tokens, spec.hidden, dtype=getattr(torch, spec.dtype)),
                torch.full(ids.shape, 0.5),
            )
            got = exchange.dispatch(x.to(device), ids.to(device), weights.to(device))
            y, entries = exchange.combine_gradients(expert_major(got), got.weights, got)
            said = ""
            try:
                exchange.check()
            except DataRefused as error:
                said = str(error)
            found.append((said, y.cpu(), entries.cpu()))
    return found


def judge_refused_gradients(found: list[Refused], says: str) -> None:
    first, (said, y, entries), third = found
    assert said == says
    assert y.isnan().all() and entries.isnan().all()
    for said, y, entries in (first, third):
        assert said == ""
        assert (y == entries.shape[1]).all() and (entries == 0.5).all()


def close(what: str, have: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    """Raise unless each element is near, relative to the largest one that was wanted."""
    assert have.shape == want.shape, what
    if want.numel():
        error = float((have.double() - want).abs().max() / want.abs().max().clamp(min=1.0))
        assert error <= bound, f"{what}: off by {error:.2e}"
