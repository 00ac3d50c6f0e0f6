"""A Qwen3-MoE of torchtitan on two CPU ranks, by its own all-to-all and by raymoe: logits, loss and all gradients.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.hosts.torchtitan_model none,full 1

The arguments are kinds, and the degree of tensor parallelism. A kind is one of activation checkpointing, `compiled`,
`hybridep`, where raymoe replaces HybridEP's dispatcher, or `replayed`, with routes that are given. Rank 0 prints a line
of JSON with the largest differences.
`saved FOLDER` on two ranks saves a checkpoint of other weights and the logits of rank 0; on one rank it compares them.
"""

from __future__ import annotations

import json
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torchtitan_on_ray.cpu as on_cpu  # before the other modules of torchtitan

# isort: split
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchtitan.distributed.utils as dist_utils
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig, apply_overrides, derive, override
from torchtitan.config.override import OverrideConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.qwen3 import model_registry

from raymoe.exchange.exchange import Exchange
from raymoe.integrations.torchtitan import RaymoeSelectiveAC
from raymoe.moe import record_routes, replay_routes

LENGTH, BATCH, STEPS = 16, 2, 2
HERE = "tests.hosts.torchtitan_model"
OWN, RAYMOE = "torchtitan", "raymoe"


class Float32Experts(GroupedExperts):
    """Experts that compute in float32; torchtitan's cast to bfloat16, which would hide small differences."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        local = (
            each.to_local() if isinstance(each, DTensor) else each for each in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        w1, w2, w3 = (each.transpose(-2, -1) for each in local)
        ends = torch.cumsum(num_tokens_per_expert_E, 0, dtype=torch.int32)
        h = functional.silu(torch._grouped_mm(x_RD, w1, offs=ends)) * torch._grouped_mm(x_RD, w3, offs=ends)
        return torch._grouped_mm(h, w2, offs=ends)


@override(target=GroupedExperts.Config, description="float32 experts, to compare")
def float32_experts(cfg: Any) -> Any:
    return derive(cfg, Float32Experts.Config)


@dataclass(frozen=True)
class Case:
    """How a model is built."""

    checkpointing: str
    tp: int

    @property
    def replayed(self) -> bool:
        return self.checkpointing in ("replayed", "full replayed")

    @property
    def compiled(self) -> bool:
        return self.checkpointing == "compiled"

    def policy(self, host: str) -> Any:
        """Return torchtitan's activation checkpointing; with raymoe `selective` is raymoe's."""
        selective = (
            RaymoeSelectiveAC.Config if host == RAYMOE and self.checkpointing == "selective" else SelectiveAC.Config
        )
        kinds = {
            "full": FullAC.Config,
            "full replayed": FullAC.Config,
            "selective": selective,
            "own selective": SelectiveAC.Config,
        }
        return kinds[self.checkpointing]() if self.checkpointing in kinds else None


def build(case: Case, host: str) -> tuple[torch.nn.Module, list[str]]:
    """Build the model with the same weights for both hosts; return it and torchtitan's lines about overrides."""
    ranks = dist.get_world_size()
    parallelism = ParallelismConfig(
        expert_parallel_degree=ranks,
        data_parallel_shard_degree=ranks // case.tp,
        tensor_parallel_degree=case.tp,
        spmd_backend="partial_dtensor",  # the newer two fail in FSDP with torch 2.13, also without raymoe
    )
    dims = ParallelDims.from_config(parallelism, ranks)
    dims.build_mesh()
    dist_utils.set_spmd_backend("partial_dtensor")
    replaced = "hybridep" if case.checkpointing == "hybridep" and host == RAYMOE else "standard"
    spec = model_registry("debugmodel_moe", attn_backend="flex", moe_comm_backend=replaced)
    spec.model.layers = spec.model.layers[:2]
    training = TrainingConfig(local_batch_size=BATCH, seq_len=LENGTH, mixed_precision_param="float32")
    spec.model.update_from_config(config=types.SimpleNamespace(parallelism=parallelism, training=training))
    imports = ["torchtitan_on_ray.cpu.sdpa"]
    imports += [] if case.compiled else [f"{HERE}.float32_experts"]  # grouped products are compiled for bfloat16 only
    imports += ["raymoe.integrations.torchtitan.dispatcher"] if host == RAYMOE else []
    lines = apply_overrides(OverrideConfig(imports=imports), spec.model)
    with torch.device("meta"):
        model = spec.model.build()
    compiled = case.compiled and host == RAYMOE  # its own all-to-all does not compile on CPUs
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=compiled, components=["model"] if compiled else [], backend="aot_eager"),
        ac_config=case.policy(host),
        dump_folder="",
    )
    on_cpu.sum_without_scale(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=None)
        for name, parameter in model.named_parameters():
            source = torch.Generator().manual_seed(sum(map(ord, plain(name))))
            whole = torch.randn(parameter.shape, generator=source) * 0.05
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(whole)
    return model, lines


