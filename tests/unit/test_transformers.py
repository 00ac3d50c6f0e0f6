"""raymoe as an implementation of expert parallelism in transformers: the part that the example does not show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raymoe.errors import ConfigError
from raymoe.memory.world import World
from tests.unit.gradient_cases import close
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
            made = registration._implementation(experts, ep_mesh, ep_mesh if tensor_parallel else alone)
            y = made(x, ids, weights)
            y.square().sum().backward()
            with pytest.raises(ConfigError, match="a rank gives 7 tokens; register was called with tokens=6"):
                registration.exchange(ep_mesh.get_group(), (torch.zeros(7, H), ids), EXPERTS)
        with pytest.raises(ConfigError, match="whose registration is closed"):
            made(x, ids, weights)
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
