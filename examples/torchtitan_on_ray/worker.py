"""Runs in each worker of Ray Train: torchtitan's trainer, from the checkpoint that Ray Train names."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

import ray.train
import torch.distributed as dist


def train(settings: dict[str, Any]) -> None:
    """Train to the last step. Ray Train has made the process group, which torchtitan and raymoe use."""
    from torchtitan_on_ray import on_ray  # first: it prepares torchtitan for machines without GPUs
    from torchtitan.config import ConfigManager  # isort: skip
    from torchtitan.tools.logging import init_logger, logger

    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    init_logger()
    for handler in logger.handlers:
        handler.addFilter(_tells_more_than_reports)
    if rank > 0:
        logger.setLevel(logging.WARNING)
    print(f"rank {rank} of {ranks} is process {os.getpid()} on {socket.gethostname()}", flush=True)
    checkpoint = ray.train.get_checkpoint()
    step = None if checkpoint is None else int(Path(checkpoint.path).name.removeprefix("step-"))
    if rank == 0:
        print("from the beginning" if step is None else f"from the checkpoint of step {step}", flush=True)
    config = ConfigManager().parse_args(settings["arguments"])
    folder = context.get_storage().experiment_fs_path
    trainer = on_ray.on_ray(config, ranks, folder, step).build()
    try:
        trainer.train()
    finally:
        trainer.close()
        dist.destroy_process_group()


def _tells_more_than_reports(record: logging.LogRecord) -> bool:
    """Keep Ray Train's line for each report, with all of its numbers, out of the log."""
    return record.levelno >= logging.WARNING or "ray" not in Path(record.pathname).parts
