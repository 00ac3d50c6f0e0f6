"""Layers made from blocks of transformers equal those blocks: outputs and all gradients, on one rank and on two.

The blocks are code that nobody here wrote. Two ranks are two threads, because an import of transformers takes seconds.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from raymoe.errors import ConfigError
from raymoe.fp8 import dequantise_weight, quantise_weight
from raymoe.memory.world import World
from raymoe.moe.layer import MoELayer
from raymoe.moe.quantised_experts import quantise_experts
from raymoe.moe.router import balance_loss, route
from raymoe.moe.router_formulas import RouterForm
from tests.unit.moe.bits import assert_same_bits
from tests.unit.moe.gradient_cases import close
from tests.unit.worlds import close as close_worlds
from tests.unit.worlds import each, wired

H, F = 16, 12
TOKENS = {1: [(2, 5)], 2: [(2, 5), (1, 3)]}
"""The shapes of the batches of the ranks: [batch, length]."""
FAMILIES: dict[str, Any] = {
    "mixtral": lambda: MixtralSparseMoeBlock(
        MixtralConfig(hidden_size=H, intermediate_size=F, num_local_experts=8, num_experts_per_tok=2)
    ),
    "qwen3": lambda: Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            hidden_size=H, moe_intermediate_size=F, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True
        )
    ),
    "olmoe": lambda: OlmoeSparseMoeBlock(
        OlmoeConfig(hidden_size=H, intermediate_size=F, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False)
    ),
    "deepseek_v3": lambda: DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=H, moe_intermediate_size=F, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=4
        )
    ),
    "gpt_oss": lambda: GptOssMLP(
        GptOssConfig(hidden_size=H, intermediate_size=F, num_local_experts=8, num_experts_per_tok=2)
    ),
}


def block_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Make a block with random weights, large enough that gpt-oss clamps some."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        block = FAMILIES[family]()
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.6)
        if family == "deepseek_v3":
            block.gate.e_score_correction_bias.normal_(std=0.1)
    block.experts.config._experts_implementation = "eager"
    return block.to(dtype)


def batch_of(
    rank: int, shape: tuple[int, int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(*shape, H, generator=source).to(dtype) for _ in range(2))
    return x.requires_grad_(), dy


def run(layer: Any, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run forward and backward; return outputs and gradients by name."""
    found = layer(x)
    y, scores = found if isinstance(found, tuple) else (found, None)
    loss = (y.double() * dy).sum() if scores is None else (y.double() * dy).sum() + scores.square().sum()
    names, parameters = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, [x, *parameters])
    results = dict(zip(("x", *names), gradients, strict=True)) | {"y": y.detach()}
    return results if scores is None else results | {"scores": scores.detach()}


