"""Compute a router by torch: its form, the choice of experts, their weights and the gradients.

CPUs and older GPUs use this. Of equal scores the expert with the lowest id is chosen first, and the group with
the lowest number. NaN counts as larger than every number, as in torch.topk: the weights of such a token are NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.moe.by_row import sigmoid

SCORES = ("softmax", "sigmoid", "chosen")
TINY = 1e-20  # keeps a sum of scores that are all zero from dividing by zero


@dataclass(frozen=True)
class RouterForm:
    """How a router turns logits into experts and weights.

    - `score`: `softmax` over all experts (Mixtral, Qwen3, OLMoE), `sigmoid` of each (DeepSeek-V3), or `chosen`: the
      softmax over the chosen experts alone (gpt-oss).
    - `normalise` divides a token's weights by their sum. `scale` multiplies them afterwards.
    - `groups`: experts are in equal groups, and only the best `topk_groups` groups are chosen from. A group's score is
      the sum of its two best experts.

    >>> RouterForm(experts=8, topk=2, score="sigmoid", groups=4, topk_groups=1).per_group
    2
    >>> RouterForm(experts=8, topk=3, groups=4, topk_groups=1)
    Traceback (most recent call last):
    raymoe.errors.ConfigError: topk is 3 and 1 of 4 groups hold 2 experts; take a smaller topk or more groups
    """

    experts: int
    topk: int
    score: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    topk_groups: int = 1

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ConfigError(f"score is {self.score!r}; it is one of {', '.join(SCORES)}")
        if not 1 <= self.topk <= self.experts:
            raise ConfigError(
                f"a router over {self.experts} experts was asked for the best {self.topk}; ask for 1 to {self.experts}"
            )
        if self.groups < 1 or self.experts % self.groups or not 1 <= self.topk_groups <= self.groups:
            raise ConfigError(
                f"{self.topk_groups} of {self.groups} groups of {self.experts} experts; groups are equal, and at least "
                "one is kept"
            )
        if self.groups > 1 and self.per_group < 2:
            raise ConfigError(f"{self.groups} groups of one expert; a group's score needs two: take fewer groups")
        if (left := self.topk_groups * self.per_group) < self.topk:
            raise ConfigError(
                f"topk is {self.topk} and {self.topk_groups} of {self.groups} groups hold {left} experts; take a "
                "smaller topk or more groups"
            )

    @property
    def per_group(self) -> int:
        return self.experts // self.groups


def route(logits: Tensor, form: RouterForm, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts by `logits[T', E]`, and give their weights, which have gradients."""
    if form.score == "chosen":
        best, ids = _best(logits if bias is None else logits + bias, form)
        weights = (best if bias is None else logits.gather(1, ids)).softmax(dim=-1)
        return ids, weights * form.scale if form.scale != 1.0 else weights
    scores = sigmoid(logits) if form.score == "sigmoid" else logits.softmax(dim=-1)
    weights, ids = _best(scores if bias is None else scores + bias, form)
    if bias is not None or form.groups > 1:
        weights = scores.gather(1, ids)
    if form.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return ids, weights * form.scale if form.scale != 1.0 else weights


def weights_of(logits: Tensor, topk_idx: Tensor, form: RouterForm) -> Tensor:
    """Return the weights of experts that are chosen already, with gradients.

    >>> weights_of(torch.zeros(1, 4), torch.tensor([[2, 1]]), RouterForm(4, 2, scale=3.0)).tolist()
    [[1.5, 1.5]]
    """
    if form.score == "chosen":
        weights = logits.gather(1, topk_idx).softmax(dim=-1)
        return weights * form.scale if form.scale != 1.0 else weights
    scores = sigmoid(logits) if form.score == "sigmoid" else logits.softmax(dim=-1)
    return weights_of_scores(scores, topk_idx, form)


def weights_of_scores(scores: Tensor, topk_idx: Tensor, form: RouterForm) -> Tensor:
    """Return the weights of chosen experts from the scores of all."""
    weights = scores.gather(1, topk_idx)
    if form.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return weights * form.scale if form.scale != 1.0 else weights


