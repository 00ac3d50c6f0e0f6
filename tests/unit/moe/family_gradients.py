"""Layers from blocks of each family of models, and the gradients of all their parameters in plain float64.

The blocks have the names and attributes of those of transformers, which need not be installed.
`tests/unit/moe/test_moe_blocks.py` compares layers with the blocks of transformers themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
FEW_NUMBERS = 64
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
class Case:
    """The tokens of rank 0, the dtype of all weights and rows, and who goes where.

    `routing` is `chosen`, by the router; `skewed`, where an expert gets most tokens and two get none; or `masked`,
    where every third token goes nowhere, and every fifth leaves out its first expert. Each further rank has `fewer`
    tokens than the one before. `capacity` is that of `ExchangeSpec`.
    """

    tokens: int
    dtype: torch.dtype
    routing: str = "chosen"
    fewer: int = 7
    capacity: float | str = "worst"

    def batch(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's tokens, and the gradient of its output. Its mean is not zero: sums over rows grow with them."""
        source = torch.Generator().manual_seed(rank)
        x, dy = (torch.randn(max(0, self.tokens - self.fewer * rank), H, generator=source) for _ in range(2))
        return x.to(self.dtype), (dy + 0.5).to(self.dtype)

    def ids(self, x: torch.Tensor, topk: int) -> torch.Tensor | None:
        """The experts of each token, for a router that does not choose them itself."""
        if self.routing != "skewed":
            return None
        likely = torch.tensor([float((expert + 1) ** -2) for expert in range(E - 2)] + [0.0, 0.0])
        drawn = torch.Generator().manual_seed(len(x))
        return torch.multinomial(likely.expand(max(1, len(x)), -1), topk, generator=drawn)[: len(x)].to(x.device)

    def kept(self, ids: torch.Tensor) -> torch.Tensor:
        """Which of the choices are not masked."""
        kept = torch.ones_like(ids, dtype=torch.bool)
        if self.routing == "masked":
            kept[::3] = False
            kept[::5, 0] = False
        return kept


def cases(tokens: int, dtype: torch.dtype) -> dict[str, Case]:
    return {
        "chosen": Case(tokens, dtype),
        "skewed": Case(tokens, dtype, "skewed"),
        "masked": Case(tokens, dtype, "masked"),
        "one rank has all tokens": Case(tokens, dtype, fewer=tokens),
        "capacity": Case(tokens, dtype, capacity=1.5),
    }


CASES = tuple(cases(1, torch.bfloat16))


def layer_of(family: str, world: World, case: Case) -> MoELayer:
    parts = FAMILIES[family](world.rank, world.size)
    form, dtype = parts.router.form, str(case.dtype).removeprefix("torch.")
    for module in (parts.router, parts.experts, parts.shared, parts.norm):
        if module is not None:
            module.to(case.dtype)
    spec = ExchangeSpec(case.tokens, H, E, form.topk, dtype=dtype, depth=0, capacity=case.capacity)
    return MoELayer(world, spec, parts)


def step(layer: MoELayer, case: Case, x: torch.Tensor, dy: torch.Tensor) -> tuple[Gradients, torch.Tensor]:
    """Run forward and backward. Return the output and the gradients of x and of every parameter, and all ids.

    Where two experts are near, float64 could choose the other: so it takes these ids.
    """
    x = x.clone().requires_grad_()
    h, routing = layer.route(x, case.ids(x, layer.exchange.spec.topk))
    ids = routing.topk_idx.masked_fill(~case.kept(routing.topk_idx), -1)
    y = layer.apply_experts(h, ids, routing.topk_weights, x if layer.residual else None).to(x.dtype)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    found = torch.autograd.grad(y, [x, *parameters], dy)
    plain = (local(each) for each in found)
    gradients = {name: g for name, g in zip(("x", *names), plain, strict=True) if g is not None}
    return {"y": y.detach()} | gradients, routing.topk_idx


# The same in float64, and with torch's products of bfloat16.


class Batch(NamedTuple):
    x: torch.Tensor
    dy: torch.Tensor
    ids: torch.Tensor
    kept: torch.Tensor


