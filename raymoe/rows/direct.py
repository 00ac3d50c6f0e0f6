"""Decide whether a call may launch its kernel without torch's dispatcher, which costs more than the launch.

The compiler, `torch.func`, dispatch modes, subclasses of tensors and the profiler see a function only if it is an
operator of torch.library. Where none of them looks, the functions over rows compute directly; else they call their
operators. Results are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raymoe.errors import ConfigError

_C: Any = torch._C
_PLAIN = (Tensor, nn.Parameter)
_modes, _function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_transforms, _tracing = _C._are_functorch_transforms_active, _C._get_tracing_state
_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_is_wrapped = _C._functorch.is_functorch_wrapped_tensor
_kinds = _C._functorch.TransformType


def directly(*tensors: Tensor) -> bool:
    """Whether a function of these tensors may compute without its operator."""
    refuse_derivatives("a function over rows")
    if torch.compiler.is_compiling():
        return False
    if _modes() or _function_modes() or _transforms() or _profiling() or _tracing() is not None:
        return False
    for tensor in tensors:
        # The dispatcher resolves a negative bit, a zero tensor, and wrappers that a transform has left.
        if type(tensor) not in _PLAIN or tensor.is_neg() or tensor._is_zerotensor() or _is_wrapped(tensor):
            return False
    return True


def backward_directly(*tensors: Tensor) -> bool:
    """Whether a gradient may be computed from these tensors without its operator.

    A gradient that is differentiated again goes to the operator, which refuses it. The forward call may have gone
    through the operator because of what a tensor is, so callers give the saved tensors too.
    """
    return not torch.is_grad_enabled() and directly(*tensors)


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether the result of a function of these tensors has a gradient."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return False


def refuse_derivatives(what: str) -> None:
    """Raise inside torch.func.grad, vjp and jvp. Operators have no rule for them, and jvp would give zero tangents."""
    if not _transforms():
        return
    compiling = torch.compiler.is_compiling()  # Dynamo knows the innermost transform only
    levels = [_C._functorch.peek_interpreter_stack()] if compiling else _C._functorch.get_interpreter_stack()
    if any(level.key() in (_kinds.Grad, _kinds.Jvp) for level in levels):
        raise ConfigError(
            f"{what} inside torch.func.grad, vjp or jvp, for which it has no rule; call torch.autograd.grad or backward"
        )


class Computation(torch.autograd.Function):
    """A function that computes directly, with its gradients.

    `of` takes the place of `apply`, which also handles transforms of torch.func and default arguments, for 2 us.
    """

    @classmethod
    def of(cls, *arguments: Any) -> Any:
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]
