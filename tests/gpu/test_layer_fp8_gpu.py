"""Layers with 8-bit experts on GPU ranks, against float64 of the same weights and rows; captured; no host waits.

The last tests have 8-bit experts of transformers: on raymoe by `register`, and as its own quantiser makes them.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from raymoe.errors import ConfigError  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.fp8 import quantise, quantise_weight  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe import product_launch  # noqa: E402
from raymoe.moe.experts import GPT_OSS, SWIGLU, Activation  # noqa: E402
from raymoe.moe.layer import LayerForm, MoELayer  # noqa: E402
from raymoe.moe.router_formulas import RouterForm  # noqa: E402
from raymoe.moe.weights import ExpertShape, expert_biases, expert_weights  # noqa: E402
from raymoe.rows.quantised_rows import quantise_rows  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, RANKS, GpuRanks  # noqa: E402
from tests.gpu.test_exchange_workload import run  # noqa: E402
from tests.gpu.test_layer_workload_gpu import ALONE, FORWARD, job  # noqa: E402
from tests.gpu.torchrun_ranks import torchrun  # noqa: E402
from tests.unit.moe.scaled_reference import EPS, SCALED, error_of, rms_error_of, wanted  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() != product_launch.CAPABILITY, reason="needs wgmma"
    ),
]

FP8, SEED = "float8_e4m3", 7
LARGEST, RMS = 4e-2, 2e-2
"""Errors, of which roundings of rows between the products to another neighbour are the most, and bfloat16 the rest."""


@dataclass(frozen=True)
class Layer:
    """A layer on `size` ranks."""

    size: int
    hidden: int = 512
    tokens: int = 300
    layout: str = "expert"
    dtype: str = "bfloat16"
    activation: Activation = SWIGLU
    backend: str = "auto"

    @property
    def experts(self) -> int:
        return 4 * self.size

    @property
    def spec(self) -> ExchangeSpec:
        return ExchangeSpec(
            self.tokens, self.hidden, self.experts, topk=3, dtype=self.dtype, layout=self.layout, depth=0
        )

    @property
    def form(self) -> LayerForm:
        router = RouterForm(self.experts, 3, score="sigmoid")
        form = LayerForm(256, router, self.activation, shared=128, norm=EPS, residual=True, experts_dtype=FP8)
        return replace(form, biases=self.activation == GPT_OSS)

    def make(self, world: World, **changed: Any) -> MoELayer:
        return MoELayer(world, self.spec, replace(self.form, **changed), seed=SEED, backend=self.backend)

    def rows(self, world: World, seed: int = 0) -> torch.Tensor:
        source = torch.Generator().manual_seed(100 * seed + world.rank)
        drawn = torch.randn(self.tokens - 2 * world.rank, self.hidden, generator=source)
        return drawn.to(world.device, getattr(torch, self.dtype))

    def weights(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Draw the experts of all ranks again, and quantise them."""
        shape, drawn = ExpertShape(self.hidden, 256, getattr(torch, self.dtype)), []
        for expert in range(self.experts):
            wide = expert_weights(shape, SEED, expert, device)
            parts = [*quantise_weight(wide.gate_up), *quantise_weight(wide.down)]
            biases = expert_biases(shape, SEED, expert, device)
            drawn.append([*parts, biases.gate_up, biases.down])
        names = [*SCALED, "gate_up_proj_bias", "down_proj_bias"]
        return {name: torch.stack(parts) for name, parts in zip(names, zip(*drawn, strict=True), strict=True)}


@contextmanager
def no_host_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
def run_layer(world: World, case: Layer, many: bool) -> dict[str, Any]:
    """Run a layer eagerly and from a graph; return its errors, and those with one wrong scale in each expert."""
    with mock.patch("raymoe.exchange.peer.workspace.FEW_TOKENS", 0) if many else nullcontext():
        layer = case.make(world).eval()
    x, whole = case.rows(world), case.weights(world.device)
    spec, own = layer.exchange.spec, slice(4 * world.rank, 4 * world.rank + 4)
    found: dict[str, Any] = {"wire": (spec.dispatch_wire, spec.output)}
    found["weights"] = all(
        torch.equal(each.float(), whole[name][own].float()) for name, each in layer.experts.named_parameters()
    )
    found["shared"] = layer.shared_experts.down_proj.dtype
    layer(x)
    torch.cuda.synchronize()
    with no_host_waits():
        y = layer(x)
    want = wanted(layer, whole, x)
    found["largest"], found["rms"] = error_of(y, want), rms_error_of(y, want)
    side, same = torch.cuda.Stream(world.device), []
    side.wait_stream(torch.cuda.current_stream(world.device))
    with torch.cuda.stream(side):
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            captured = layer(x)
        for seed in range(3):
            x.copy_(case.rows(world, seed))
            with no_host_waits():
                graph.replay()
            replayed = captured.clone()
            same.append(torch.equal(replayed, layer(x)))
        layer.exchange.check()
    del graph
    found["same"] = same
    torch.cuda.current_stream(world.device).wait_stream(side)
    x, mistakes = case.rows(world), {}
    for name in SCALED[1::2]:
        scales = getattr(layer.experts, name)
        scales[:, 0, 0] *= 2
        mistakes[name] = error_of(layer(x), want)
        scales[:, 0, 0] /= 2
        scales = getattr(layer.shared_experts, name)
        scales[0, 0] *= 2
        mistakes[f"shared {name}"] = error_of(layer(x), want)
        scales[0, 0] /= 2
    found["mistakes"] = mistakes
    layer.exchange.check()
    return found


