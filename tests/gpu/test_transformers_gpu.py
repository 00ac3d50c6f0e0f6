"""A rank of a model of transformers that gives too many tokens, on GPUs, where no step waits for the host."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.distributed.expert_parallel")

from tests.gpu.ranks import GPUS, NEEDS_GPU  # noqa: E402
from tests.gpu.torchrun_ranks import torchrun  # noqa: E402
from tests.unit.integrations.test_transformers import EXPERTS, Scaled  # noqa: E402

RANKS = min(2, GPUS)
HIDDEN = 256
pytestmark = [*NEEDS_GPU, pytest.mark.timeout(300)]


class Skipping(Scaled):
    """Experts that skip rows of no expert, whose id is after the last, as those of transformers do."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, ids.clamp(max=self.num_experts - 1), weights.to(x.dtype))


def too_many_tokens(rank: int, most: int) -> list[tuple[str, int, str]]:
    """Run three steps, the second with too many tokens on rank 0. Return what y holds, the warnings, and `check`."""
    from torch.distributed.device_mesh import init_device_mesh

    from raymoe.errors import DataRefused
    from raymoe.integrations.transformers import register

    torch.cuda.set_device(rank)
    ep_mesh: Any = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("ep",))
    alone = init_device_mesh("cuda", (RANKS, 1), mesh_dim_names=("dp", "tp"))["tp"]
    experts = Skipping(torch.rand(EXPERTS // RANKS, HIDDEN, device="cuda", dtype=torch.bfloat16) + 0.5)
    found = []
    with register(tokens=most, timeout_s=30) as registration:
        made = registration._implementation(experts, ep_mesh, alone)
        for step in range(3):
            tokens = most + 3 if step == 1 and rank == 0 else most - 1
            x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            weights, ids = torch.rand(tokens, EXPERTS, device="cuda").topk(2)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                y = made(x, ids, weights)
            y.float().sum().backward()
            assert y.shape == x.shape and x.grad is not None and x.grad.shape == x.shape
            holds = "numbers" if bool(y.isfinite().all() and x.grad.isfinite().all()) else "other"
            holds = "NaN" if bool(y.isnan().all()) else holds
            said = ""
            try:
                registration.check()
            except DataRefused as error:
                said = str(error)
            found.append((holds, len([each for each in caught if "refuse this step" in str(each.message)]), said))
    return found


@pytest.mark.parametrize("most", [6, 300])
def test_all_ranks_refuse_the_step_of_one_with_too_many_tokens_and_the_next_one_works(
    most: int, tmp_path: Path
) -> None:
    told = f"num_tokens is {most + 3} on rank 0; x has {most} rows, so 0 to {most} can be sent"
    for rank, (first, second, third) in enumerate(
        torchrun(RANKS, tmp_path, "cpu:gloo,cuda:nccl", too_many_tokens, most)
    ):
        assert first == third == ("numbers", 0, "")
        assert second == ("NaN", int(rank == 0), f"{told}: make the exchange with more tokens")
