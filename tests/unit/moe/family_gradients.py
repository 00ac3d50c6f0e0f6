"""Layers from blocks of each family of models, and the gradients of all their parameters in plain float64.

The blocks have the names and attributes of those of transformers, which need not be installed.
`tests/unit/moe/test_moe_blocks.py` compares layers with the blocks of transformers themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.experts import Experts, ModelWeights, local
from raymoe.moe.families import Parts, parts_of
from raymoe.moe.layer import MoELayer
from raymoe.moe.layer_form import Mlp, Norm
from raymoe.moe.router import Router
from raymoe.moe.router_formulas import RouterForm

H, F, E = 128, 64, 8
EPS = 1e-6
Gradients = dict[str, torch.Tensor]


class Gate(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(E, H))
        self.__dict__.update(attributes, num_experts=E)


# raymoe knows routers by the names of their classes.
class MixtralTopKRouter(Gate): ...


class Qwen3MoeTopKRouter(Gate): ...


class OlmoeTopKRouter(Gate): ...


class DeepseekV3TopkRouter(Gate): ...


class GptOssTopKRouter(Gate): ...


class BlockExperts(nn.Module):
    def __init__(self, transposed: bool = False, biases: bool = False) -> None:
        super().__init__()
        shapes = ((E, H, 2 * F), (E, F, H)) if transposed else ((E, 2 * F, H), (E, H, F))
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.empty(shape)) for shape in shapes)
        self.act_fn = nn.SiLU()
        if biases:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(E, 2 * F))
            self.down_proj_bias = nn.Parameter(torch.empty(E, H))
            self.alpha, self.limit = 1.702, 7.0


class MixtralSparseMoeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = MixtralTopKRouter(top_k=2), BlockExperts()


class Qwen3MoeSparseMoeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Qwen3MoeTopKRouter(top_k=4, norm_topk_prob=True), BlockExperts()


class OlmoeSparseMoeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = OlmoeTopKRouter(top_k=3, norm_topk_prob=False), BlockExperts()


class DeepseekV3MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        form = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_group": 4, "topk_group": 2}
        self.gate, self.experts = DeepseekV3TopkRouter(top_k=3, **form), BlockExperts()
        self.gate.register_buffer("e_score_correction_bias", torch.linspace(-0.1, 0.1, E))
        self.shared_experts = Mlp(torch.empty(2 * F, H), torch.empty(H, F))


class GptOssMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = GptOssTopKRouter(top_k=2), BlockExperts(transposed=True, biases=True)
        self.router.bias = nn.Parameter(torch.empty(E))


def whole_layer(rank: int, ranks: int) -> Parts:
    """A layer of our own: experts of SwiGLU with biases, a shared expert, a norm and the residual."""
    block = drawn(DeepseekV3MoE())
    experts = BlockExperts()
    experts.gate_up_proj_bias = nn.Parameter(torch.empty(E, 2 * F))
    experts.down_proj_bias = nn.Parameter(torch.empty(E, H))
    shares = [each.detach().chunk(ranks)[rank].clone() for each in drawn(experts).parameters()]
    parts = Parts(Router(RouterForm(E, 2), block.gate.weight), Experts(ModelWeights(*shares)), block.shared_experts)
    parts.norm, parts.residual = Norm(torch.linspace(0.5, 1.5, H), EPS), True
    return parts


def drawn(block: Any) -> Any:
    """Draw the weights of a block: of a product as large as its inputs, of biases half as large.

    So gpt-oss's limit of 7 clamps nothing. Numbers near it would be on its other side in bfloat16, and have another
    gradient; tests/unit/moe/test_expert_rows.py and test_moe_blocks.py clamp some.
    """
    source = torch.Generator().manual_seed(3)
    for name, parameter in block.named_parameters():
        size = torch.randn(parameter.shape, generator=source)
        inputs = parameter.shape[1 if "experts" in name and isinstance(block, GptOssMLP) else -1]
        parameter.data = size / 2 if "bias" in name else size * inputs**-0.5
    return block


FAMILIES: dict[str, Callable[[int, int], Parts]] = {
    kind.__name__: lambda rank, ranks, kind=kind: parts_of(drawn(kind()), rank, ranks)
    for kind in (MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock, OlmoeSparseMoeBlock, DeepseekV3MoE, GptOssMLP)
} | {"whole layer": whole_layer}


@dataclass(frozen=True)
class Sizes:
    """The tokens of rank 0, of which each further rank has some fewer, and the dtype of all weights and rows."""

    tokens: int
    dtype: torch.dtype

    def batch(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's tokens, and the gradient of its output. Its mean is not zero: sums over rows grow with them."""
        source = torch.Generator().manual_seed(rank)
        x, dy = (torch.randn(self.tokens - 7 * rank, H, generator=source) for _ in range(2))
        return x.to(self.dtype), (dy + 0.5).to(self.dtype)


def layer_of(family: str, world: World, sizes: Sizes) -> MoELayer:
    parts = FAMILIES[family](world.rank, world.size)
    form, dtype = parts.router.form, str(sizes.dtype).removeprefix("torch.")
    for module in (parts.router, parts.experts, parts.shared, parts.norm):
        if module is not None:
            module.to(sizes.dtype)
    spec = ExchangeSpec(sizes.tokens, H, E, form.topk, dtype=dtype, depth=0)
    return MoELayer(world, spec, parts)


