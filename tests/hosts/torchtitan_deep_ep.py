"""torchtitan's own DeepEP dispatcher over raymoe's `deep_ep`, beside torchtitan's all-to-all, on CPU ranks.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.hosts.torchtitan_deep_ep

Rank 0 prints a line of JSON for all ranks: the largest differences for each kind of activation checkpointing (the
compact layout), and `inference` (the expanding layout), with the dispatches of each.
"""

from __future__ import annotations

import json
import warnings
from typing import Any
from unittest import mock

import torchtitan_on_ray.cpu  # noqa: F401 - before the other modules of torchtitan

import tests.hosts.deep_ep_installed as installed

# isort: split
import torch
import torch.distributed as dist
from torchtitan.distributed.deepep import deepep
from torchtitan.models.common.token_dispatcher import DeepEPTokenDispatcher
from torchtitan.models.qwen3 import model_registry

from tests.hosts import torchtitan_model
from tests.hosts.torchtitan_model import BATCH, LENGTH, OWN, STEPS, Case, build, step

ElasticBuffer = installed.ElasticBuffer

# torchtitan registers these two for CUDA alone.
deepep._lib.impl("dispatch", deepep._dispatch_op_impl, "CPU")
deepep._lib.impl("combine", deepep._combine_op_impl, "CPU")


def build_deep_ep(case: Case, captured: bool) -> torch.nn.Module:
    """Build the model with torchtitan's DeepEP dispatcher; `captured` takes the expanding layout in inference."""

    def registry(*arguments: Any, moe_comm_backend: str, **given: Any) -> Any:
        assert moe_comm_backend == "standard"
        spec = model_registry(*arguments, moe_comm_backend="deepep", **given)
        for layer in spec.model.layers:
            config = getattr(getattr(layer, "moe", None), "routed_experts", None)
            if config is not None:
                assert isinstance(config.token_dispatcher, DeepEPTokenDispatcher.Config)
                config.token_dispatcher.cudagraphable = captured
        return spec

    with mock.patch.object(torchtitan_model, "model_registry", registry):
        model, _ = build(case, OWN)
    dispatchers: list[Any] = [each.token_dispatcher for each in model.modules() if hasattr(each, "token_dispatcher")]
    dispatchers = [each for each in dispatchers if isinstance(each, DeepEPTokenDispatcher)]
    assert len(dispatchers) == 2, "both layers have torchtitan's DeepEP dispatcher"
    for dispatcher in dispatchers:
        dispatcher.init_buffer()
    return model


def tokens_of_rank() -> torch.Tensor:
    source = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, 2048, (BATCH, LENGTH), generator=source)


def counting() -> Any:
    """Record the layouts of dispatches, and let them happen."""
    real: Any = ElasticBuffer.dispatch

    def dispatch(self: ElasticBuffer, *arguments: Any, **options: Any) -> Any:
        dispatch.layouts.append("expanding" if options.get("do_expand") else "compact")  # type: ignore[attr-defined]
        return real(self, *arguments, **options)

    dispatch.layouts = []  # type: ignore[attr-defined]
    return dispatch


def train(kinds: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Compare logits, loss and gradients after some steps with those of the all-to-all without checkpointing."""
    model, found = build(Case("none", 1), OWN)[0], {}
    for _ in range(STEPS):
        own = step(model, tokens_of_rank())
    for kind in kinds:
        model, dispatch = build_deep_ep(Case(kind, 1), captured=False), counting()
        with mock.patch.object(ElasticBuffer, "dispatch", dispatch):
            for _ in range(STEPS):
                ours = step(model, tokens_of_rank())
        assert own.keys() == ours.keys()
        found[kind] = {
            "difference": max(float((ours[name] - own[name]).abs().max()) for name in own),
            "gradients": len(own) - 2,
            "layouts": sorted(set(dispatch.layouts)),
            "dispatches": len(dispatch.layouts),
        }
    return found


def infer() -> dict[str, Any]:
    """Compare logits without gradients: torchtitan takes the expanding layout, without a wait of the host."""
    tokens, case = tokens_of_rank(), Case("none", 1)
    positions = torch.arange(LENGTH).expand_as(tokens)
    with torch.no_grad():
        wanted = build(case, OWN)[0](tokens, positions)
        dispatch = counting()
        with mock.patch.object(ElasticBuffer, "dispatch", dispatch):
            found = build_deep_ep(case, captured=True)(tokens, positions)
    difference = float((found - wanted).abs().max())
    return {"difference": difference, "layouts": dispatch.layouts, "largest": float(wanted.abs().max())}


def main() -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    found = train(("none", "full")) | {"inference": infer()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