def judge(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["wire"] == (FP8, "raw") and each["weights"] and each["shared"] == torch.float8_e4m3fn
        assert each["largest"] <= LARGEST and each["rms"] <= RMS, each
        assert each["same"] == [True] * 3


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize(("tokens", "many"), [(16, False), (16, True), (300, True)])
def test_a_layer_equals_float64_of_the_same_weights_and_rows(
    ranks: GpuRanks, tokens: int, many: bool, layout: str
) -> None:
    size = min(RANKS, 4)
    found = ranks.run(size, run_layer, Layer(size, tokens=tokens, layout=layout), many)
    judge(found)
    for each in found:
        assert min(each["mistakes"].values()) > 2 * LARGEST, each


@pytest.mark.parametrize("changed", [{"dtype": "float16"}, {"activation": GPT_OSS}, {"backend": "staged"}], ids=str)
def test_other_rows_activations_and_backends_do_too(ranks: GpuRanks, changed: dict[str, Any]) -> None:
    size = min(RANKS, 4)
    judge(ranks.run(size, run_layer, Layer(size, **changed), True))


@pytest.mark.parametrize("tokens", [16, 300])
def test_rows_as_wide_as_those_of_deepseek_v3_do_too(ranks: GpuRanks, tokens: int) -> None:
    size = min(RANKS, 4)
    judge(ranks.run(size, run_layer, Layer(size, hidden=7168, tokens=tokens), False))


@torch.no_grad()
def run_beside_wide(world: World, case: Layer) -> tuple[float, float]:
    """Return what 8 bits cost: the error against a layer in bfloat16, and the share of the experts' memory."""
    layer, wide, x = case.make(world), case.make(world, experts_dtype=None), case.rows(world)
    held, had = (
        sum(each.nbytes for part in (made.experts, made.shared_experts) for each in part.parameters())
        for made in (layer, wide)
    )
    return rms_error_of(layer(x), wide(x).double()), held / had


def test_8_bits_cost_some_digits_and_half_of_the_memory_stays(ranks: GpuRanks) -> None:
    size = min(RANKS, 4)
    for error, share in ranks.run(size, run_beside_wide, Layer(size)):
        assert 1e-4 < error < 6e-2 and share < 0.51


def run_refused(world: World, case: Layer) -> str:
    with pytest.raises(ConfigError) as caught:
        case.make(world)(case.rows(world))
    return str(caught.value)


def test_gradients_are_refused_before_anything_is_sent(ranks: GpuRanks) -> None:
    size = min(RANKS, 4)
    for message in ranks.run(size, run_refused, Layer(size)):
        assert message.startswith(
            "a layer with 8-bit experts has no gradients, and gate.weight needs one; call it under"
        )


@pytest.mark.parametrize("tokens", [16, 300])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_the_workload_verifies_and_captures_it(ranks: GpuRanks, layout: str, tokens: int) -> None:
    given = job(tokens, "sigmoid", experts_dtype=FP8) | {"exchange": {"layout": layout}}
    lines = ranks.run(2, run, given)[0]
    assert [line["op"] for line in lines] == ["step", "step", *FORWARD, *ALONE]
    assert all(line["verified"] and line["graph"] and line["wire"] == f"{FP8}/bfloat16" for line in lines)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 7168), (3, 272), (300, 2880), (4096, 7168)])
def test_one_kernel_quantises_rows_with_the_bits_of_the_formula(rows: int, hidden: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, hidden, dtype=dtype, device="cuda")
    x[0, :3] = torch.tensor([torch.inf, 0.0, -torch.inf])
    x[-1, 128:] = 0
    want = quantise(x)
    for have, exactly in zip(quantise_rows(x), want, strict=True):
        assert torch.equal(have.float(), exactly.float())


