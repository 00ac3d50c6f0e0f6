"""Fine-tune the model of examples/transformers_moe.py with Trainer, and write what it learned.

python -m torch.distributed.run … -m tests.hosts.transformers_train FOLDER

On two ranks experts are spread by raymoe. On one rank the model is whole, and its batch is that of both ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3MoeForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from examples.transformers_moe import CONFIG, write_model
from raymoe.integrations.transformers import register

STEPS, BATCH, LENGTH = 4, 4, 12


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that a model can learn: each token is the one before plus a step, which depends on the sentence."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = LENGTH - index % 3  # the shorter ones are padded
        ids = 1 + (7 * index + (index % 5 + 1) * torch.arange(LENGTH)) % (CONFIG.vocab_size - 1)
        there = torch.arange(LENGTH) < length
        return {"input_ids": ids * there, "attention_mask": there.long(), "labels": ids.masked_fill(~there, -100)}


def train(model: Any, folder: Path, ranks: int) -> dict[str, Any]:
    """Train some steps, and save the model."""
    arguments = TrainingArguments(
        output_dir=str(folder / f"trained-{ranks}"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // ranks,
        learning_rate=0.5,
        optim="sgd",  # Adam makes a step of any gradient, however small
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    trainer = Trainer(model, arguments, train_dataset=Sentences())
    trainer.train()
    trainer.save_model()
    return {"losses": [line["loss"] for line in trainer.state.log_history if "loss" in line]}


def main(folder: Path) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks == 1:
        write_model(folder / "model")
        model = Qwen3MoeForCausalLM.from_pretrained(folder / "model")
        found = train(model, folder, ranks)
    else:
        dist.init_process_group("gloo")
        with register(tokens=64):
            config = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="raymoe")
            model = Qwen3MoeForCausalLM.from_pretrained(folder / "model", distributed_config=config)
            found = train(model, folder, ranks)
        dist.barrier()
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
