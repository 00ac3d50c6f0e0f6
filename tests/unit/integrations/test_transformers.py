"""raymoe as an implementation of expert parallelism in transformers: the part that the example does not show."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raymoe.errors import ConfigError
from raymoe.memory.world import World
from tests.unit.moe.gradient_cases import close
from tests.unit.ranks import RankPool

EXPERTS, H = 4, 8


class Scaled(torch.nn.Module):
    """Experts x -> tanh(scale_e * x), called as transformers calls its experts: with ids of this rank's experts."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.scale, self.num_experts = torch.nn.Parameter(scale), len(scale)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x[:, None] * self.scale[ids]) * weights[..., None]).sum(dim=1)


def run_shared_batch(world: World, store: str, tensor_parallel: bool) -> dict[str, torch.Tensor]:
    """Run two ranks with one batch, or with a batch each."""
    from torch.distributed.device_mesh import init_device_mesh

    from raymoe.integrations.transformers import register

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        ep_mesh: Any = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
        source = torch.Generator().manual_seed(3)
        whole = torch.rand(EXPERTS, H, generator=source) + 0.5
        source.manual_seed(0 if tensor_parallel else world.rank)
        tokens = 5 if tensor_parallel else 5 * world.rank  # rank 0 of the others has none
        x = torch.randn(tokens, H, generator=source, requires_grad=True)
        weights, ids = torch.rand(tokens, EXPERTS, generator=source).topk(2)
        weights.requires_grad_()
        experts = Scaled(whole.chunk(2)[world.rank].clone())
        with register(tokens=6) as registration:
            spread_experts = registration._implementation(experts, ep_mesh, ep_mesh if tensor_parallel else alone)
            y = spread_experts(x, ids, weights)
            y.square().sum().backward()
        with pytest.raises(ConfigError, match="whose registration is closed"):
            spread_experts(x, ids, weights)
        reference, again = Scaled(whole), [each.detach().clone().requires_grad_() for each in (x, weights)]
        wanted = reference(again[0], ids, again[1])
        wanted.square().sum().backward()
        close("y", y.detach(), wanted.detach().double(), 1e-6)
        for have, exactly in zip((x, weights), again, strict=True):
            assert have.grad is not None and exactly.grad is not None
            close("gradient", have.grad, exactly.grad.double(), 1e-6)
        assert experts.scale.grad is not None and reference.scale.grad is not None
        return {"own": experts.scale.grad, "whole": reference.scale.grad}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("tensor_parallel", [True, False])
def test_experts_run_with_a_shared_batch_and_without(pool: RankPool, tmp_path: Path, tensor_parallel: bool) -> None:
    found = pool.run(2, run_shared_batch, str(tmp_path / "store"), tensor_parallel)
    whole = found[0]["whole"] if tensor_parallel else found[0]["whole"] + found[1]["whole"]
    close("experts", torch.cat([each["own"] for each in found]), whole.double(), 1e-6)


