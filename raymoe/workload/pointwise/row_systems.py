"""The systems that workload pointwise measures: raymoe, its baseline, torch, other libraries, and a copy.

Each entry of SYSTEMS makes a function of no arguments from a task. The function computes on the current stream and
returns the results in the order of `RowOperation.written`; a quantised result is two: values and scales. A system that
has no such operation, or that is not installed, raises `Unavailable` with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from raymoe.errors import RaymoeError
from raymoe.fp8 import quantise
from raymoe.rows import (  # noqa: F401  (three of them register the operators)
    activation,
    elementwise,
    elementwise_kernels,
    formulas,
    norm,
    norm_kernels,
    row_launch,
)
from raymoe.rows.pipe_shape import Limits
from raymoe.workload.pointwise.operations import EPS, EXPRESSION, OPERATIONS, RowSizes, Tensors

Results = tuple[Tensor, ...]
Compute = Callable[[], Results]


class Unavailable(RaymoeError):  # noqa: N818 - it says what happened
    """A system cannot compute an operation here. The message says why."""


@dataclass(frozen=True)
class Task:
    """An operation on these tensors. `sms` and `stages` are for raymoe's kernels; None: chosen by them."""

    op: str
    tensors: Tensors
    sizes: RowSizes
    sms: int | None = None
    stages: int | None = None

    @property
    def on_gpu(self) -> bool:
        return next(iter(self.tensors.values())).device.type == "cuda"

    @property
    def given(self) -> list[Tensor]:
        """The tensors in the order of `RowOperation.tensors`."""
        return [self.tensors[name] for name in OPERATIONS[self.op].tensors]

    @property
    def nbytes(self) -> int:
        return OPERATIONS[self.op].nbytes(self.sizes)


# raymoe: by its operators, or by its kernels where the task asks for stages or another way of loading.

Via = Callable[[Any, Tensors, Any], Any]
"""Computes by the functions of `torch.ops.raymoe` or of a module of kernels. The last argument of these is the number
of SMs or the limits."""

_VIA: dict[str, Via] = {
    "rms_norm": lambda via, t, last: via.rms_norm(t["x"], None, t["weight"], EPS, last)[:1],
    "add_rms_norm": lambda via, t, last: via.rms_norm(t["x"], t["residual"], t["weight"], EPS, last),
    "layer_norm": lambda via, t, last: via.layer_norm(t["x"], t["weight"], t["bias"], EPS, last),
    "swiglu": lambda via, t, last: via.swiglu(t["gate_up"], None, last),
    "swiglu_experts": lambda via, t, last: via.swiglu(t["gate_up"], t["offsets"], last),
    "pointwise": lambda via, t, last: via.pointwise(EXPRESSION, "a,b,c", [t["a"], t["b"], t["c"]], last),
    "rms_norm_fp8": lambda via, t, last: via.rms_norm_fp8(t["x"], None, t["weight"], EPS, False, last)[:2],
    "add_rms_norm_fp8": lambda via, t, last: via.rms_norm_fp8(t["x"], t["residual"], t["weight"], EPS, False, last),
    "layer_norm_fp8": lambda via, t, last: via.layer_norm_fp8(t["x"], t["weight"], t["bias"], EPS, False, last),
    "swiglu_fp8": lambda via, t, last: via.swiglu_fp8(t["gate_up"], None, False, last),
    "rms_norm_backward": lambda via, t, last: via.rms_norm_backward(t["dy"], None, t["x"], t["weight"], EPS, last),
    "add_rms_norm_backward": lambda via, t, last: via.rms_norm_backward(
        t["dy"], t["dtotal"], t["x"], t["weight"], EPS, last
    ),
    "layer_norm_backward": lambda via, t, last: via.layer_norm_backward(t["dy"], t["x"], t["weight"], EPS, last),
    "swiglu_backward": lambda via, t, last: via.swiglu_backward(t["activated"], t["gate_up"], None, last),
}


def _raymoe(task: Task) -> Compute:
    if task.stages is None:
        return _ours(task, torch.ops.raymoe, task.sms)
    return _ours(task, _kernels_of(task), Limits(task.sms, task.stages))


