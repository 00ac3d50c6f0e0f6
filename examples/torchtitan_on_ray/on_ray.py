"""Joins torchtitan's trainer to Ray Train: experts by raymoe, every step reported, checkpoints that Ray knows."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import ray.train
import torch

if not torch.cuda.is_available():
    from torchtitan_on_ray import cpu  # before the other modules of torchtitan

from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import BaseLogger
from torchtitan.trainer import Trainer

RAYMOE = ("raymoe.integrations.torchtitan.dispatcher", "raymoe.integrations.torchtitan.selective_ac")
ON_CPU = ("torchtitan_on_ray.cpu.sdpa",)


class LastMetrics(BaseLogger):
    """Keeps what torchtitan logs of a step until the step is reported."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Take the metrics of a step."""
        self.metrics = {**metrics, "step": step}

    def close(self) -> None:
        """Close nothing."""


class ReportedCheckpoints(CheckpointManager):
    """Saves as torchtitan does, and reports steps to Ray Train, with the checkpoint if one was saved.

    torchtitan writes into the directory of the Ray Train run, so Ray copies nothing. Ray counts a checkpoint once all
    workers have reported it: one that a death interrupted is never loaded.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The options of torchtitan's own."""

        report_every: int = 4
        """Steps in one report. Ray Train takes a report of all ranks every two seconds, and ranks wait for that."""

    step_facts: Callable[[], dict[str, Any]]
    """Describes the step that has ended, on this rank. The trainer sets it."""

    def __init__(self, config: Any, **parts: Any) -> None:
        super().__init__(config, **parts)
        self.report_every, self.unreported = config.report_every, list[dict[str, Any]]()

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self.unreported.append(self.step_facts())
        saved: bool = super()._save(curr_step, last_step)
        if saved:
            self.maybe_wait_for_saving()
        if saved or last_step or len(self.unreported) >= self.report_every:
            ray.train.report(
                {"steps": self.unreported},
                checkpoint=ray.train.Checkpoint(self._create_checkpoint_id(curr_step)) if saved else None,
                checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
            )
            self.unreported = []
        return saved


class TrainerOnRay(Trainer):
    """torchtitan's trainer, which also counts the tokens of each expert."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """The options of torchtitan's own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if self.device.type == "cpu":
            for part in self.model_parts:
                cpu.sum_without_scale(part)
        self.layers = [module for part in self.model_parts for module in part.modules() if _is_moe(module)]
        self.load: list[list[float]] = []
        self.last = self.metrics_processor.logger = LastMetrics()
        self.checkpointer.step_facts = self._facts
        self.began = time.monotonic()

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Train a step, with counts of this step alone."""
        for layer in self.layers:
            _local(layer.tokens_per_expert_E).zero_()  # where torchtitan balances, it does so too
        super().train_step(data_iterator)

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        """Read the counts of experts, which torchtitan's optimizer sets to zero."""
        loss: torch.Tensor = super().forward_backward_step(**batch)
        self.load = [_local(layer.tokens_per_expert_E).tolist() for layer in self.layers]
        return loss

    def _facts(self) -> dict[str, Any]:
        logged, began, self.began = self.last.metrics, self.began, time.monotonic()
        return {
            "step": self.step,
            "loss": logged.get("loss_metrics/global_avg_loss"),
            "grad_norm": logged.get("grad_norm"),
            "tokens": self.ntokens_seen,
            "seconds": self.began - began,
            "load": self.load,
            "host": socket.gethostname(),
            "process": os.getpid(),
        }


def _is_moe(module: Any) -> bool:
    return hasattr(module, "tokens_per_expert_E") and hasattr(module, "routed_experts")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_ray(config: Trainer.Config, ranks: int, folder: str, step: int | None) -> Any:
    """Change a config of torchtitan: experts by raymoe on all ranks, files in `folder`, the checkpoint of `step`."""
    if not isinstance(config.checkpoint, CheckpointManager.Config):
        raise ValueError(f"checkpoint is {type(config.checkpoint).__qualname__}, this example needs torchtitan's DCP")
    config.dump_folder = folder
    config.metrics.log_freq = 1
    config.metrics.disable_color_printing = True
    if config.parallelism.expert_parallel_degree == 1:
        config.parallelism.expert_parallel_degree = ranks
    named = {entry if isinstance(entry, str) else entry[0] for entry in config.override.imports}
    added = (*RAYMOE, *(() if torch.cuda.is_available() else ON_CPU))
    config.override.imports += [name for name in added if name not in named]
    config.checkpoint = _derived(config.checkpoint, ReportedCheckpoints.Config)
    config.checkpoint.enable = True
    config.checkpoint.keep_latest_k = 0  # Ray Train removes old ones
    config.checkpoint.last_save_model_only = False
    config.checkpoint.load_step = -1 if step is None else step
    return _derived(config, TrainerOnRay.Config)


def _derived(config: Any, kind: Any) -> Any:
    return kind(**{item.name: getattr(config, item.name) for item in fields(config)})