def run_layers(family: str, ranks: int, dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    blocks = [block_of(family, dtype) for _ in range(ranks)]  # here, because threads share torch's random numbers

    def rank(world: World) -> dict[str, torch.Tensor]:
        block = blocks[world.rank]
        layer = MoELayer.from_block(block, world, tokens=10)
        assert set(layer.state_dict()) == set(block.state_dict())
        return run(layer, *batch_of(world.rank, TOKENS[ranks][world.rank], dtype))

    worlds = wired(ranks)
    outcomes = each(worlds, rank)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    close_worlds(worlds)
    return outcomes


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_from_a_block_computes_what_the_block_does(family: str, ranks: int) -> None:
    found = run_layers(family, ranks)
    experts: dict[str, torch.Tensor] = {}
    for rank, results in enumerate(found):
        wanted = run(block_of(family), *batch_of(rank, TOKENS[ranks][rank]))
        assert set(results) == set(wanted)
        for name, value in wanted.items():
            if name.startswith("experts."):
                experts[name] = experts.get(name, torch.zeros_like(value)) + value
            else:
                close(f"{name} of rank {rank}", results[name], value.double(), 1e-5)
    assert experts
    for name, value in experts.items():  # each rank has its own experts' gradients, of the tokens of all ranks
        close(name, torch.cat([results[name] for results in found]), value.double(), 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_stored_as_the_grouped_product_takes_them(family: str) -> None:
    """Outputs first. Those of gpt-oss keep the shape that they have in checkpoints, also in copies and after a load."""
    (world,) = wired(1)
    layer = MoELayer.from_block(block_of(family), world, tokens=10)
    layers = [layer, copy.deepcopy(layer)]
    layers[1].load_state_dict(block_of(family).state_dict())
    for each_layer in layers:
        experts = each_layer.experts
        for parameter in (experts.gate_up_proj, experts.down_proj):
            assert experts._outputs_first(parameter).is_contiguous()
            assert parameter.is_contiguous() == (family != "gpt_oss")
    close_worlds([world])


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_weights_of_a_block_compute_what_its_own_weights_do(family: str) -> None:
    """The rows have the same bits, so does the output; gradients are rounded to float32 in the place of bfloat16."""
    (world,) = wired(1)
    with world:
        blocks = [block_of(family, torch.bfloat16) for _ in range(2)]
        correction = getattr(blocks[1], "gate", torch.nn.Module())._buffers.get("e_score_correction_bias")
        narrow = MoELayer.from_block(blocks[0], world, tokens=10)
        wide = MoELayer.from_block(blocks[1], world, tokens=10, weights="float32")
        results = [run(layer, *batch_of(0, (2, 5), torch.bfloat16)) for layer in (narrow, wide)]
        dtypes = {each.dtype for each in wide.parameters()}
        assert dtypes == {torch.float32} and wide.exchange.spec.dtype == "bfloat16"
        assert correction is None or dict(wide.named_buffers())["gate.e_score_correction_bias"] is correction
    for name, value in results[1].items():
        if name in ("y", "scores"):
            assert value.dtype == torch.bfloat16 and torch.equal(value, results[0][name]), name
        else:
            assert value.dtype == (torch.bfloat16 if name == "x" else torch.float32), name
            close(name, value, results[0][name].double(), 1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_float32_block_may_have_16_bits(family: str) -> None:
    (world,) = wired(1)
    with world:
        block = block_of(family).requires_grad_(False)
        layer = MoELayer.from_block(block, world, tokens=10, dtype=torch.bfloat16, capacity=256)
        assert {(each.dtype, each.requires_grad) for each in layer.parameters()} == {(torch.float32, False)}
        assert (layer.exchange.spec.dtype, layer.exchange.spec.capacity) == ("bfloat16", 256)
        x = batch_of(0, (2, 5))[0].detach()
        found, wanted = layer(x), MoELayer.from_block(block_of(family), world, tokens=10)(x)
        y, of_block = (each[0] if isinstance(each, tuple) else each for each in (found, wanted))
        assert y.dtype == torch.float32
        close("y", y, of_block.detach().double(), 3e-2)
        with pytest.raises(ConfigError, match="weights is 'bfloat16' with rows of float16"):
            MoELayer.from_block(block_of(family, torch.bfloat16), world, tokens=10, dtype="float16")


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_the_experts_of_a_block_become_8_bit_ones(family: str) -> None:
    (world,) = wired(1)
    x = batch_of(0, (2, 5))[0].detach()
    with world, torch.no_grad():
        for dtype, rows in ((torch.bfloat16, None), (torch.float32, torch.bfloat16)):
            block = block_of(family, dtype)
            layer = MoELayer.from_block(block, world, tokens=10, dtype=rows, experts_dtype="float8_e4m3")
            wide = MoELayer.from_block(block_of(family, dtype), world, tokens=10, dtype=rows)
            quantised = quantise_experts(wide.experts)
            for name, parameter in layer.experts.named_parameters():
                assert_same_bits(parameter, getattr(quantised, name))
            if family == "deepseek_v3":
                assert layer.shared_experts.down_proj.dtype == torch.float8_e4m3fn
            y, want = (made(x.to(dtype)) for made in (layer, wide))
            if family == "gpt_oss":
                y, want = y[0], want[0]
            assert y.dtype == dtype and layer.exchange.spec.dtype == "bfloat16"
            close("y", y, want.double(), 0.1)
    with pytest.raises(ConfigError, match="experts_dtype is 'int8'; it is None or 'float8_e4m3'"):
        MoELayer.from_block(block, world, tokens=10, experts_dtype="int8")


def scaled_block(family: str) -> Any:
    """Make a block whose experts are those of transformers' quantiser, which itself needs a GPU."""
    block = block_of(family, torch.bfloat16)
    config = copy.copy(block.experts.config)
    config.intermediate_size = config.moe_intermediate_size = 128
    config.num_local_experts = config.num_experts = len(block.experts.down_proj)
    experts = FP8Experts(config, block_size=(128, 128))
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            own = getattr(experts, name)
            wide = torch.randn(own.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1
            values, scales = quantise_weight(wide)
            own.copy_(values)
            getattr(experts, f"{name}_scale_inv").copy_(scales)
    block.experts = experts
    if family == "deepseek_v3":
        for name, linear in list(block.shared_experts.named_children()):
            if isinstance(linear, torch.nn.Linear):
                setattr(block.shared_experts, name, scaled_linear(linear))
    return block


@torch.no_grad()
def scaled_linear(wide: torch.nn.Linear) -> FP8Linear:
    linear = FP8Linear(wide.in_features, wide.out_features, block_size=(128, 128))
    values, scales = quantise_weight(wide.weight)
    linear.weight.copy_(values)
    linear.weight_scale_inv.copy_(scales)
    return linear


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_a_block_with_8_bit_experts_keeps_their_values(family: str) -> None:
    x, worlds = batch_of(0, (2, 5))[0].detach().bfloat16(), wired(2)

    block, wide = scaled_block(family), block_of(family, torch.bfloat16)
    for name in ("gate_up_proj", "down_proj"):
        values = getattr(block.experts, name), getattr(block.experts, f"{name}_scale_inv")
        setattr(wide.experts, name, torch.nn.Parameter(dequantise_weight(*values).bfloat16()))

    def run(world: World) -> torch.Tensor:
        layer = MoELayer.from_block(block, world, tokens=10)
        count = len(block.experts.down_proj) // 2
        for name, parameter in layer.experts.named_parameters():
            assert_same_bits(parameter, getattr(block.experts, name)[world.rank * count :][:count].detach())
        if family == "deepseek_v3":
            shared, own = block.shared_experts, layer.shared_experts
            ffn = shared.gate_proj.out_features
            assert_same_bits(own.gate_up_proj[:ffn], shared.gate_proj.weight.detach())
            assert_same_bits(own.gate_up_proj[128:][:ffn], shared.up_proj.weight.detach())
            assert_same_bits(own.down_proj[:, :ffn], shared.down_proj.weight.detach())
            assert_same_bits(own.down_proj_scale_inv, shared.down_proj.weight_scale_inv.detach())
        with torch.no_grad():
            y = layer(x)
            close("y", y, wide(x).double(), 0.1)
        return y

    for y in each(worlds, run):
        assert torch.is_tensor(y), y
    with pytest.raises(ConfigError, match="weights cannot be cast with 8-bit experts"):
        MoELayer.from_block(block, worlds[0], tokens=10, weights="bfloat16")
    if family == "deepseek_v3":
        wide.shared_experts = block.shared_experts
        with pytest.raises(ConfigError, match="weights cannot be cast with 8-bit experts"):
            MoELayer.from_block(wide, worlds[0], tokens=10, weights="float32")
    close_worlds(worlds)
    part = block.shared_experts.gate_proj if family == "deepseek_v3" else block.experts
    part.activation_scheme = "static"
    with wired(1)[0] as world, pytest.raises(ConfigError, match="experts with static scales of rows"):
        MoELayer.from_block(block, world, tokens=10)


def routed(block: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits, weights and ids of a block's own router."""
    return (block.router if hasattr(block, "router") else block.gate)(x)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_bfloat16_are_near_those_of_the_block(family: str) -> None:
    """The block's routing is given to both, because near logits may choose differently."""
    blocks = [block_of(family, torch.bfloat16) for _ in range(2)]

    def rank(world: World) -> None:
        block = blocks[world.rank]
        layer = MoELayer.from_block(block, world, tokens=10)
        x, dy = (each.view(-1, H) for each in batch_of(world.rank, TOKENS[2][world.rank], torch.bfloat16))
        _, weights, ids = routed(block, x.detach())
        results = []
        for run_experts in (
            lambda x, weights: layer.routed(x, ids, weights.float()),
            lambda x, weights: block.experts(x, ids, weights),
        ):
            inputs = [each.detach().clone().requires_grad_() for each in (x, weights.to(x.dtype))]
            y = run_experts(*inputs)
            results.append((y.detach(), *torch.autograd.grad((y * dy).float().sum(), inputs)))
        for name, have, wanted in zip(("y", "x", "weights"), *results, strict=True):
            close(f"{name} of rank {world.rank}", have, wanted.double(), 2e-2)

    worlds = wired(2)
    for outcome in each(worlds, rank):
        if isinstance(outcome, Exception):
            raise outcome
    close_worlds(worlds)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_choice_in_bfloat16_is_that_of_the_block_where_logits_are_apart(family: str) -> None:
    block, x = block_of(family, torch.bfloat16), batch_of(0, (8, 25), torch.bfloat16)[0].detach().view(-1, H)
    (world,) = wired(1)
    with world, torch.no_grad():
        layer = MoELayer.from_block(block, world, tokens=10)
        ids, _, logits = (layer.router if family == "gpt_oss" else layer.gate)(x)
    _, _, wanted = routed(block, x)
    topk = ids.shape[1]
    best = logits.sort(dim=1, descending=True).values
    apart = best[:, topk - 1] - best[:, topk] > 2**-7 * logits.abs().amax()
    if family == "deepseek_v3":
        apart[:] = True  # it computes logits in float32 too
    assert apart.sum() > 100
    assert torch.equal(ids[apart].sort().values, wanted[apart].sort().values)


def test_the_choice_is_that_of_deepseek_v3() -> None:
    block = block_of("deepseek_v3")
    x, _ = batch_of(3, (40, 5))
    logits, weights, ids = block.gate(x)
    form = RouterForm(16, 4, score="sigmoid", groups=4, topk_groups=2, scale=block.gate.routed_scaling_factor)
    found, scale = route(logits, form, block.gate.e_score_correction_bias)
    torch.testing.assert_close(found.sort().values, ids.sort().values)
    dense = [torch.zeros(200, 16).scatter(1, each, weight) for each, weight in ((ids, weights), (found, scale))]
    torch.testing.assert_close(dense[1], dense[0])


def test_the_balance_loss_is_that_of_transformers() -> None:
    logits = torch.randn(30, 8, generator=torch.Generator().manual_seed(2))
    form = RouterForm(8, 2)
    ids, _ = route(logits, form)
    wanted = load_balancing_loss_func((logits,), num_experts=8, top_k=2)
    torch.testing.assert_close(balance_loss(logits, ids, form), wanted)


def test_other_blocks_are_refused() -> None:
    (world,) = wired(1)
    block = block_of("mixtral")
    with world:
        with pytest.raises(ConfigError, match=r"a layer from a Linear.*MixtralSparseMoeBlock"):
            MoELayer.from_block(torch.nn.Linear(4, 4), world, tokens=4)
        block.jitter_noise = 0.1
        with pytest.raises(ConfigError, match="a layer adds no noise"):
            MoELayer.from_block(block, world, tokens=4)
        block.jitter_noise, block.experts.act_fn = 0.0, torch.nn.GELU()
        with pytest.raises(ConfigError, match="experts with activation GELU"):
            MoELayer.from_block(block, world, tokens=4)


def test_a_block_that_records_router_logits_or_has_no_weights_is_refused() -> None:
    (world,) = wired(1)
    block, empty = block_of("mixtral"), block_of("qwen3").to("meta")
    block.experts.config = SimpleNamespace(output_router_logits=True)
    with world:
        with pytest.raises(ConfigError, match=r"output_router_logits is True.*raymoe\.moe\.balance_loss"):
            MoELayer.from_block(block, world, tokens=4)
        with pytest.raises(ConfigError, match="a block on the device meta"):
            MoELayer.from_block(empty, world, tokens=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_parameters_of_a_block_stay_frozen(family: str) -> None:
    (world,) = wired(1)
    with world:
        for frozen in (True, False):
            layer = MoELayer.from_block(block_of(family).requires_grad_(not frozen), world, tokens=4)
            assert {each.requires_grad for each in layer.parameters()} == {not frozen}
