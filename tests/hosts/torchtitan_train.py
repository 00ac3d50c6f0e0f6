"""torchtitan's own trainer on CPU ranks, on text and a tokenizer that are made here: wheels of torchtitan have none.

python -m tests.hosts.torchtitan_train make FOLDER
python -m torch.distributed.run … -m tests.hosts.torchtitan_train --hf_assets_path FOLDER/tokenizer …
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torchtitan_on_ray.cpu as on_cpu  # before the other modules of torchtitan

SENTENCE = "the rank sends each token to its experts and every expert returns a row with one weight for that token"


def make(folder: Path) -> None:
    """Write a data set of sentences of these words, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    source = random.Random(0)
    lines = [" ".join(source.choices(SENTENCE.split(), k=200)) for _ in range(200)]
    data, own = folder / "text", folder / "tokenizer"
    data.mkdir()
    own.mkdir()
    (data / "data.json").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(own / "tokenizer.json"))
    (own / "tokenizer_config.json").write_text(json.dumps({"bos_token": special[0], "eos_token": special[1]}))


def train() -> None:
    """Run torchtitan's main function on this rank."""
    from torchtitan.train import main
    from torchtitan.trainer import Trainer

    real: Any = Trainer.__init__

    def init(self: Trainer, config: Any) -> None:
        real(self, config)
        for part in self.model_parts:
            on_cpu.sum_without_scale(part)

    Trainer.__init__ = init  # type: ignore[method-assign]
    main()


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        train()
