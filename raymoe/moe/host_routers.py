"""Record and replay routes at the routers of transformers and torchtitan, without an import of either.

A forward hook reads what the router returns, and puts recorded ids and their weights in its place. A function that was
compiled before has no hook: torch.compile does not look for new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import raymoe.moe.router_formulas as formulas
from raymoe.moe.route_site import RouteSite
from raymoe.moe.router_formulas import RouterForm


def form_of(gate: Any) -> RouterForm | None:
    """Return the form of a router of transformers or torchtitan; None if it is neither."""
    for kind in type(gate).__mro__:
        if kind.__name__ in _FORMS:
            return _FORMS[kind.__name__](gate)
    return None


def _softmax(gate: Any) -> RouterForm:
    return RouterForm(gate.num_experts, gate.top_k, normalise=getattr(gate, "norm_topk_prob", True))


def _deepseek(gate: Any) -> RouterForm:
    return RouterForm(
        gate.num_experts,
        gate.top_k,
        score="sigmoid",
        normalise=gate.norm_topk_prob,
        scale=gate.routed_scaling_factor,
        groups=gate.num_group,
        topk_groups=gate.topk_group,
    )


def _gpt_oss(gate: Any) -> RouterForm:
    return RouterForm(gate.num_experts, gate.top_k, score="chosen")


def _torchtitan(gate: Any) -> RouterForm:
    return RouterForm(
        gate.num_experts, gate.top_k, score=gate.score_func, normalise=gate.route_norm, scale=gate.route_scale
    )


_TORCHTITAN = "TokenChoiceTopKRouter"
_FORMS: dict[str, Callable[[Any], RouterForm]] = {
    "MixtralTopKRouter": _softmax,
    "Qwen3MoeTopKRouter": _softmax,
    "OlmoeTopKRouter": _softmax,
    "DeepseekV3TopkRouter": _deepseek,
    "GptOssTopKRouter": _gpt_oss,
    _TORCHTITAN: _torchtitan,
}


def site_of(gate: nn.Module, form: RouterForm) -> RouteSite:
    """Return the site of a router. The first call makes it, and hooks it to the router for good."""
    site: RouteSite | None = gate.__dict__.get("raymoe_routes")
    if site is None:
        site = gate.__dict__["raymoe_routes"] = RouteSite()
        titan = any(kind.__name__ == _TORCHTITAN for kind in type(gate).__mro__)
        gate.register_forward_hook(_TorchtitanHook(site, form) if titan else _TransformersHook(site, form))
    return site


@dataclass(frozen=True)
class _TransformersHook:
    """Takes (logits, weights[T, K], ids[T, K])."""

    site: RouteSite
    form: RouterForm

    def __call__(self, _module: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, ids = output

        def weigh(chosen: Tensor) -> Tensor:
            return formulas.weights_of(logits.float(), chosen, self.form)

        recorded = self.site.take(*ids.shape)
        if recorded is not None:
            ids, weights = formulas.replay((ids, weights), recorded, weigh)
        self.site.note(ids)
        return logits, weights, ids


@dataclass(frozen=True)
class _TorchtitanHook:
    """Takes (weights[B, L, K], ids[B, L, K], scores[B, L, E]). Of DTensors it takes this rank's part."""

    site: RouteSite
    form: RouterForm

    def __call__(self, _module: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        weights, ids, scores = output
        own_weights, own_ids, own_scores = (_local(part) for part in output)
        rows, topk = own_ids.numel() // own_ids.shape[-1], own_ids.shape[-1]

        def weigh(chosen: Tensor) -> Tensor:
            return formulas.weights_of_scores(own_scores.reshape(rows, -1), chosen, self.form)

        recorded = self.site.take(rows, topk)
        if recorded is not None:
            live = own_ids.reshape(rows, topk), own_weights.reshape(rows, topk)
            replayed = formulas.replay(live, recorded, weigh)
            own_ids, own_weights = (part.view(own_ids.shape) for part in replayed)
            ids, weights = _placed_as(ids, own_ids), _placed_as(weights, own_weights)
        self.site.note(own_ids.reshape(rows, topk))
        return weights, ids, scores


def _local(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local() if hasattr(type(tensor), "to_local") else tensor
    return part


def _placed_as(tensor: Any, part: Tensor) -> Tensor:
    """Return this rank's part as a DTensor if `tensor` is one, spread as it is."""
    if not hasattr(type(tensor), "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    placed: Tensor = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return placed


def device_of(gate: nn.Module) -> torch.device:
    return next(gate.parameters()).device
