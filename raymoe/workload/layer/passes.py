"""Make the layer that a job asks for, run its passes, and compare them with float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from raymoe.config import Job
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import router_formulas as formulas
from raymoe.moe.experts import GPT_OSS, SWIGLU
from raymoe.moe.layer import LayerForm, MoELayer
from raymoe.moe.microbatches import in_microbatches
from raymoe.moe.router_formulas import RouterForm
from raymoe.moe.torch_products import arithmetic_dtype
from raymoe.moe.weights import ExpertShape
from raymoe.workload.inputs import Batch
from raymoe.workload.layer.marks import START, SUM, Marks
from raymoe.workload.memory_needed import spec_of
from raymoe.workload.oracle import LAYER_SLACK, LayerExperts, SharedExpert, Want, bound_of, want

EPS = 1e-6
VERIFIED_ON_GPUS = 64
"""Tokens of a rank that a step on GPUs verifies: all their experts are drawn again, and multiply in float64."""


@dataclass(frozen=True)
class Results:
    """The output of a step, and the gradients of the tokens and of all weights; none without a backward pass."""

    y: torch.Tensor
    gradients: tuple[torch.Tensor, ...]


class LayerPasses:
    """A layer and its passes. Without a router of its own it has no norm and adds no x: tokens go as `Batch` says."""

    def __init__(self, job: Job, world: World) -> None:
        section, self.spec, self.seed = job.layer, spec_of(job), job.routing.seed
        self.shape = ExpertShape(self.spec.hidden, job.shape.ffn, getattr(torch, self.spec.dtype))
        self.own_router, self.shared = section.router.kind != "given", section.shared
        self.backward, self.recompute = section.backward, section.recompute
        form = LayerForm(
            job.shape.ffn,
            router_of(job),
            activation=GPT_OSS if section.experts == "gpt_oss" else SWIGLU,
            biases=section.experts == "gpt_oss",
            shared=section.shared,
            norm=EPS if self.own_router else None,
            residual=self.own_router,
            recompute="activation" if self.recompute == "activation" else "nothing",  # `run` itself repeats all
            experts_dtype=section.experts_dtype,
        )
        backend, sms = job.exchange.backend, job.exchange.sms
        self.microbatches = section.microbatches
        layer = MoELayer(world, _spec_of_layer(job), form, backend=backend, sms=sms, seed=self.seed)
        self.layer: Any = layer.train(self.backward)  # inference counts no rows
        layer.overlap = section.overlap
        layer.keeps_rows = layer.keeps_rows or self.recompute == "all"  # as a layer that repeats all by itself
        self.spec = replace(self.spec, wire=layer.exchange.spec.wire, output=layer.exchange.spec.output)
        is_scaled = section.experts_dtype is not None
        exact = replace(self.spec, wire={"combine": self.spec.combine_wire}, output="dequantised")
        self.bound = LAYER_SLACK * bound_of(exact if is_scaled else self.spec)
        """The error allowed. The reference of 8-bit experts quantises as they do, so their rounding is not in it."""
        if world.device.type == "cpu" and not self.backward and not is_scaled:
            self.layer.experts.to(arithmetic_dtype(self.shape.dtype))  # converted once, not in each step
        self.marks = Marks()
        self.marks.put_into(self.layer)
        named = dict(self.layer.named_parameters())
        self.parameters = [named[name] for name in named if self.own_router or "gate." not in name]
        self.after_forward: Callable[[], None] = _nothing
        """Called between the forward and the backward pass of a step."""
        self._experts = LayerExperts(self.shape, self.seed, section.experts, section.experts_dtype)
        shared = ExpertShape(self.spec.hidden, self.shared, self.shape.dtype)
        self._shared_expert = SharedExpert(shared, self.seed, experts_dtype=section.experts_dtype)

    def run(self, batch: Batch, dy: torch.Tensor) -> Results:
        """Run the forward pass, and the backward pass from the gradient `dy` of the output if the job has one."""
        self.marks.begin()
        if not self.backward:
            with torch.no_grad():
                return Results(self._forward(batch.x, batch.ids, batch.weights), ())
        x = batch.x.detach().requires_grad_()
        if self.recompute == "all":
            y = checkpoint(self._forward, x, batch.ids, batch.weights, use_reentrant=False, preserve_rng_state=False)
        else:
            y = self._forward(x, batch.ids, batch.weights)
        self.after_forward()
        self.marks.begin_backward()
        with torch.autograd.set_multithreading_enabled(False):  # all on this thread, which may be capturing
            return Results(y.detach(), torch.autograd.grad(y, [x, *self.parameters], dy))

    def _forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = self.marks.at(START, x)
        if self.microbatches > 1:
            y: torch.Tensor = in_microbatches(self.layer, x, self.microbatches)
        elif self.own_router:
            y = self.layer(x)
        else:
            y = self.layer.apply_experts(x, ids, weights)
        return self.marks.at(SUM, y)

    def routing_of(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and weights that the batch's tokens have in this layer."""
        if not self.own_router:
            return batch.ids, batch.weights
        with torch.no_grad():
            routed = self.layer.gate(self.layer.norm(batch.x))
        return routed.topk_idx, routed.topk_weights

    # Verification. Tokens do not depend on one another, so any of them can be verified alone.

    def error_of(self, results: Results, batch: Batch, dy: torch.Tensor) -> float:
        """Return the largest error of the last step: of its output, and of the gradients of its tokens.

        An error is relative to the largest element of its row. The experts are those that the layer chose; a wrong
        choice shows in the weights of the router.
        """
        some = self._some_tokens(len(batch.x), batch.x.device)
        chosen = self.marks.topk_idx if self.own_router else batch.ids
        assert chosen is not None
        x = batch.x[some].double().requires_grad_(self.backward)
        wanted, choice_error = self._wanted(x, chosen[some], batch.weights[some])
        right = Want(wanted.y.detach(), wanted.scale.detach())
        errors = [choice_error, right.error_of(results.y[some])]
        if self.backward:
            dx = torch.zeros_like(x)
            if wanted.y.requires_grad:  # not if no token has an expert
                (dx,) = torch.autograd.grad(wanted.y, x, dy[some].double())
            right = Want(dx, dx.abs().amax(dim=-1, keepdim=True).expand_as(dx))
            errors.append(right.error_of(results.gradients[0][some]))
            errors += [0.0 if bool(gradient.isfinite().all()) else torch.inf for gradient in results.gradients[1:]]
        return max(errors)

    def _some_tokens(self, tokens: int, device: torch.device) -> torch.Tensor:
        if device.type == "cpu" or tokens <= VERIFIED_ON_GPUS:
            return torch.arange(tokens, device=device)
        return torch.linspace(0, tokens - 1, VERIFIED_ON_GPUS, device=device).long()

    def _wanted(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[Want, float]:
        """Return the right output in float64, and the error of the router's choice."""
        h, error = x, 0.0
        if self.own_router:
            # The norm's result is rounded, and close scores decide by its last bits.
            h = x * (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt()
            h = h + (h.detach().to(self.shape.dtype).double() - h.detach())
            logits = h @ self.layer.gate.weight.detach().double().T
            form = self.layer.gate.form
            weights = chosen_weights(logits, ids, form)
            best = formulas.route(logits.detach(), form)[1]
            error = float((weights.detach() - best).abs().max() / form.scale) if len(x) else 0.0
        routed = want(h, ids, weights, self._experts, by_row=True)
        y, scale = routed.y, routed.scale
        if self.shared:
            rows = self._shared_expert.rows(h)
            y, scale = y + rows, scale + rows.abs().amax(dim=-1, keepdim=True)
        return (Want(y + x, scale + x.abs()) if self.own_router else Want(y, scale)), error


def _spec_of_layer(job: Job) -> ExchangeSpec:
    """Return the spec of the layer's exchange, which carries one microbatch.

    >>> job = Job(name="parts", workload="layer", shape={"tokens": 9}, layer={"microbatches": 2})
    >>> spec_of(job).tokens, _spec_of_layer(job).tokens
    (9, 5)
    """
    parts = job.layer.microbatches
    if parts == 1:
        return spec_of(job)
    shape = job.shape.model_copy(update={"tokens": -(-job.shape.tokens // parts)})
    return replace(spec_of(job.model_copy(update={"shape": shape})), depth=0)  # each part has memory of its own


def _nothing() -> None:
    """The default of `LayerPasses.after_forward`."""


def router_of(job: Job) -> RouterForm | None:
    """Return the form of a layer's own router; None if the job's routing decides."""
    section, shape = job.layer.router, job.shape
    if section.kind == "given":
        return None
    return RouterForm(
        shape.experts,
        shape.topk,
        section.kind,
        scale=section.scale,
        groups=section.groups,
        topk_groups=section.topk_groups,
    )


def chosen_weights(logits: torch.Tensor, ids: torch.Tensor, form: RouterForm) -> torch.Tensor:
    """Return the weights of experts that are chosen already.

    >>> chosen_weights(torch.zeros(1, 4), torch.tensor([[2, 1]]), RouterForm(4, 2, scale=3.0)).tolist()
    [[1.5, 1.5]]
    """
    chosen = logits.gather(1, ids)
    scores = chosen.sigmoid() if form.score == "sigmoid" else chosen.softmax(dim=-1)
    return scores / scores.sum(dim=-1, keepdim=True) * form.scale
