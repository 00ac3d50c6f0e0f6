"""Models of transformers with 8-bit experts on raymoe, against the same checkpoint without raymoe.

On a CPU transformers widens the weights of such a checkpoint. `validate_environment` decides that, and is left out
here for the model on raymoe, so that its experts are `FP8Experts` with the checkpoint's values and scales.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from raymoe.memory.world import World
from tests.unit.integrations import fp8_logits
from tests.unit.integrations.fp8_models import EXACT, QUANTISED, ExactExperts, fp8_experts, write_model
from tests.unit.moe.scaled_reference import rms_error_of
from tests.unit.moe.test_fp8_accuracy import compare_with_the_page
from tests.unit.ranks import RankPool


def load(folder: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def load_scaled(folder: str, **options: Any) -> Any:
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment"):
        return load(folder, **options)


def experts_of(model: Any) -> Any:
    return model.model.layers[0].mlp.experts


def block_output(model: Any, tokens: Tensor) -> Tensor:
    """Run the model, and return the output of its MoE block."""
    outputs: list[Tensor] = []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda _module, _inputs, y: outputs.append(y))
    model(tokens)
    hook.remove()
    return outputs[0].detach().clone()


@contextmanager
def on_raymoe(world: World, store: str, shared_batch: bool) -> Iterator[Any]:
    """Join the ranks, and give the options that load a model on raymoe, with one batch for both ranks or by FSDP."""
    from transformers.distributed import DistributedConfig

    from raymoe.integrations.transformers import register

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        with register(tokens=16):
            spread = {"tp_size": 2} if shared_batch else {"fsdp_size": 2}
            yield {"distributed_config": DistributedConfig(**spread, ep_size=2, ep_implementation="raymoe")}
    finally:
        dist.destroy_process_group()


@torch.no_grad()
def run_model(world: World, store: str, folder: str, shared_batch: bool) -> dict[str, Any]:
    with on_raymoe(world, store, shared_batch) as options:
        model, wide = load_scaled(folder, **options).requires_grad_(False), load(folder)
        own = 0 if shared_batch else world.rank
        tokens = torch.randint(1, 64, (1, 5 + own), generator=torch.Generator().manual_seed(own))
        exact = copy.deepcopy(wide)
        exact.model.layers[0].mlp.experts = ExactExperts(experts_of(wide))
        outputs = {name: block_output(each, tokens) for name, each in (("exact", exact), ("wide", wide))}
        y, held = block_output(model, tokens), experts_of(model)
        found: dict[str, Any] = {name: rms_error_of(y, want.double()) for name, want in outputs.items()}
        found |= {"dtype": held.gate_up_proj.dtype, "scales": held.down_proj_scale_inv.dtype}
        scales = held.down_proj_scale_inv.to_local()
        scales.copy_(scales.float() * 2)
        found["mistake"] = rms_error_of(block_output(model, tokens), outputs["exact"].double())
        return found


@pytest.mark.parametrize(("family", "ue8m0", "shared_batch"), [("Qwen3Moe", False, True), ("DeepseekV3", True, False)])
def test_a_registered_model_computes_8_bit_experts(
    pool: RankPool, tmp_path: Path, family: str, ue8m0: bool, shared_batch: bool
) -> None:
    write_model(str(tmp_path / "model"), family, ue8m0)
    for found in pool.run(2, run_model, str(tmp_path / "store"), str(tmp_path / "model"), shared_batch):
        assert found["dtype"] == torch.float8_e4m3fn
        assert found["scales"] == (torch.float8_e8m0fnu if ue8m0 else torch.float32)
        assert found["exact"] < EXACT < found["wide"] < QUANTISED and found["mistake"] > 2 * QUANTISED, found


def test_logits_of_layers_have_the_errors_of_rows_that_torch_quantises() -> None:
    rows = compare_with_the_page(fp8_logits.table())
    assert len(rows) == len(fp8_logits.FAMILIES)
    for name, *cells in rows:
        same, by_torch, wide, _ = (float(cell.split(" / ")[0]) for cell in cells)
        assert 0 < same < 1.15 * by_torch and same < wide, name


def run_refused_steps(world: World, store: str) -> list[str]:
    """Run five steps, of which all but the first and the last fail; return the error of each."""
    from torch.distributed.device_mesh import init_device_mesh

    from raymoe.integrations import transformers_fp8
    from raymoe.integrations.transformers import register

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        ep_mesh: Any = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        alone, errors = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"], []
        failing = mock.patch.object(transformers_fp8, "apply_scaled", side_effect=MemoryError("no room"))
        with register(tokens=6, timeout_s=20) as registration:
            spread_experts = registration._implementation(fp8_experts(), ep_mesh, alone)
            for fault in ("", "tokens", "experts", "gradients", ""):
                spoilt = fault if world.rank == 0 else ""
                weights, ids = torch.rand(9 if spoilt == "tokens" else 5, 4).topk(2)
                try:
                    with (
                        torch.set_grad_enabled(fault == "gradients"),
                        failing if spoilt == "experts" else nullcontext(),
                    ):
                        y = spread_experts(torch.randn(len(ids), 128, requires_grad=True), ids, weights)
                    errors.append("" if bool(y.isfinite().all()) and bool(y.any()) else "no number")
                except Exception as error:  # noqa: BLE001  compared below
                    errors.append(f"{type(error).__name__}: {error}")
        return errors
    finally:
        dist.destroy_process_group()


def test_a_step_that_fails_is_refused_by_all_and_the_next_one_works(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(2, run_refused_steps, str(tmp_path / "store"))
    assert first[0] == second[0] == first[4] == second[4] == ""
    assert first[1] == second[1] and first[1].startswith("DataRefused: num_tokens is 9 on rank 0; x has 6 rows")
    assert first[2] == "MemoryError: no room" and second[2].startswith("DataRefused: an exception, which rank 0")
    assert first[3] == second[3]
    assert first[3] == (
        "ConfigError: a layer with 8-bit experts has no gradients, and hidden_states needs one; call it under "
        "torch.no_grad, or load the model with FineGrainedFP8Config(dequantize=True)"
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"activation_scheme": "static"}, "experts with static scales of rows"),
        ({"block_size": None}, "experts with scales of blocks of None"),
        ({"ffn": 192}, "experts with gate and up of 192 rows each; a multiple of 128 is needed"),
        ({"expert_dtype": "fp4"}, r"experts with weights of torch\.int8; torch\.float8_e4m3fn is needed"),
        ({"has_gate": False}, "experts with activation SiLUActivation, or without a gate"),
        ({"config": {"hidden_act": "gelu"}}, "experts with activation GELUActivation"),
        ({"config": {"mlp_gate_softcap": 3.0, "mlp_up_softcap": 3.0}}, "experts whose gate has a soft cap of 3.0"),
    ],
)
def test_other_forms_are_left_to_transformers_with_a_warning(changed: dict[str, Any], says: str) -> None:
    from raymoe.integrations.transformers import _scaled_experts_of

    with pytest.warns(RuntimeWarning, match=f"transformers' own kernels compute {says}"):
        assert _scaled_experts_of(fp8_experts(**changed)) is None


@pytest.mark.parametrize("config", [{}, {"swiglu_limit": 1.5}, {"swiglu_limit": 1.5, "swiglu_alpha": 1.7}])
def test_the_activation_is_that_of_the_module(config: dict[str, float]) -> None:
    from raymoe.integrations.transformers_fp8 import ScaledExperts

    experts = fp8_experts(config=config)
    gate_up = torch.randn(9, 256)
    torch.testing.assert_close(ScaledExperts(experts)._activation(gate_up), experts._apply_gate(gate_up))
