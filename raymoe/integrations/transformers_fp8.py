"""8-bit experts of transformers (`FineGrainedFP8Config`) by raymoe's products, without a copy of their weights.

`FP8Experts` of transformers has the format of `QuantisedExperts`: e4m3 values with a scale for each 128 x 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from raymoe.errors import ConfigError, RaymoeError
from raymoe.exchange.backend import Tokens
from raymoe.exchange.exchange import Exchange
from raymoe.fp8 import FP8_BLOCK
from raymoe.moe.expert_rows import Groups
from raymoe.moe.experts import Activation, local
from raymoe.moe.families import check_scales
from raymoe.moe.quantised_checkpoints import scales_as_float32
from raymoe.moe.quantised_experts import ScaledWeights, apply_scaled
from raymoe.moe.scaled_layer import refuse_gradients, rows_for_experts

_OTHERWISE = "load the model with FineGrainedFP8Config(dequantize=True)"


class ScaledExperts:
    """The experts of one `FP8Experts` on this rank. The module keeps its parameters, which each call reads."""

    def __init__(self, experts: Any) -> None:
        """Raise ConfigError where raymoe has no products for the module's form."""
        self._experts, self._activation = experts, _activation_of(experts)
        check_scales(experts)
        values = experts.gate_up_proj
        if values.dtype != torch.float8_e4m3fn:
            raise ConfigError(f"experts with weights of {values.dtype}; torch.float8_e4m3fn is needed")
        if (rows := values.shape[1] // 2) % FP8_BLOCK:
            raise ConfigError(f"experts with gate and up of {rows} rows each; a multiple of {FP8_BLOCK} is needed")

    def __call__(self, exchange: Exchange, tokens: Tokens) -> Tensor:
        """Return the weighted sum of its experts' results for each token. All ranks call it, without gradients."""
        if torch.is_grad_enabled():
            refuse_gradients(self._differentiable(tokens), _OTHERWISE)
        spec, x = exchange.spec, tokens.x
        dtype: torch.dtype = getattr(torch, spec.output_dtype)
        out = torch.empty(spec.rows(exchange.world.size), spec.hidden, dtype=dtype, device=x.device)
        got = exchange.dispatch_unkept(tokens, out)
        try:
            groups = Groups(got.expert_offsets, got.expert_counts)
            rows = apply_scaled(rows_for_experts(got), self.weights(), groups, self._activation)
        except Exception:
            if x.device.type == "cpu":
                with suppress(RaymoeError):  # DataRefused, as on the other ranks; the exception here is the reason
                    exchange.refuse(got)
            raise
        return exchange.combine_unkept(rows.to(x.dtype), got, weighted=True)

    def weights(self) -> ScaledWeights:
        """Return this rank's weights. Scales that are powers of two become float32."""
        own: list[Tensor] = []
        for name in ("gate_up_proj", "down_proj"):
            values, scales = (local(getattr(self._experts, name + end)) for end in ("", "_scale_inv"))
            assert values is not None and scales is not None
            own += [values.detach(), scales_as_float32(scales.detach())]
        return ScaledWeights(*own)

    def _differentiable(self, tokens: Tokens) -> Iterator[tuple[str, Tensor]]:
        yield from (("hidden_states", tokens.x), ("top_k_weights", tokens.topk_weights))
        yield from self._experts.named_parameters()


def _activation_of(experts: Any) -> Activation:
    """Return the gated activation of `FP8Experts`."""
    name = type(getattr(experts, "act_fn", None)).__name__
    if not getattr(experts, "has_gate", True) or name not in ("SiLU", "SiLUActivation"):
        raise ConfigError(f"experts with activation {name}, or without a gate; SwiGLU is needed")
    if getattr(experts, "gate_softcap", None) is not None:
        raise ConfigError(f"experts whose gate has a soft cap of {experts.gate_softcap}; SwiGLU is needed")
    limit = getattr(experts, "swiglu_limit", None)
    if (alpha := getattr(experts, "swiglu_alpha", None)) is None:
        return Activation(limit=limit)
    return Activation(alpha=alpha, limit=limit, up_plus=1.0)
