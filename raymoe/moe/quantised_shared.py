"""A shared expert with weights of 8-bit floats: of a wider one, or of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from raymoe.errors import ConfigError
from raymoe.moe.expert_rows import Groups
from raymoe.moe.experts import Experts, ModelWeights, local
from raymoe.moe.quantised_checkpoints import load_quantised_experts
from raymoe.moe.quantised_experts import QuantisedExperts, ScaledWeights, apply_scaled, keep_dtype, quantise_experts

_LINEARS = ("gate_proj", "up_proj", "down_proj")


class QuantisedMlp(nn.Module):
    """A SwiGLU expert of 8-bit floats that all tokens pass through, without gradients.

    Its parameters have the names and the format of `QuantisedExperts`, for one expert.
    """

    gate_up_proj: nn.Parameter
    gate_up_proj_scale_inv: nn.Parameter
    down_proj: nn.Parameter
    down_proj_scale_inv: nn.Parameter

    def __init__(self, expert: QuantisedExperts) -> None:
        """Take over the weights of the one expert that `expert` has."""
        super().__init__()
        for name, value in expert.parts()._asdict().items():
            if value is not None:
                self.register_parameter(name, nn.Parameter(value.detach()[0], requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        """Map x[T, H] to [T, H], in the dtype of x. Rows are quantised before each product."""
        tokens = len(x)
        if not tokens:
            return torch.empty_like(x)
        offsets = torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=x.device)
        own: dict[str, Any] = {name: self._part(name) for name in ScaledWeights._fields[:4]}
        return apply_scaled(x, ScaledWeights(**own), Groups(offsets, offsets[1:]))

    def _part(self, name: str) -> Tensor:
        part = local(getattr(self, name))
        assert part is not None
        return part[None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        keep_dtype(self.down_proj, fn)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def quantise_shared(mlp: nn.Module) -> QuantisedMlp:
    """Return a shared expert with weights of 8-bit floats, as `quantise_experts` makes them.

    `mlp` is that of a layer, or of transformers: `gate_proj`, `up_proj` and `down_proj`, with SiLU between. Linears
    of `FineGrainedFP8Config` keep their values and scales. On GPUs the result is slower than bfloat16 with up to 128
    tokens (docs/evidence/layer.md).

    >>> mlp = nn.ModuleDict({"gate_proj": nn.Linear(16, 72, bias=False), "up_proj": nn.Linear(16, 72, bias=False)})
    >>> mlp["down_proj"] = nn.Linear(72, 16, bias=False)
    >>> quantised = quantise_shared(mlp)
    >>> list(quantised.gate_up_proj.shape), list(quantised.gate_up_proj_scale_inv.shape)
    ([256, 16], [2, 1])
    """
    modules = dict(mlp.named_children())
    if not all(name in modules for name in _LINEARS):
        wide: dict[str, Any] = dict(mlp.named_parameters())
        if set(wide) != {"gate_up_proj", "down_proj"}:
            raise ConfigError(
                f"a shared expert with the parameters {', '.join(wide)}; gate_proj, up_proj and down_proj without "
                "biases are needed, or gate_up_proj and down_proj"
            )
        return QuantisedMlp(_quantised(wide["gate_up_proj"], wide["down_proj"]))
    linears: list[Any] = [modules[name] for name in _LINEARS]
    activation = type(getattr(mlp, "act_fn", nn.SiLU())).__name__
    if activation not in ("SiLU", "SiLUActivation") or any(each.bias is not None for each in linears):
        raise ConfigError(f"a shared expert with activation {activation} or with biases; SwiGLU without any is needed")
    if not has_scales(mlp):
        gate, up, down = (each.weight.detach() for each in linears)
        return QuantisedMlp(_quantised(torch.cat((gate, up)), down))
    return load_quantised_shared({name: each.detach() for name, each in mlp.named_parameters()}, "")


def load_quantised_shared(
    tensors: Mapping[str, Tensor], prefix: str, *, device: torch.device | str | None = None
) -> QuantisedMlp:
    """Take the shared expert whose tensors are below `prefix`, such as "model.layers.3.mlp.shared_experts".

    They have the names and formats of one expert in `load_quantised_experts`.

    >>> from raymoe.fp8 import quantise_weight
    >>> tensors = {}
    >>> for name, size in {"gate": (72, 16), "up": (72, 16), "down": (16, 72)}.items():
    ...     values, scales = quantise_weight(torch.ones(size))
    ...     tensors |= {f"mlp.{name}_proj.weight": values, f"mlp.{name}_proj.weight_scale_inv": scales}
    >>> list(load_quantised_shared(tensors, "mlp").down_proj.shape)
    [16, 128]
    """
    below = f"{prefix}." if prefix else ""
    own = {f"0.{name.removeprefix(below)}": tensors[name] for name in tensors if name.startswith(below)}
    if not own:
        raise ConfigError(f"no tensor is below {prefix!r}; the prefix of a shared expert's gate_proj is needed")
    return QuantisedMlp(load_quantised_experts(own, "", device=device))


def has_scales(mlp: nn.Module) -> bool:
    """Whether the linears of a shared expert of transformers have 8-bit weights."""
    return any(name.endswith("weight_scale_inv") for name, _ in mlp.named_parameters())


def _quantised(gate_up: Tensor, down: Tensor) -> QuantisedExperts:
    return quantise_experts(Experts(ModelWeights(gate_up.detach()[None], down.detach()[None])))