def run_refused_steps(world: World, store: str, fault: str) -> list[str]:
    """Run three steps, of which rank 0 spoils the second; return the error of each."""
    from torch.distributed.device_mesh import init_device_mesh

    from raymoe.integrations.transformers import register

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        ep_mesh: Any = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
        experts, errors = Scaled(torch.rand(EXPERTS // 2, H) + 0.5), []

        def failing(*_: torch.Tensor) -> torch.Tensor:
            raise MemoryError("no room for the experts")

        with register(tokens=6, timeout_s=20) as registration:
            spread_experts = registration._implementation(experts, ep_mesh, alone)
            whole = spread_experts.experts_forward
            for step in range(3):
                spoilt = step == 1 and world.rank == 0
                tokens = 9 if spoilt and fault == "tokens" else 5
                spread_experts.experts_forward = failing if spoilt and fault == "experts" else whole
                weights, ids = torch.rand(tokens, EXPERTS).topk(2)
                try:
                    y = spread_experts(torch.randn(tokens, H, requires_grad=True), ids, weights)
                    y.sum().backward()
                    errors.append("" if bool(y.isfinite().all()) else "no number")
                except Exception as error:  # noqa: BLE001  compared below
                    errors.append(f"{type(error).__name__}: {error}")
            registration.check()
            [made_world] = registration._worlds.values()
            assert made_world.timeout_s == 20
        return errors
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("fault", ["tokens", "experts"])
def test_a_step_that_one_rank_refuses_is_refused_by_all_and_the_next_one_works(
    pool: RankPool, tmp_path: Path, fault: str
) -> None:
    first, second = pool.run(2, run_refused_steps, str(tmp_path / "store"), fault)
    if fault == "tokens":
        reason = "num_tokens is 9 on rank 0; x has 6 rows, so 0 to 6 can be sent: make the exchange with more tokens"
        assert first == second == ["", f"DataRefused: {reason}", ""]
    else:
        assert first == ["", "MemoryError: no room for the experts", ""]
        reason = "an exception, which rank 0 reports, ended the work of its experts"
        assert second == ["", f"DataRefused: {reason}", ""]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokens": "x"}, "tokens is 'x'; a whole number of at least 1 is needed"),
        ({"tokens": 0}, "tokens is 0; a whole number"),
        ({"capacity": "most"}, "capacity is 'most'; it is 'worst' or a number of rows"),
        ({"backend": "fast"}, "backend is 'fast'; it is one of auto, host, collective, allgather, fused, staged"),
        ({"timeout_s": -1}, "timeout_s is -1; waits need a number of seconds above 0"),
    ],
)
def test_mistakes_are_told_by_register(options: dict[str, Any], says: str) -> None:
    from raymoe.integrations.transformers import register

    with pytest.raises(ConfigError, match=says):
        register(**options)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
EIGHT = {"num_experts_per_tok": 2, "intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {**EIGHT, "num_local_experts": 8},
    "Qwen3Moe": {**EIGHT, "num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "Olmoe": {**EIGHT, "num_experts": 8, "num_key_value_heads": 4},
    "DeepseekV3": {
        **EIGHT,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "GptOss": {**EIGHT, "num_local_experts": 8},
}


def gradients_of(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits, and the gradients of all parameters."""
    logits = model(tokens).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    return logits.detach(), {
        name: parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        for name, parameter in model.named_parameters()
    }


def run_model(world: World, store: str, family: str, replayed: bool = False) -> dict[str, float]:
    """Return the errors of a sharded model against the unsharded one, by name; `replayed`: both with given routes."""
    import transformers
    from transformers.distributed import DistributedConfig

    from raymoe.integrations.transformers import register
    from raymoe.moe import replay_routes

    kind, config = getattr(transformers, f"{family}ForCausalLM"), getattr(transformers, f"{family}Config")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        torch.manual_seed(0)
        alone = kind(config(**{**SIZES, **FAMILIES[family]}))
        for parameter in alone.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        folder = f"{store}-{family}"
        if world.rank == 0:
            alone.save_pretrained(folder)
        world.barrier("saved")
        source = torch.Generator().manual_seed(world.rank)
        tokens = torch.randint(1, 64, (1, 5 + world.rank), generator=source)
        ids = torch.rand(1, tokens.numel(), 8, generator=source).topk(2).indices.to(torch.int16)
        ids[0, 2] = -1
        with replay_routes(alone, ids) if replayed else nullcontext():
            wanted, whole = gradients_of(alone, tokens)
        with register(tokens=8):
            sharding = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="raymoe")
            model = kind.from_pretrained(folder, distributed_config=sharding)
            with replay_routes(model, ids) if replayed else nullcontext():
                logits, found = gradients_of(model, tokens)
        errors = {"logits": float((logits - wanted).abs().max() / wanted.abs().max())}
        assert set(found) == set(whole)
        for name, gradient in whole.items():
            dist.all_reduce(gradient)  # FSDP averages over the ranks' batches
            error = (2 * found[name] - gradient).abs().max()
            errors[name] = float(error / gradient.abs().max().clamp(min=1e-3))
        return errors
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_registered_model_equals_the_unsharded_one(pool: RankPool, tmp_path: Path, family: str) -> None:
    for errors in pool.run(2, run_model, str(tmp_path / "store"), family):
        assert len(errors) > 10
        assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("DeepseekV3", marks=pytest.mark.thorough)])
def test_a_registered_model_takes_recorded_routes(pool: RankPool, tmp_path: Path, family: str) -> None:
    for errors in pool.run(2, run_model, str(tmp_path / "store"), family, True):
        assert max(errors.values()) <= 1e-5, errors