def _in_turn(task: Task) -> Compute:
    """The same kernel, but each block loads one tensor at a time and waits for it: the baseline of the pipeline."""
    _need_kernels(task)
    return _ours(task, _kernels_of(task), Limits(task.sms, loading="IN_TURN"))


def _kernels_of(task: Task) -> Any:
    return norm_kernels if "norm" in task.op else elementwise_kernels


def _ours(task: Task, via: Any, last: object) -> Compute:
    function, tensors = _VIA[task.op], task.tensors
    return lambda: _as_tuple(function(via, tensors, last))


def _as_tuple(found: Tensor | Results) -> Results:
    return (found,) if isinstance(found, Tensor) else found


def _need_kernels(task: Task) -> None:
    if not row_launch.takes(task.given[0]):
        raise Unavailable("raymoe's kernels need a GPU of compute capability 9.0 or newer")


# torch: as somebody would write it, and the formulas through torch.compile.


def _eager(task: Task) -> Compute:
    given, operation = task.given, OPERATIONS[task.op]
    if operation.quantised:
        return lambda: _formula(task.op, given)
    plain = _PLAIN[task.op.removesuffix("_backward").removesuffix("_experts")]
    if not operation.outgoing:
        return lambda: plain(*given)
    if task.op == "add_rms_norm_backward":
        plain = _PLAIN["norm_of_total"]
    return _backward_of(plain, given, len(operation.outgoing))


def _backward_of(plain: Callable[..., Results], given: list[Tensor], outgoing: int) -> Compute:
    """Compute forward once, and backward at each call."""
    leaves = [each.detach().requires_grad_() for each in given[outgoing:]]
    results = plain(*leaves)
    return lambda: torch.autograd.grad(results, leaves, given[:outgoing], retain_graph=True)


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, EPS)


def _plain_add(x: Tensor, residual: Tensor, weight: Tensor) -> Results:
    total = x + residual
    return _plain_norm(total, weight), total


def _plain_swiglu(gate_up: Tensor) -> Results:
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.silu(gate) * up,)


_PLAIN: dict[str, Callable[..., Results]] = {
    "rms_norm": lambda x, weight: (_plain_norm(x, weight),),
    "norm_of_total": lambda x, weight: (_plain_norm(x, weight), x.clone()),
    "add_rms_norm": _plain_add,
    "layer_norm": lambda x, weight, bias: (functional.layer_norm(x, x.shape[-1:], weight, bias, EPS),),
    "swiglu": _plain_swiglu,
    "pointwise": lambda a, b, c: (functional.silu(a) * b + c,),
}


def _formula(op: str, given: list[Tensor]) -> Results:
    """Compute an operation by the formulas, in a form that torch.compile fuses."""
    dtype = given[0].dtype
    total: Results = ()
    if op.startswith("add_rms_norm") and not op.endswith("backward"):
        total = ((given[0].float() + given[1].float()).to(dtype),)
        given = [total[0], given[2]]
    if op == "add_rms_norm_backward":
        dy, dtotal, *rest = given
        dx, dweight = formulas.rms_norm_backward(dy, rest[0], rest[1], EPS)
        return (dx + dtotal.float()).to(dtype), dweight.to(dtype)
    if op == "layer_norm_backward":
        given = given[:3]  # no gradient depends on the bias
    name = op.removeprefix("add_").removesuffix("_fp8").removesuffix("_experts")
    eps = () if name.startswith("swiglu") or name == "pointwise" else (EPS,)
    made = _silu_mul_add(*given) if name == "pointwise" else getattr(formulas, name)(*given, *eps)
    if op.endswith("_fp8"):
        return *quantise(made), *total
    results = made if isinstance(made, tuple) else (made,)
    return *(each.to(dtype) for each in results), *total


def _silu_mul_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return functional.silu(a.float()) * b.float() + c.float()


def _compiled(task: Task) -> Compute:
    _need_gpu(task, "torch.compile")
    given, op = task.given, task.op
    torch.compiler.reset()  # torch gives up on a function that it has compiled for eight shapes
    options: dict[str, Any] = {"compile_threads": 1}  # else torch starts processes, which nobody here would end
    compiled = torch.compile(
        lambda *tensors: _formula(op, list(tensors)), fullgraph=True, dynamic=False, options=options
    )
    return lambda: compiled(*given)


