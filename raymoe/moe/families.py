"""Take the parts of a layer from the Mixture-of-Experts blocks of transformers, without an import of transformers.

| block | router | weights of the experts |
| --- | --- | --- |
| Mixtral, OLMoE, Qwen3-MoE | `gate`: softmax over all experts | `[E, 2F, H]` and `[E, H, F]`, gate first |
| DeepSeek-V3 | `gate`: sigmoid, groups, a correction of the choice, scaling; `shared_experts` | the same |
| gpt-oss | `router`: softmax of the chosen, with a bias; it is returned too | `[E, H, 2F]`, interleaved; biases |

Those of the first two lines, and shared experts, may have weights of 8-bit floats, as transformers'
`FineGrainedFP8Config` leaves them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raymoe.errors import ConfigError
from raymoe.fp8 import FP8_BLOCK
from raymoe.moe.experts import SWIGLU, Activation, Experts, ExpertsOfRank, ModelWeights
from raymoe.moe.host_routers import form_of
from raymoe.moe.quantised_checkpoints import load_quantised_experts
from raymoe.moe.quantised_experts import QuantisedExperts, quantise_experts
from raymoe.moe.quantised_shared import QuantisedMlp, has_scales, quantise_shared
from raymoe.moe.router import Router
from raymoe.moe.router_formulas import RouterForm


@dataclass
class Parts:
    """The modules of a layer, and how they are put together."""

    router: Router
    experts: ExpertsOfRank
    shared: nn.Module | None = None
    router_name: str = "gate"
    shared_name: str = "shared_experts"
    norm: nn.Module | None = None
    residual: bool = False
    gives_scores: bool = False
    """Whether the layer returns the router's weights too."""

    def cast(self, dtype: torch.dtype) -> None:
        """Let all parameters have a dtype. Buffers keep theirs: the correction of a choice is float32."""
        if isinstance(self.experts, QuantisedExperts) or isinstance(self.shared, QuantisedMlp):
            raise ConfigError("weights cannot be cast with 8-bit experts, which are for inference; leave weights out")
        for module in (self.router, self.experts, self.shared, self.norm):
            for parameter in () if module is None else module.parameters():
                parameter.data = parameter.data.to(dtype)

    def quantise(self) -> None:
        """Give the experts and the shared one weights of 8-bit floats, where they are wide."""
        if isinstance(self.experts, Experts):
            self.experts = quantise_experts(self.experts)
        if self.shared is not None and not isinstance(self.shared, QuantisedMlp):
            self.shared = quantise_shared(self.shared)


def parts_of(block: Any, rank: int, ranks: int) -> Parts:
    """Return the parts of a block, with one rank's share of the experts."""
    config = getattr(getattr(block, "experts", None), "config", None)
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            "output_router_logits is True, and a layer from a block records none: set it to False and add "
            "raymoe.moe.balance_loss, or use raymoe.integrations.transformers.register"
        )
    for kind in type(block).__mro__:
        if kind.__name__ in _FAMILIES:
            return _FAMILIES[kind.__name__](block, rank, ranks)
    raise ConfigError(f"a layer from a {type(block).__name__} was asked for; known blocks are {', '.join(_FAMILIES)}")


def _softmax(block: Any, rank: int, ranks: int) -> Parts:
    gate = block.gate
    if getattr(block, "jitter_noise", 0):
        raise ConfigError(f"router_jitter_noise is {block.jitter_noise}; a layer adds no noise: set it to 0")
    return Parts(Router(_form_of(gate), gate.weight), _swiglu_experts(block.experts, rank, ranks))


def _deepseek(block: Any, rank: int, ranks: int) -> Parts:
    gate = block.gate
    router = Router(_form_of(gate), gate.weight, correction=gate.e_score_correction_bias)
    shared = block.shared_experts
    if has_scales(shared):
        check_scales(shared.gate_proj)
        shared = quantise_shared(shared)
    return Parts(router, _swiglu_experts(block.experts, rank, ranks), shared)