# Experts of transformers.

NEEDS_QUANTISER = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("transformers", "accelerate", "safetensors")),
    reason="transformers' quantiser needs transformers, accelerate and safetensors: pip install 'raymoe[transformers]'",
)


@torch.no_grad()
def run_registered(rank: int, ranks: int, tokens: int) -> dict[str, Any]:
    """Run `FP8Experts` that are registered with raymoe; return the error, and that with a wrong scale."""
    from types import SimpleNamespace

    from torch.distributed.device_mesh import init_device_mesh

    from raymoe.fp8 import dequantise_weight
    from raymoe.integrations.transformers import register
    from tests.unit.integrations.fp8_models import ExactExperts, fp8_experts

    torch.cuda.set_device(rank)
    ep_mesh: Any = init_device_mesh("cuda", (ranks,), mesh_dim_names=("ep",))
    alone = init_device_mesh("cuda", (ranks, 1), mesh_dim_names=("dp", "tp"))["tp"]
    spread = [fp8_experts(seed=seed, ffn=256).cuda() for seed in range(ranks)]
    parts = {
        name: torch.cat([dequantise_weight(getattr(each, name), getattr(each, f"{name}_scale_inv")) for each in spread])
        for name in SCALED[::2]
    }
    exact = ExactExperts(SimpleNamespace(**parts))
    source = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens - rank, 128, generator=source).cuda().bfloat16()
    weights, ids = torch.rand(tokens - rank, 2 * ranks, generator=source).topk(2)
    weights, ids = weights.cuda(), ids.cuda()
    with register(tokens=tokens, timeout_s=30) as registration:
        experts = registration._implementation(spread[rank], ep_mesh, alone)
        [y, want] = experts(x, ids, weights), exact(x, ids, weights)
        with no_host_waits():
            again = experts(x, ids, weights)
        spec = registration.exchange(ep_mesh.get_group(), (x, ids), 2 * ranks, scaled=True).spec
        spread[rank].down_proj_scale_inv[:, 0, 0] *= 2
        wrong = experts(x, ids, weights)
        registration.check()
    errors = [error_of(each, want.double()) for each in (y, wrong)]
    return {"errors": errors, "same": torch.equal(y, again), "wire": (spec.dispatch_wire, spec.output)}


@pytest.mark.parametrize("tokens", [16, 300])
def test_registered_8_bit_experts_equal_float64_of_the_same_weights_and_rows(tmp_path: Path, tokens: int) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel", reason="needs transformers 5.23 or newer")
    ranks = min(2, GPUS)
    for found in torchrun(ranks, tmp_path, "cpu:gloo,cuda:nccl", run_registered, ranks, tokens):
        right, wrong = found["errors"]
        assert right <= LARGEST < 2 * LARGEST < wrong, found
        assert found["same"] and found["wire"] == (FP8, "raw")


@torch.no_grad()
def run_quantiser(world: World, folder: str) -> dict[str, Any]:
    """Let transformers quantise a model, and make a layer of its block; compare with the block before."""
    from transformers import FineGrainedFP8Config, Qwen3MoeForCausalLM

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": {"": str(world.device)}}
    config = FineGrainedFP8Config(modules_to_not_convert=[".*self_attn", "lm_head"])
    blocks = [
        Qwen3MoeForCausalLM.from_pretrained(folder, **options, **more).model.layers[0].mlp
        for more in ({}, {"quantization_config": config})
    ]
    wide, scaled = blocks
    layer = MoELayer.from_block(scaled, world, tokens=40)
    count = len(scaled.experts.down_proj) // world.size
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(world.rank)).to(world.device, torch.bfloat16)
    _, weights, ids = wide.gate(x)
    return {
        "kept": all(
            torch.equal(each.float(), getattr(scaled.experts, name)[world.rank * count :][:count].float())
            for name, each in layer.experts.named_parameters()
        ),
        "dtype": layer.experts.down_proj.dtype,
        "rms": rms_error_of(layer.routed(x, ids, weights.float()), wide.experts(x, ids, weights).double()),
    }


@NEEDS_QUANTISER
def test_a_block_that_transformers_quantised_keeps_its_weights(ranks: GpuRanks, tmp_path: Path) -> None:
    from tests.unit.integrations.fp8_models import ROUNDING, write_wide_model

    write_wide_model(str(tmp_path / "model"), "Qwen3Moe")
    for found in ranks.run(2, run_quantiser, str(tmp_path / "model")):
        assert found["kept"] and found["dtype"] == torch.float8_e4m3fn
        # Rows before gate and up and before down, and the weights of each: twice the errors of rows alone.
        assert 1e-3 < found["rms"] < 4 * ROUNDING, found
