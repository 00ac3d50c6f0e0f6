"""The config of the example, which torchtitan finds by `--module torchtitan_on_ray --config small`."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    from torchtitan_on_ray import cpu  # noqa: F401  before the other modules of torchtitan

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer

LAYERS, FFN = 2, 64


def small() -> Trainer.Config:
    """Return torchtitan's smallest Qwen3-MoE with fewer layers and smaller experts: a checkpoint has 120 MB."""
    config = qwen3_moe_debug()
    assert isinstance(config.loss, ChunkedLossWrapper.Config) and config.model_spec is not None
    model = config.model_spec.model
    model.layers = model.layers[:LAYERS]
    for layer in model.layers:
        layer.moe.routed_experts.inner_experts.hidden_dim = FFN
        layer.moe.load_balance_coeff = 2e-3
    config.optimizer.param_groups[0].optimizer_kwargs["lr"] = 2e-3
    config.lr_scheduler.warmup_steps = 4
    config.training.steps = 24
    config.training.seq_len = 128
    config.training.local_batch_size = 2
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # the others fail in FSDP with torch 2.13
    config.checkpoint.interval = 8
    config.debug.seed = 0  # torchtitan's own choice differs from run to run
    return config