def _gpt_oss(block: Any, rank: int, ranks: int) -> Parts:
    gate, experts = block.router, block.experts
    activation = Activation(interleaved=True, alpha=experts.alpha, limit=experts.limit, up_plus=1.0)
    gate_up, down = (_outputs_first(_share(each, rank, ranks)) for each in (experts.gate_up_proj, experts.down_proj))
    biases = experts.gate_up_proj_bias, experts.down_proj_bias
    gate_up_bias, down_bias = (_share(bias, rank, ranks) for bias in biases)
    weights = ModelWeights(gate_up, down, gate_up_bias, down_bias, transposed=True)
    router = Router(_form_of(gate), gate.weight, gate.bias)
    return Parts(router, Experts(weights, activation), router_name="router", gives_scores=True)


_FAMILIES: dict[str, Callable[[Any, int, int], Parts]] = {
    "MixtralSparseMoeBlock": _softmax,
    "Qwen3MoeSparseMoeBlock": _softmax,
    "OlmoeSparseMoeBlock": _softmax,
    "DeepseekV3MoE": _deepseek,
    "GptOssMLP": _gpt_oss,
}


def _form_of(gate: Any) -> RouterForm:
    form = form_of(gate)
    assert form is not None, f"no form of {type(gate).__name__}"
    return form


def _swiglu_experts(experts: Any, rank: int, ranks: int) -> ExpertsOfRank:
    name = type(experts.act_fn).__name__
    if name not in ("SiLU", "SiLUActivation"):
        raise ConfigError(f"experts with activation {name}; a layer has SwiGLU, whose activation is SiLU")
    if getattr(experts, "gate_up_proj_scale_inv", None) is not None:
        return _quantised_share(experts, rank, ranks)
    gate_up, down = (_share(weights, rank, ranks) for weights in (experts.gate_up_proj, experts.down_proj))
    return Experts(ModelWeights(gate_up, down), SWIGLU)


def _quantised_share(experts: Any, rank: int, ranks: int) -> QuantisedExperts:
    """Copy one rank's 8-bit experts of `FP8Experts`."""
    check_scales(experts)
    count = _experts_of_a_rank(experts.down_proj, ranks)
    tensors = {name: parameter.detach() for name, parameter in experts.named_parameters()}
    return load_quantised_experts(tensors, "", experts=range(rank * count, (rank + 1) * count), activation=SWIGLU)


def check_scales(experts: Any) -> None:
    """Refuse `FP8Experts`, or an `FP8Linear`, whose rows or weights have other scales than raymoe's products."""
    if (scheme := getattr(experts, "activation_scheme", "dynamic")) != "dynamic":
        raise ConfigError(f"experts with {scheme} scales of rows; a layer takes dynamic ones, which follow the rows")
    if (block := getattr(experts, "block_size", (FP8_BLOCK, FP8_BLOCK))) is None or set(block) != {FP8_BLOCK}:
        raise ConfigError(f"experts with scales of blocks of {block}; a layer takes {FP8_BLOCK} x {FP8_BLOCK}")


def _experts_of_a_rank(weights: torch.Tensor, ranks: int) -> int:
    if len(weights) % ranks:
        raise ConfigError(f"{len(weights)} experts on {ranks} ranks; every rank holds the same number of them")
    if weights.is_meta:
        raise ConfigError("a block on the device meta, which has no weights; load them first")
    return len(weights) // ranks


def _share(weights: torch.Tensor, rank: int, ranks: int) -> nn.Parameter:
    """Copy one rank's experts, so that the block's memory can be freed."""
    _experts_of_a_rank(weights, ranks)
    return nn.Parameter(weights.detach().chunk(ranks)[rank].clone(), weights.requires_grad)


def _outputs_first(weights: nn.Parameter) -> nn.Parameter:
    """Store weights [E, K, N] as [E, N, K] in memory, as product.cu takes them; their shape stays."""
    stored = weights.detach().transpose(1, 2).contiguous().transpose(1, 2)
    return nn.Parameter(stored, weights.requires_grad)