def plain(name: str) -> str:
    """Return a parameter's name without what wrappers add."""
    return name.replace("._checkpoint_wrapped_module", "").replace("._orig_mod", "")


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def step(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return logits, loss and gradients by name."""
    model.zero_grad()
    logits = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
    loss.backward()
    gradients = {plain(name): whole_of(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    return {"logits": logits.detach(), "loss": loss.detach(), **gradients}


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the dispatches and combines of all exchanges, those of backward passes too."""
    counts = {"dispatches": 0, "combines": 0}
    kinds = {"dispatch_unkept": "dispatches", "dispatch_again": "dispatches", "dispatch_known": "dispatches"}
    kinds |= {"combine_unkept": "combines", "combine_gradients": "combines"}

    def counting(name: str) -> Any:
        real = getattr(Exchange, name)

        def call(self: Exchange, *arguments: Any) -> Any:
            counts[kinds[name]] += 1
            return real(self, *arguments)

        return mock.patch.object(Exchange, name, call)

    patches = [counting(name) for name in kinds]
    for each in patches:
        each.start()
    yield counts
    for each in patches:
        each.stop()


@contextmanager
def given_routes(case: Case, model: torch.nn.Module, tokens: torch.Tensor) -> Iterator[None]:
    """Replay routes that are drawn, in place of half of those that the model chooses."""
    if not case.replayed:
        yield
        return
    with torch.no_grad(), record_routes(model, tokens=BATCH * LENGTH) as routes:
        model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
    live, source = routes.ids(), torch.Generator().manual_seed(dist.get_rank() // case.tp)
    ids = torch.rand(*live.shape[:2], 8, generator=source).topk(live.shape[2]).indices.to(live.dtype)
    assert live.shape[0] == 2 and not torch.equal(ids, live)
    ids[:, ::2] = -1
    with replay_routes(model, ids), record_routes(model, tokens=2 * BATCH * LENGTH) as routes:
        yield
    taken = routes.ids().chunk(STEPS, dim=1)[-1]
    assert torch.equal(taken[:, 1::2], ids[:, 1::2]) and bool((taken >= 0).all())


def compare(case: Case) -> dict[str, Any]:
    """Run both hosts on the same tokens, and return the largest differences."""
    source = torch.Generator().manual_seed(dist.get_rank() // case.tp)
    tokens = torch.randint(0, 2048, (BATCH, LENGTH), generator=source)
    results: dict[str, dict[str, torch.Tensor]] = {}
    for host in (OWN, RAYMOE):
        model, lines = build(case, host)
        with counted() as counts, given_routes(case, model, tokens):
            for _ in range(STEPS):
                results[host] = step(model, tokens)
    own, ours = results[OWN], results[RAYMOE]
    assert own.keys() == ours.keys()
    worst = {name: float((ours[name] - own[name]).abs().max()) for name in own}
    gradients = {name: each for name, each in worst.items() if name not in ("logits", "loss")}
    return {
        "logits": worst["logits"],
        "loss": worst["loss"],
        "gradient": max(gradients.values()),
        "gradients": len(gradients),
        "largest gradient": max(float(own[name].abs().max()) for name in gradients),
        "replaced": sum("raymoe" in line for line in lines),
        **counts,
    }


def checkpointed(folder: Path) -> dict[str, float]:
    """Save the model of several ranks, or load it on one and return how far its logits are from those of the others."""
    model, _ = build(Case("none", 1), RAYMOE)
    source, seen = torch.Generator().manual_seed(0), folder / "logits.pt"
    tokens = torch.randint(0, 2048, (BATCH, LENGTH), generator=source)
    if dist.get_world_size() == 1:
        state = model.state_dict()
        before = step(model, tokens)["logits"]
        dcp.load(state, checkpoint_id=str(folder / "model"))
        model.load_state_dict(state)  # which has fused weights in parts
        logits, wanted = step(model, tokens)["logits"], torch.load(seen)
        return {"before": float((before - wanted).abs().max()), "after": float((logits - wanted).abs().max())}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    dcp.save(model.state_dict(), checkpoint_id=str(folder / "model"))
    logits = step(model, tokens)["logits"]
    if dist.get_rank() == 0:
        torch.save(logits, seen)
    return {}


def main() -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    if sys.argv[1] == "saved":
        print(json.dumps(checkpointed(Path(sys.argv[2]))))
        dist.destroy_process_group()
        return
    kinds, tp = sys.argv[1].split(","), int(sys.argv[2])
    found = {kind: compare(Case(kind, tp)) for kind in kinds}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