def replay(live: tuple[Tensor, Tensor], recorded: Tensor, weigh: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Put recorded ids in the place of those that a router chose; return them and their weights.

    `live` is the router's choice. A token with an id below 0 was not recorded, and keeps it. So does a token whose
    recorded ids are those of the choice: its weights are the same bits. `weigh` computes the weights of all ids. Ids
    out of range stay, for the dispatch to refuse; they have the weight of another expert.
    """
    live_ids, live_weights = live
    recorded = recorded.to(live_ids.dtype)
    ids = torch.where((recorded < 0).any(dim=-1, keepdim=True), live_ids, recorded)
    same = (ids == live_ids).all(dim=-1, keepdim=True)
    return ids, torch.where(same, live_weights, weigh(ids).to(live_weights.dtype))


def _best(values: Tensor, form: RouterForm) -> tuple[Tensor, Tensor]:
    """The K largest of each row, from the best groups. A stable sort leaves equal ones in the order of their ids."""
    if form.groups > 1:
        grouped = values.view(len(values), form.groups, form.per_group)
        score = grouped.topk(2, dim=-1).values.sum(dim=-1)
        best = score.sort(dim=-1, descending=True, stable=True).indices[:, : form.topk_groups]
        open_groups = torch.zeros_like(score, dtype=torch.bool).scatter(1, best, True)
        values = grouped.masked_fill(~open_groups[..., None], -torch.inf).flatten(1)
    ordered = values.sort(dim=-1, descending=True, stable=True)
    return ordered.values[:, : form.topk].contiguous(), ordered.indices[:, : form.topk].contiguous()


def route_backward(dweights: Tensor, logits: Tensor, topk_idx: Tensor, form: RouterForm) -> Tensor:
    """Return the gradient of the logits from that of the weights.

    Only the chosen experts have one, except in the softmax over all experts that is not normalised. Normalised, that
    softmax is the softmax over the chosen.
    """
    dweights, wide = dweights * form.scale, logits.float()
    if form.score == "softmax" and not form.normalise:
        scores = wide.softmax(dim=-1)
        by_score = scores.gather(1, topk_idx) * dweights
        gradient = (-by_score.sum(dim=-1, keepdim=True) * scores).scatter_add(1, topk_idx, by_score)
        return gradient.to(logits.dtype)
    chosen = wide.gather(1, topk_idx)
    if form.score == "sigmoid":
        scores = chosen.sigmoid()
        if form.normalise:
            total = scores.sum(dim=-1, keepdim=True) + TINY
            dweights = (dweights - (dweights * scores).sum(dim=-1, keepdim=True) / total) / total
        gradient = dweights * scores * (1 - scores)
    else:
        scores = chosen.softmax(dim=-1)
        gradient = scores * (dweights - (dweights * scores).sum(dim=-1, keepdim=True))
    return torch.zeros_like(wide).scatter(1, topk_idx, gradient).to(logits.dtype)


def expert_load(topk_idx: Tensor, experts: int) -> Tensor:
    """Count the entries (token, k) of each expert, int64[E]. Ids of -1 count for none."""
    load = torch.zeros(experts + 1, dtype=torch.int64, device=topk_idx.device)
    ids = topk_idx.flatten().long()
    return load.scatter_add_(0, torch.where(ids < 0, experts, ids), torch.ones_like(ids))[:experts]


def shares(logits: Tensor, sigmoid: bool) -> Tensor:
    """Return scores that sum to 1 for each token: softmax, or sigmoids divided by their sum."""
    if not sigmoid:
        return logits.softmax(dim=-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(dim=-1, keepdim=True) + TINY)


def shares_backward(dsums: Tensor, logits: Tensor, sigmoid: bool) -> Tensor:
    """Return the gradient of the logits from that of the sums of shares over all tokens."""
    wide = logits.float()
    share = shares(wide, sigmoid)
    gradient = share * (dsums - (share * dsums).sum(dim=-1, keepdim=True))
    return (gradient * (1 - wide.sigmoid()) if sigmoid else gradient).to(logits.dtype)