def step(layer: MoELayer, x: torch.Tensor, dy: torch.Tensor) -> Gradients:
    """Run forward and backward; return the output and the gradients of x and of every parameter."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    names, parameters = zip(*layer.named_parameters(), strict=True)
    found = torch.autograd.grad(y, [x, *parameters], dy)
    plain = (local(each) for each in found)
    return {"y": y.detach()} | {name: g for name, g in zip(("x", *names), plain, strict=True) if g is not None}


# The same in float64.


def reference(family: str, sizes: Sizes, x: torch.Tensor, dy: torch.Tensor, ids: torch.Tensor) -> Gradients:
    """Compute a layer with all experts on the tokens of one rank, each of which goes to the experts `ids`."""
    parts = FAMILIES[family](0, 1)
    modules = {parts.router_name: parts.router, "experts": parts.experts}
    modules |= {parts.shared_name: parts.shared} if parts.shared is not None else {}
    modules |= {"norm": parts.norm} if parts.norm is not None else {}
    leaves = {
        f"{name}.{its}": each.detach().to(sizes.dtype).to(x.device).double().requires_grad_()
        for name, module in modules.items()
        for its, each in module.named_parameters()
    }
    rows = x.double().requires_grad_()
    h = rows
    if parts.norm is not None:
        h = h * torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + EPS) * leaves["norm.weight"]
    logits = h @ leaves[f"{parts.router_name}.weight"].T + leaves.get(f"{parts.router_name}.bias", 0.0)
    weights = weights_of(parts.router.form, logits, ids)
    y = rows if parts.residual else torch.zeros_like(rows)
    for expert in range(E):
        token, k = (ids == expert).nonzero(as_tuple=True)
        own = expert_of(parts.experts, leaves, expert, h[token]) * weights[token, k, None]
        y = y.index_add(0, token, own)
    if parts.shared is not None:
        gate_up, down = (leaves[f"{parts.shared_name}.{name}"] for name in ("gate_up_proj", "down_proj"))
        gate, up = (h @ gate_up.T).chunk(2, dim=1)
        y = y + (nn.functional.silu(gate) * up) @ down.T
    found = torch.autograd.grad(y, [rows, *leaves.values()], dy.double())
    return {"y": y.detach()} | dict(zip(("x", *leaves), found, strict=True))


def weights_of(form: RouterForm, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    if form.score == "chosen":
        return logits.gather(1, ids).softmax(dim=1)
    scores = logits.sigmoid() if form.score == "sigmoid" else logits.softmax(dim=1)
    weights = scores.gather(1, ids)
    return (weights / weights.sum(dim=1, keepdim=True) if form.normalise else weights) * form.scale


def expert_of(experts: Experts, leaves: Gradients, expert: int, rows: torch.Tensor) -> torch.Tensor:
    gate_up, down = (leaves[f"experts.{name}"][expert] for name in ("gate_up_proj", "down_proj"))
    if not experts.transposed:
        gate_up, down = gate_up.T, down.T
    both = rows @ gate_up
    biased = experts.gate_up_proj_bias is not None
    if biased:
        both = both + leaves["experts.gate_up_proj_bias"][expert]
    form = experts.activation
    gate, up = (both[:, ::2], both[:, 1::2]) if form.interleaved else both.chunk(2, dim=1)
    if form.limit is not None:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    y = (gate * torch.sigmoid(form.alpha * gate) * (up + form.up_plus)) @ down
    return y + leaves["experts.down_proj_bias"][expert] if biased else y


def chosen(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    """The experts that a layer chooses: where two are near, float64 could choose the other."""
    with torch.no_grad():
        router: Any = layer._modules[layer._router_name]
        ids: torch.Tensor = router(x if layer.norm is None else layer.norm(x)).topk_idx
        return ids


def run_family(world: World, family: str, sizes: Sizes) -> tuple[dict[str, float], list[str], int]:
    """Return each gradient's error; the gradients that a second run has otherwise; and the most rows of an expert.

    An error is a norm, relative to that of the gradient.
    """
    layer = layer_of(family, world, sizes)
    batches = [tuple(each.to(world.device) for each in sizes.batch(rank)) for rank in range(world.size)]
    x, dy = batches[world.rank]
    found, again = step(layer, x, dy), step(layer, x, dy)
    layer.exchange.check()
    ids = [chosen(layer, each) for each, _ in batches]
    wanted = [reference(family, sizes, *batch, of) for batch, of in zip(batches, ids, strict=True)]
    assert set(found) == set(wanted[0])
    errors = {}
    for name, have in found.items():
        want = wanted[world.rank][name]
        if name.startswith("experts."):
            want = torch.stack([each[name] for each in wanted]).sum(dim=0).chunk(world.size)[world.rank]
        errors[name] = float((have.double() - want).norm() / want.norm())
    rows = torch.bincount(torch.cat(ids).flatten(), minlength=E)
    return errors, [name for name, each in found.items() if not torch.equal(each, again[name])], int(rows.max())