def _need_gpu(task: Task, name: str) -> None:
    if not task.on_gpu:
        raise Unavailable(f"{name} is compared on GPUs only")


# Other systems. Their backward runs by autograd.


def _liger(task: Task) -> Compute:
    _need_gpu(task, "Liger")
    base = task.op.removesuffix("_backward")
    where = {
        "rms_norm": ("rms_norm", "LigerRMSNormFunction"),
        "add_rms_norm": ("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"),
        "layer_norm": ("layer_norm", "LigerLayerNormFunction"),
        "swiglu": ("swiglu", "LigerSiLUMulFunction"),
    }
    if base not in where or task.op in ("add_rms_norm_backward", "swiglu_backward"):
        raise Unavailable(f"Liger has no {task.op} of these tensors")
    module, name = where[base]
    function = getattr(_imported(f"liger_kernel.ops.{module}", "Liger"), name).apply
    if base == "swiglu":  # it takes two tensors
        gate, up = (half.contiguous() for half in task.given[0].chunk(2, dim=-1))
        return lambda: (function(gate, up),)
    calls: dict[str, Callable[..., Results]] = {
        # By default its backward writes over the gradient that it gets, and a replay would read that.
        "rms_norm": lambda x, weight: (function(x, weight, EPS, 0.0, "llama", False),),
        "add_rms_norm": lambda x, residual, weight: function(x, residual, weight, EPS, 0.0, "llama", False)[:2],
        "layer_norm": lambda x, weight, bias: (function(x, weight, bias, EPS),),
    }
    return _by(task, calls[base])


def _quack(task: Task) -> Compute:
    _need_gpu(task, "Quack")
    if task.op not in ("rms_norm", "rms_norm_backward", "add_rms_norm", "layer_norm"):
        raise Unavailable(f"Quack has no {task.op} of these tensors")
    quack = _imported("quack.rmsnorm", "Quack")
    if task.op == "layer_norm":
        x, weight, bias = task.given[0], task.given[1].float(), task.given[2].float()  # it takes these as float32
        return lambda: (quack.layernorm_fwd(x, weight, bias, eps=EPS),)
    if task.op == "add_rms_norm":
        x, residual, weight = task.given
        return lambda: quack.rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)[:2]
    return _by(task, lambda x, weight: (quack.rmsnorm(x, weight, eps=EPS),))


def _by(task: Task, function: Callable[..., Results]) -> Compute:
    given, outgoing = task.given, len(OPERATIONS[task.op].outgoing)
    return _backward_of(function, given, outgoing) if outgoing else lambda: function(*given)


def _imported(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{name} cannot be imported: {error}") from error


# The copy: half of the bytes are read, half written.


def _copy(task: Task) -> Compute:
    source = torch.ones(task.nbytes // 2, dtype=torch.uint8, device=task.given[0].device)
    into = torch.empty_like(source)
    return lambda: (into.copy_(source),)


def _own_copy(task: Task) -> Compute:
    """raymoe's kernel of an expression that changes nothing. The bytes are those of whole rows."""
    _need_kernels(task)
    some, width = task.given[0], task.sizes.width
    rows = max(1, task.nbytes // (2 * width * some.element_size()))
    source = torch.ones(rows, width, dtype=some.dtype, device=some.device)
    return lambda: (elementwise_kernels.pointwise("a", "a", [source], Limits()),)


# All of them.

OURS, IN_TURN, COPY, OWN_COPY = "raymoe", "in_turn", "copy", "own_copy"
COPIES = (COPY, OWN_COPY)
OWN = (OURS, IN_TURN, *COPIES)
"""The systems that must work: what they do wrong ends the run."""

LIMITED = (OURS, IN_TURN)
"""The systems that take a number of SMs."""

SYSTEMS: dict[str, Callable[[Task], Compute]] = {
    OURS: _raymoe,
    IN_TURN: _in_turn,
    "eager": _eager,
    "compile": _compiled,
    "liger": _liger,
    "quack": _quack,
    COPY: _copy,
    OWN_COPY: _own_copy,
}
