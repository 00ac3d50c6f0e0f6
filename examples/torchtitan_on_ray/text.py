"""Makes a data set and a tokenizer of text files: wheels of torchtitan have neither."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 2048  # that of torchtitan's debug models


@dataclass(frozen=True)
class Text:
    """The folders that torchtitan reads. All workers must be able to read them."""

    data: Path
    tokenizer: Path


def prepare(files: Iterable[Path], folder: Path, vocabulary: int = VOCABULARY) -> Text:
    """Write the paragraphs of files as a data set, and a byte-pair tokenizer of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    paragraphs = [part for file in sorted(files) for part in re.split(r"\n\s*\n", file.read_text()) if part.strip()]
    text = Text(folder / "data", folder / "tokenizer")
    for path in (text.data, text.tokenizer):
        path.mkdir(parents=True, exist_ok=True)
    (text.data / "data.json").write_text("".join(json.dumps({"text": part}) + "\n" for part in paragraphs))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(paragraphs, trainer)
    tokenizer.save(str(text.tokenizer / "tokenizer.json"))
    (text.tokenizer / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": special[0], "eos_token": special[1]})
    )
    return text
