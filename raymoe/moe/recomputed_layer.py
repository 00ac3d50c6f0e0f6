"""Call a whole layer once more in the backward pass, by torch's activation checkpointing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from raymoe.errors import ConfigError


def check_recompute(kind: str) -> None:
    """Refuse what `LayerForm.recompute` cannot be."""
    if kind not in ("nothing", "activation", "all"):
        raise ConfigError(f"recompute is {kind!r}; it is 'nothing', 'activation' or 'all'")


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, and keep its arguments alone: the backward pass calls it again."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if torch.compiler.is_compiling():
        options["context_fn"] = _CONTEXTS
    return checkpoint(function, *arguments, **options)


def _save_combines(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Never compute a combine again. A compiler decides by sizes, which differ from rank to rank."""
    del context
    save = operator is torch.ops.raymoe.combine.default
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


_CONTEXTS = functools.partial(create_selective_checkpoint_contexts, _save_combines)
