"""Arguments of dispatch and combine, checked before anything is sent: a peer must never learn of a caller's mistake."""

from __future__ import annotations

import torch

from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.spec import ExchangeSpec
from raymoe.job.errors import ConfigError


def check_tensor(name: str, tensor: object, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> torch.Tensor:
    """A contiguous CPU tensor of this shape (None: any) and one of these dtypes."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name} is a {type(tensor).__name__}; a tensor is needed")
    if tensor.device.type != "cpu":
        raise ConfigError(f"{name} is on {tensor.device}; this world's ranks are on cpu")
    if tensor.dtype not in dtypes:
        raise ConfigError(f"{name} is {tensor.dtype}; {' or '.join(str(dtype) for dtype in dtypes)} is needed")
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(want not in (None, have) for want, have in zip(shape, found, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ConfigError(f"{name} has shape {list(found)}; [{wanted}] is needed")
    if not tensor.is_contiguous():
        raise ConfigError(f"{name} has strides {tensor.stride()}; it must be contiguous: call .contiguous()")
    return tensor


def check_dispatch(
    spec: ExchangeSpec, x: object, topk_idx: object, topk_weights: object, num_tokens: int | torch.Tensor | None
) -> int:
    """How many tokens of `x` are to be sent."""
    rows = len(check_tensor("x", x, (None, spec.hidden), getattr(torch, spec.dtype)))
    if rows > spec.tokens:
        raise ConfigError(f"x has {rows} rows; this exchange was made for at most {spec.tokens} tokens a rank")
    check_tensor("topk_idx", topk_idx, (rows, spec.topk), torch.int32, torch.int64)
    check_tensor("topk_weights", topk_weights, (rows, spec.topk), torch.float32)
    if num_tokens is None:
        return rows
    if isinstance(num_tokens, torch.Tensor):
        num_tokens = int(check_tensor("num_tokens", num_tokens, (1,), torch.int32).item())
    if type(num_tokens) is not int or not 0 <= num_tokens <= rows:
        raise ConfigError(f"num_tokens is {num_tokens!r}; x has {rows} rows, so 0 to {rows} can be sent")
    return num_tokens


def check_out(spec: ExchangeSpec, out: object, rows: int) -> None:
    """Memory that the caller gives for `rows` rows."""
    tensor = check_tensor("out", out, (rows, spec.hidden), getattr(torch, spec.dtype))
    if tensor.requires_grad:
        raise ConfigError("out requires grad; memory to be written over cannot")


def check_combine(spec: ExchangeSpec, rows: object, got: object, exchange: object, capacity: int) -> None:
    if not isinstance(got, Dispatched):
        raise ConfigError(f"got is a {type(got).__name__}; combine takes what dispatch gave")
    if got._owner is not exchange:
        raise ConfigError("got comes from another exchange; combine takes what this exchange's dispatch gave")
    check_tensor("rows", rows, (capacity, spec.hidden), getattr(torch, spec.dtype))
