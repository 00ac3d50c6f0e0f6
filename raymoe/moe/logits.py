"""The logits of a router: its rows times its weight, float32 for any dtype of both.

On GPUs rows of bfloat16 go through the tensor cores, which multiply bfloat16 exactly and add in float32. There a
float32 number is the sum of two bfloat16 numbers, which hold 16 of its bits. The logits are as exact with them as with
a weight of bfloat16: the sum over the columns rounds more.

docs/evidence/experiments/router_logits.md has the times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raymoe.rows.operator_definitions import define

FEW = 512
"""The rows from which on it pays to split float32 numbers. Products of fewer rows stay in float32."""


def logits_of(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply `x[T, H]` by `weight[E, H]`, add `bias[E]`, and return float32[T, E], with gradients for all three."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # it would multiply in 16 bits
        with torch.autocast(kind, enabled=False):
            return logits_of(x, weight, bias)
    if x.device.type == "cpu":
        return nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    logits: Tensor = _ops.router_logits(x, weight)
    return logits if bias is None else logits + bias.float()


# The operators of GPUs.

_SCHEMAS = {
    "router_logits": "(Tensor x, Tensor weight) -> Tensor",
    "router_logits_backward": "(Tensor dlogits, Tensor x, Tensor weight) -> (Tensor dx, Tensor dweight)",
}
define(_SCHEMAS)
_ops: Any = torch.ops.raymoe


@torch.library.impl("raymoe::router_logits", ("cpu", "cuda"))
def _router_logits(x: Tensor, weight: Tensor) -> Tensor:
    if not _by_tensor_cores(x, weight, split=weight.dtype == torch.float32):
        return nn.functional.linear(x.float(), weight.float())
    if weight.dtype == torch.bfloat16:
        return product(x, weight.T)
    return product(x, torch.cat(halves(weight)).T).view(len(x), 2, len(weight)).sum(dim=1)


@torch.library.impl("raymoe::router_logits_backward", ("cpu", "cuda"))
def _router_logits_backward(dlogits: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if not _by_tensor_cores(x, weight, split=True):
        return (dlogits @ weight.float()).to(x.dtype), (dlogits.T @ x.float()).to(weight.dtype)
    high, low = halves(dlogits)
    if weight.dtype == torch.bfloat16:
        dx = torch.cat((high, low), dim=1) @ torch.cat((weight, weight))
    else:
        of_weight = halves(weight)
        dx = torch.cat((high, low, high), dim=1) @ torch.cat((of_weight[0], *of_weight))
    dweight = product(torch.cat((high, low), dim=1).T, x).view(2, *weight.shape).sum(dim=0)
    return dx, dweight.to(weight.dtype)


def _by_tensor_cores(x: Tensor, weight: Tensor, *, split: bool) -> bool:
    """Whether tensor cores take these products; `split`: float32 numbers among them."""
    kinds = x.dtype == torch.bfloat16 and weight.dtype in (torch.bfloat16, torch.float32)
    return kinds and x.device.type == "cuda" and len(x) >= (FEW if split else 1)


def halves(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 numbers into two of bfloat16 whose sum they are, to 16 bits.

    >>> high, low = halves(torch.tensor([1.0, 3.14159265]))
    >>> (high.double() + low.double()).tolist()
    [1.0, 3.1415939331054688]
    """
    high = numbers.bfloat16()
    return high, (numbers - high).bfloat16()


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices of bfloat16 on a GPU into one of float32."""
    wide: Tensor = torch.mm(a, b, out_dtype=torch.float32)
    return wide


def _fake_logits(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


def _fake_backward(dlogits: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    del dlogits
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dlogits: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = _ops.router_logits_backward(dlogits.contiguous(), *ctx.saved_tensors)
    return gradients


torch.library.register_fake("raymoe::router_logits", _fake_logits)
torch.library.register_fake("raymoe::router_logits_backward", _fake_backward)
torch.library.register_autograd("raymoe::router_logits", _differentiate, setup_context=_save)
