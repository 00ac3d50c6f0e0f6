"""The model of workload train, the text that it learns, and the same model unsharded, by other code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raymoe.config.job import Job
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.layer import LayerForm, MoELayer
from raymoe.moe.router_formulas import RouterForm
from raymoe.moe.weights import ExpertShape, expert_weights, generator, normal
from raymoe.workload.memory_needed import spec_of

BYTES, FOLLOWERS, LENGTH, EPS = 256, 4, 32, 1e-6
RATE, MOMENTUM, MAX_NORM, BIAS_SPEED = 0.3, 0.9, 1.0, 1e-3  # steps of Adam would hide a gradient of a wrong size


@dataclass(frozen=True)
class Text:
    """Bytes each of which is followed by one of four, with equal chance; the seed chooses the four.

    A model that knows all followers has a loss of ln 4, and one that knows nothing a loss of ln 256.

    >>> ids, following = Text(seed=0, tokens=40).of(rank=1, step=2)
    >>> ids.shape, following.shape, bool((ids[1:32] == following[:31]).all())
    (torch.Size([40]), torch.Size([40]), True)
    """

    seed: int
    tokens: int

    def of(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of a rank in a step, and the byte that follows each."""
        table = torch.randint(BYTES, (BYTES, FOLLOWERS), generator=generator("followers", self.seed))
        source, rows = generator("text", self.seed, rank, step), -(-self.tokens // LENGTH)
        places = [torch.randint(BYTES, (rows,), generator=source)]
        for _ in range(LENGTH):
            places.append(table[places[-1], torch.randint(FOLLOWERS, (rows,), generator=source)])
        text = torch.stack(places, dim=1)
        return text[:, :-1].flatten()[: self.tokens], text[:, 1:].flatten()[: self.tokens]


class TrainedModel(nn.Module):
    """Bytes to logits, through layers whose experts are spread over the ranks."""

    def __init__(self, job: Job, world: World) -> None:
        super().__init__()
        spec, seed = spec_of(job), job.routing.seed
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.bytes, self.head = (nn.Parameter(table.to(world.device)) for table in tables(spec.hidden, seed))
        router = RouterForm(spec.experts, spec.topk, score="sigmoid")
        form = LayerForm(job.shape.ffn, router, norm=EPS, residual=True)
        layers = [
            MoELayer(world, spec, form, backend=job.exchange.backend, sms=job.exchange.sms, seed=seed + place)
            for place in range(job.train.layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.exchange = layers[0].exchange

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.bytes[ids].to(self.dtype)
        for layer in self.layers:
            x = layer(x)
        return x.float() @ self.head.T


def tables(hidden: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the vectors of bytes, and those of the head, float32[256, H]."""
    source = generator("bytes", seed)
    return normal(source, BYTES, hidden), normal(source, BYTES, hidden) * hidden**-0.5


class UnshardedModel:
    """The same model and the same training in one process, by plain torch: all experts, the tokens of all ranks.

    Only the drawn weights come from the library. Products are float32, and weights have the dtype of the job.
    """

    def __init__(self, job: Job, trained: TrainedModel) -> None:
        spec: ExchangeSpec = spec_of(job)
        self.text, self.ranks, self.topk = Text(job.routing.seed, spec.tokens), job.world.ranks, spec.topk
        device, dtype, self.experts = trained.bytes.device, trained.dtype, spec.experts
        self.device, self.dtype = device, dtype
        self.bytes, self.head = (table.to(device).requires_grad_() for table in tables(spec.hidden, job.routing.seed))
        self.layers = []
        for place, layer in enumerate(trained.layers):
            shape = ExpertShape(spec.hidden, job.shape.ffn, dtype)
            drawn = [expert_weights(shape, job.routing.seed + place, expert, device) for expert in range(spec.experts)]
            stacks = [torch.stack([getattr(each, name) for each in drawn]) for name in ("gate_up", "down")]
            copies = [layer.get_parameter(name).detach().clone() for name in ("norm.weight", "gate.weight")]
            self.layers.append([weight.requires_grad_() for weight in (*copies, *stacks)])
        self.bias = torch.zeros(len(self.layers), spec.experts, device=device)
        self.load = torch.zeros_like(self.bias)
        self.parameters = [self.bytes, self.head, *(weight for layer in self.layers for weight in layer)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=RATE, momentum=MOMENTUM)
        self.losses: list[float] = []

    def loss_of(self, step: int) -> float:
        """Return the loss of a step, after training up to it."""
        while len(self.losses) <= step:
            self.losses.append(self._train(len(self.losses)))
        return self.losses[step]

    def _train(self, step: int) -> float:
        texts = [self.text.of(rank, step) for rank in range(self.ranks)]
        ids, following = (torch.cat(part).to(self.device) for part in zip(*texts, strict=True))
        x = self.bytes[ids].to(self.dtype)
        for place in range(len(self.layers)):
            x = x + self._experts(x, place)
        loss: Any = nn.functional.cross_entropy(x.float() @ self.head.T, following)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()
        self.bias += BIAS_SPEED * torch.sign(self.load.mean(dim=1, keepdim=True) - self.load)
        self.load.zero_()
        return float(loss.detach())

    def _experts(self, x: torch.Tensor, place: int) -> torch.Tensor:
        norm, gate, gate_up, down = self.layers[place]
        wide = x.float()
        h = (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS) * norm.float()).to(self.dtype)
        scores = (h.float() @ gate.float().T).sigmoid()
        chosen = (scores + self.bias[place]).topk(self.topk).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(dim=1, keepdim=True)
        self.load[place] += chosen.flatten().bincount(minlength=self.experts)
        y = torch.zeros_like(wide)
        for expert in range(self.experts):
            token, k = (chosen == expert).nonzero(as_tuple=True)
            left, right = (h[token].float() @ gate_up[expert].float().T).chunk(2, dim=-1)
            rows = (left * left.sigmoid() * right) @ down[expert].float().T
            y = y.index_add(0, token, rows * weights[token, k, None])
        return y.to(self.dtype)
