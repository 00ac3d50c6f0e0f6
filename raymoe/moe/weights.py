"""Seeded random numbers, and the weights of experts made from them, which any rank can make again.

Weights are drawn on the device that needs them: a CPU takes too long for the experts of a large layer, 5.6 billion
numbers on each of two ranks for DeepSeek-V3.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


def generator(purpose: str, *key: int, device: torch.device | None = None) -> torch.Generator:
    """Make a generator from (purpose, key). Generators of different keys are independent.

    Every CPU draws the same numbers for a key. Every GPU draws the same numbers, which differ from those of a CPU.

    >>> a, b = generator("tokens", 0, 1), generator("tokens", 0, 1)
    >>> bool(torch.equal(torch.rand(4, generator=a), torch.rand(4, generator=b)))
    True
    """
    text = "/".join((purpose, *map(str, key)))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator(device or torch.device("cpu")).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass(frozen=True)
class ExpertWeights:
    """`gate_up`[2F, H] and `down`[H, F]. Rows are outputs.

    With columns as outputs, oneDNN is 200 times slower on bfloat16 if the CPU has no bfloat16 instructions.
    """

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of one expert, and the dtype that its weights are rounded to."""

    hidden: int
    ffn: int
    dtype: torch.dtype


def expert_weights(shape: ExpertShape, seed: int, expert: int, device: torch.device | None = None) -> ExpertWeights:
    """Draw normal weights that keep unit variance through each product, on a CPU unless `device` names another.

    >>> weights = expert_weights(ExpertShape(hidden=8, ffn=4, dtype=torch.bfloat16), seed=0, expert=3)
    >>> list(weights.gate_up.shape), list(weights.down.shape), weights.down.dtype
    ([8, 8], [8, 4], torch.bfloat16)
    """
    return mlp_weights(shape, generator("expert", seed, expert, device=device))


def expert_biases(shape: ExpertShape, seed: int, expert: int, device: torch.device | None = None) -> ExpertWeights:
    """Draw the biases of an expert's two products, [2F] and [H], a quarter as large as what they are added to.

    >>> [list(bias.shape) for bias in vars(expert_biases(ExpertShape(8, 4, torch.bfloat16), seed=0, expert=3)).values()]
    [[8], [8]]
    """
    source = generator("expert biases", seed, expert, device=device)
    gate_up, down = (normal(source, size) / 4 for size in (2 * shape.ffn, shape.hidden))
    return ExpertWeights(gate_up.to(shape.dtype), down.to(shape.dtype))


def mlp_weights(shape: ExpertShape, source: torch.Generator) -> ExpertWeights:
    """Draw the weights of one expert from a generator, on its device."""
    gate_up = normal(source, 2 * shape.ffn, shape.hidden) * shape.hidden**-0.5
    down = normal(source, shape.hidden, shape.ffn) * shape.ffn**-0.5
    return ExpertWeights(gate_up.to(shape.dtype), down.to(shape.dtype))


def normal(source: torch.Generator, *size: int) -> torch.Tensor:
    """Draw float32 numbers on the generator's device, whatever torch's defaults are."""
    return torch.randn(size, generator=source, dtype=torch.float32, device=source.device)
