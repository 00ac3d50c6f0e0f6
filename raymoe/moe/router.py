"""The router: scores of all experts for each token, the chosen experts, and their weights.

Plain torch, differentiable, without a wait for the device. Scores are float32 for any dtype of x: in bfloat16, experts
with close scores could swap places from machine to machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from raymoe.errors import ConfigError

SCORES = ("softmax", "sigmoid", "chosen")
_TINY = 1e-20  # keeps a sum of scores that are all zero from dividing by zero


@dataclass(frozen=True)
class RouterForm:
    """How a router turns logits into experts and weights.

    - `score`: `softmax` over all experts (Mixtral, Qwen3, OLMoE), `sigmoid` of each (DeepSeek-V3), or `chosen`: the
      softmax over the chosen experts alone (gpt-oss).
    - `normalise` divides a token's weights by their sum. `scale` multiplies them afterwards.
    - `groups`: experts are in so many groups, of which the best `topk_groups` are kept. A group's score is the sum of
      its two best experts.

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
            asked = f"a router over {self.experts} experts was asked for the best {self.topk}"
            raise ConfigError(f"{asked}; ask for 1 to {self.experts}")
        if self.groups < 1 or self.experts % self.groups or not 1 <= self.topk_groups <= self.groups:
            raise ConfigError(
                f"{self.topk_groups} of {self.groups} groups of {self.experts} experts; groups are equal, and at least "
                "one is kept"
            )
        if self.groups > 1 and self.per_group < 2:
            raise ConfigError(f"{self.groups} groups of one expert; a group's score needs two: take fewer groups")
        if (kept := self.topk_groups * self.per_group) < self.topk:
            raise ConfigError(
                f"topk is {self.topk} and {self.topk_groups} of {self.groups} groups hold {kept} experts; take a "
                "smaller topk or more groups"
            )

    @property
    def per_group(self) -> int:
        return self.experts // self.groups


class Routed(NamedTuple):
    """The choice for each token, in the form that a dispatch takes, and the logits that led to it."""

    topk_idx: torch.Tensor  # int64[T', K]
    topk_weights: torch.Tensor  # float32[T', K], with gradients
    logits: torch.Tensor  # float32[T', E], with gradients


def route(
    logits: torch.Tensor, form: RouterForm, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by float32 `logits[T', E]`. `bias[E]` counts for the choice, not for the weights.

    >>> logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    >>> ids, weights = route(logits, RouterForm(experts=4, topk=2))
    >>> ids.tolist(), [round(weight, 4) for weight in weights[0].tolist()]
    ([[2, 1]], [0.7311, 0.2689])
    >>> route(logits, RouterForm(4, 1, score="sigmoid"), bias=torch.tensor([9.0, 0.0, 0.0, 0.0]))[0].tolist()
    [[0]]
    """
    if form.score == "chosen":
        best, ids = _best(logits if bias is None else logits + bias, form)
        weights = (best if bias is None else logits.gather(1, ids)).softmax(dim=-1)
        return ids, weights * form.scale if form.scale != 1.0 else weights
    scores = logits.sigmoid() if form.score == "sigmoid" else logits.softmax(dim=-1)
    weights, ids = _best(scores if bias is None else scores + bias, form)
    if bias is not None or form.groups > 1:
        weights = scores.gather(1, ids)
    if form.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
    return ids, weights * form.scale if form.scale != 1.0 else weights


def _best(values: torch.Tensor, form: RouterForm) -> tuple[torch.Tensor, torch.Tensor]:
    """The K largest of each row, from the best groups."""
    if form.groups > 1:
        grouped = values.view(len(values), form.groups, form.per_group)
        score = grouped.topk(2, dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(score, dtype=torch.bool).scatter(1, score.topk(form.topk_groups, dim=-1).indices, True)
        values = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    found = values.topk(form.topk, dim=-1)
    return found.values, found.indices


def expert_load(topk_idx: torch.Tensor, experts: int) -> torch.Tensor:
    """Count the entries (token, k) of each expert, int64[E], without a wait. Ids of -1 count for none.

    >>> expert_load(torch.tensor([[0, 2], [2, -1]]), experts=4).tolist()
    [1, 0, 2, 0]
    """
    load = torch.zeros(experts + 1, dtype=torch.int64, device=topk_idx.device)
    ids = topk_idx.flatten().long()
    return load.scatter_add_(0, torch.where(ids < 0, experts, ids), torch.ones_like(ids))[:experts]


def balance_loss(logits: torch.Tensor, topk_idx: torch.Tensor, form: RouterForm) -> torch.Tensor:
    """Return the loss that falls as tokens spread evenly: E times the sum over experts of load times mean score.

    The load is the number of entries of an expert over the number of tokens; only the scores have gradients. Of an even
    load with even scores the loss is K.

    >>> float(balance_loss(torch.zeros(2, 4), torch.tensor([[0, 1], [2, 3]]), RouterForm(experts=4, topk=2)))
    2.0
    """
    scores = logits.sigmoid() if form.score == "sigmoid" else logits.softmax(dim=-1)
    if form.score == "sigmoid":
        scores = scores / scores.sum(dim=-1, keepdim=True)
    load = expert_load(topk_idx, form.experts) / max(1, len(topk_idx))
    return form.experts * (load * scores.sum(dim=0) / max(1, len(logits))).sum()


class Router(nn.Module):
    """Chooses experts by `weight[E, H]`, and `bias[E]` where the model has one.

    `e_score_correction_bias[E]`, where the model has one, is a buffer: a trainer moves it to balance the load.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    e_score_correction_bias: torch.Tensor | None

    def __init__(
        self,
        form: RouterForm,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.form = form
        self.weight = _parameter(weight)
        self.bias = None if bias is None else _parameter(bias)
        self.register_buffer("e_score_correction_bias", correction)

    def forward(self, x: torch.Tensor) -> Routed:
        """Map x[T', H] to the experts of each token, best first, and their weights."""
        bias = None if self.bias is None else self.bias.float()
        logits = nn.functional.linear(x.float(), self.weight.float(), bias)
        ids, weights = route(logits, self.form, self.e_score_correction_bias)
        return Routed(ids, weights, logits)


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
