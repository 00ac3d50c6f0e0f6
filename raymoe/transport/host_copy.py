"""Copies between heaps in host memory."""

from __future__ import annotations

import torch

from raymoe.job.errors import ConfigError


def copy(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into memory of the same shape and dtype: here, or a peer's."""
    if into.shape != source.shape or into.dtype != source.dtype:
        there, here = f"{into.dtype} {list(into.shape)}", f"{source.dtype} {list(source.shape)}"
        raise ConfigError(f"{here} to be copied into {there}; both ends need one shape and dtype")
    into.copy_(source)