@dataclass(frozen=True)
class Reference:
    """A layer with all experts on some tokens, each of which goes to given experts, in plain torch.

    `products` is the dtype of operands and results of all products but the router's, and of rows between modules. Sums
    over the experts of a rank, which cross ranks, have it too. Everything else is `sums`.
    """

    products: torch.dtype
    sums: torch.dtype

    def of_rank(self, family: str, case: Case, world: World, batches: Sequence[Batch]) -> Gradients:
        """The gradients of a rank: those of its experts come from the tokens of all ranks."""
        whole = Batch(*(torch.cat([getattr(each, of) for each in batches]) for of in ("x", "dy", "ids", "kept")))
        own, everywhere = (self(family, case, world.size, batch) for batch in (batches[world.rank], whole))
        shares = {
            name: each.chunk(world.size)[world.rank] for name, each in everywhere.items() if name.startswith("experts.")
        }
        return own | shares

    def __call__(self, family: str, case: Case, ranks: int, batch: Batch) -> Gradients:
        parts = FAMILIES[family](0, 1)
        modules = {parts.router_name: parts.router, "experts": parts.experts}
        modules |= {parts.shared_name: parts.shared} if parts.shared is not None else {}
        modules |= {"norm": parts.norm} if parts.norm is not None else {}
        leaves = {
            f"{name}.{its}": each.detach().to(case.dtype).to(batch.x.device, self.products).requires_grad_()
            for name, module in modules.items()
            for its, each in module.named_parameters()
        }
        rows = batch.x.to(self.products).requires_grad_()
        y = self.forward(parts, leaves, rows, batch, ranks)
        found = torch.autograd.grad(y, [rows, *leaves.values()], batch.dy.to(y.dtype), materialize_grads=True)
        return {"y": y.detach()} | dict(zip(("x", *leaves), found, strict=True))

    def forward(self, parts: Parts, leaves: Gradients, rows: torch.Tensor, batch: Batch, ranks: int) -> torch.Tensor:
        h = rows
        if parts.norm is not None:
            wide = rows.to(self.sums)
            wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)
            h = (wide * leaves["norm.weight"].to(self.sums)).to(self.products)
        h = h.to(self.sums)  # where the gradients of its readers meet
        logits = h @ leaves[f"{parts.router_name}.weight"].to(self.sums).T
        if (bias := leaves.get(f"{parts.router_name}.bias")) is not None:
            logits = logits + bias.to(self.sums)
        weights = weights_of(parts.router.form, logits, batch.ids)
        y = (rows if parts.residual else torch.zeros_like(rows)).to(self.sums)
        for experts in torch.arange(E).chunk(ranks):
            sent, sums = h.to(self.products).to(self.sums), torch.zeros_like(y)
            for expert in experts.tolist():
                token, k = ((batch.ids == expert) & batch.kept).nonzero(as_tuple=True)
                own = self.expert(parts.experts, leaves, expert, sent[token].to(self.products))
                sums = sums.index_add(0, token, own.to(self.sums) * weights[token, k, None])
            y = y + sums.to(self.products).to(self.sums)
        if parts.shared is not None:
            gate_up, down = (leaves[f"{parts.shared_name}.{name}"] for name in ("gate_up_proj", "down_proj"))
            gate, up = (h.to(self.products) @ gate_up.T).to(self.sums).chunk(2, dim=1)
            y = y + ((nn.functional.silu(gate) * up).to(self.products) @ down.T).to(self.sums)
        return y.to(self.products)

    def expert(self, experts: Experts, leaves: Gradients, expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate_up, down = (leaves[f"experts.{name}"][expert] for name in ("gate_up_proj", "down_proj"))
        if not experts.transposed:
            gate_up, down = gate_up.T, down.T
        both = rows @ gate_up
        biased = experts.gate_up_proj_bias is not None
        if biased:
            both = both + leaves["experts.gate_up_proj_bias"][expert]
        both = both.to(self.sums)
        form = experts.activation
        gate, up = (both[:, ::2], both[:, 1::2]) if form.interleaved else both.chunk(2, dim=1)
        if form.limit is not None:
            gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        y = (gate * torch.sigmoid(form.alpha * gate) * (up + form.up_plus)).to(self.products) @ down
        return y + leaves["experts.down_proj_bias"][expert] if biased else y


FLOAT64 = Reference(torch.float64, torch.float64)
TORCH = Reference(torch.bfloat16, torch.float32)
"""Rows and products are bfloat16, all between them is float32, as in careful programs without raymoe."""


def weights_of(form: RouterForm, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    if form.score == "chosen":
        return logits.gather(1, ids).softmax(dim=1)
    scores = logits.sigmoid() if form.score == "sigmoid" else logits.softmax(dim=1)
    weights = scores.gather(1, ids)
    return (weights / weights.sum(dim=1, keepdim=True) if form.normalise else weights) * form.scale


def relative(have: torch.Tensor, want: torch.Tensor) -> float:
    """The norm of an error, relative to that of the gradient."""
    return float((have.double() - want).norm() / want.norm()) if want.any() else float(have.double().norm())


@dataclass(frozen=True)
class Outcome:
    """The errors of each gradient, ours and by torch's products; which gradients a second run has otherwise."""

    errors: dict[str, float]
    torch_errors: dict[str, float]
    """Of gradients with FEW_NUMBERS or more: the norms of fewer are mostly chance."""
    differing: list[str]
    most_rows: int
    """Of one expert."""

    def beyond(self, ratio: float) -> dict[str, tuple[float, float]]:
        """The errors that are more than `ratio` times torch's, and more than a last place of bfloat16 results."""
        return {
            name: (self.errors[name], by_torch)
            for name, by_torch in self.torch_errors.items()
            if self.errors[name] > max(ratio * by_torch, 2**-8)
        }


def run_family(world: World, family: str, case: Case) -> Outcome:
    layer = layer_of(family, world, case)
    inputs = [tuple(each.to(world.device) for each in case.batch(rank)) for rank in range(world.size)]
    found, own_ids = step(layer, case, *inputs[world.rank])
    again, _ = step(layer, case, *inputs[world.rank])
    layer.exchange.check()
    small = own_ids.to(torch.int16).cpu()  # 64 KB fit in a message
    ids = [each.to(world.device, torch.int64) for each in world.swap(small, "ids")]  # type: ignore[attr-defined]
    batches = [Batch(*tensors, of, case.kept(of)) for tensors, of in zip(inputs, ids, strict=True)]
    wanted, by_torch = (reference.of_rank(family, case, world, batches) for reference in (FLOAT64, TORCH))
    assert set(found) == set(wanted)
    rows = torch.cat([each.ids[each.kept] for each in batches])
    return Outcome(
        {name: relative(have, wanted[name]) for name, have in found.items()},
        {name: relative(by_torch[name], want) for name, want in wanted.items() if want.numel() >= FEW_NUMBERS},
        [name for name, each in found.items() if not torch.equal(each, again[name])],
        int(torch.bincount(rows, minlength=E).max()),
    )
