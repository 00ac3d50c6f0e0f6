"""Check the arguments of dispatch and combine before anything is sent, so that no peer sees a caller's mistake.

A correct tensor passes one short test. A tensor that fails it is checked again in detail, for the error message.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from raymoe.cuda.current import capturing as capturing
from raymoe.errors import ConfigError
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8

_GPU_ALIGNMENT = 16  # bytes: kernels and bulk copies move rows in pieces of this size
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_torch: Any = torch._C  # torch's type stubs lack these names
SITES = 1 << 29
"""The numbers of call sites: a status has 29 bits for them."""


def refuse_tracing(op: str) -> None:
    """Raise under torch.func transforms and FakeTensorMode.

    An exchange cannot be transformed or traced: other ranks write to its memory.
    """
    if _torch._functorch.peek_interpreter_stack() is not None:
        raise ConfigError(
            f"{op} inside torch.vmap or a transform of torch.func, which is not supported; call it outside"
        )
    if _torch._len_torch_dispatch_stack() and _torch._get_dispatch_mode(_torch._TorchDispatchModeKey.FAKE) is not None:
        raise ConfigError(f"{op} under FakeTensorMode, where nothing is computed; call it outside of the mode")


def leave_untraced(code: CodeType) -> None:
    """Keep torch.compile out of frames of this code and of the functions that they call.

    `torch.compiler.disable` does the same, but its import takes a second and each call microseconds. These names are
    private to torch. Where a version lacks them, a compiled caller must wrap the calls in `torch.compiler.disable`.
    """
    try:
        frames = _torch._dynamo.eval_frame
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(code, strategy)
    except AttributeError:
        return


@dataclass(frozen=True)
class Form:
    """The form of one argument: [rows, columns], one of these dtypes, an address that is a multiple of `alignment`."""

    name: str
    columns: int
    dtypes: tuple[torch.dtype, ...]
    alignment: int = 1
    """Bytes of which the address is a multiple."""

    def fits(self, tensor: object, rows: int | None, device: torch.device) -> bool:
        """Whether a tensor can be used as it is. `rows` None allows any number of rows."""
        if type(tensor) not in _PLAIN:
            return False
        assert isinstance(tensor, torch.Tensor)
        try:
            shape = tensor.shape
            return (
                len(shape) == 2
                and shape[1] == self.columns
                and (rows is None or shape[0] == rows)
                and tensor.dtype in self.dtypes
                and tensor.device == device
                and tensor.is_contiguous()
                and not tensor.is_neg()
                and (((address := tensor.data_ptr()) != 0 and address % self.alignment == 0) or shape[0] == 0)
            )
        except RuntimeError:  # no strides or no memory; `_check_in_detail` says which
            return False


class Arguments:
    """Checks the arguments of one exchange."""

    def __init__(self, spec: ExchangeSpec, ranks: int, device: torch.device) -> None:
        self._spec, self._device, self._capacity = spec, device, spec.rows(ranks)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        output: torch.dtype = getattr(torch, spec.output_dtype)
        alignment, H, K = _GPU_ALIGNMENT if device.type == "cuda" else 1, spec.hidden, spec.topk
        self._x = Form("x", H, (dtype,), alignment)
        self._x_values = Form("x", H, (torch.float8_e4m3fn,), alignment)
        self._scales = Form("scales", spec.scales, (torch.float32,))
        self._topk_idx = Form("topk_idx", K, (torch.int32, torch.int64))
        self._topk_weights = Form("topk_weights", K, (torch.float32,))
        self._out = Form("out", H, (output,), alignment)
        self._rows = Form("rows", H, (dtype,), alignment)
        self._y = Form("out", H, (dtype,), alignment)

    def dispatch(
        self,
        x: object,
        topk_idx: object,
        topk_weights: object,
        num_tokens: int | torch.Tensor | None,
        zero_gaps: bool = True,
        site: int = 0,
    ) -> Tokens:
        refuse_tracing("dispatch")
        if zero_gaps is not True and zero_gaps is not False:
            raise ConfigError(f"zero_gaps is a {type(zero_gaps).__name__}; it is True or False")
        if site.__class__ is not int or not 0 <= site < SITES:
            raise ConfigError(f"site is {site!r}; it is a whole number from 0 to {SITES - 1}, the same on all ranks")
        x, scales = self._split_pair(x)
        rows = self._tensor(self._x if scales is None else self._x_values, x, None)
        n = rows.shape[0]
        if n > self._spec.tokens:
            raise ConfigError(f"x has {n} rows; this exchange was made for at most {self._spec.tokens} tokens a rank")
        idx, weights = self._tensor(self._topk_idx, topk_idx, n), self._tensor(self._topk_weights, topk_weights, n)
        if scales is not None:
            scales = _detached(self._tensor(self._scales, scales, n))
        return Tokens(_detached(rows), idx, _detached(weights), self._count(num_tokens, n), scales, zero_gaps, site)

    def ids(self, topk_idx: object) -> torch.Tensor:
        """Check the ids of a dispatch alone."""
        ids = self._tensor(self._topk_idx, topk_idx, None)
        if len(ids) > self._spec.tokens:
            raise ConfigError(f"topk_idx has {len(ids)} rows; this exchange was made for at most {self._spec.tokens}")
        return ids

    def _split_pair(self, x: object) -> tuple[object, object | None]:
        """Split a pair of values and scales. Anything but a tuple has no scales."""
        if not isinstance(x, tuple):
            return x, None
        if len(x) != 2:
            raise ConfigError(f"x is a tuple of {len(x)}; quantised rows are given as a pair: values, scales")
        if self._spec.dispatch_wire != FP8:
            raise ConfigError(
                f"x is a pair of values and scales, and rows cross as {self._spec.dispatch_wire}; pairs need wire {FP8}"
            )
        if self._spec.hidden % _GPU_ALIGNMENT:
            raise ConfigError(
                f"x is quantised already with hidden {self._spec.hidden}; rows of 8-bit floats move in pieces of "
                f"{_GPU_ALIGNMENT}: give x unquantised, and the dispatch quantises it"
            )
        return x[0], x[1]

    def dispatch_out(self, out: object) -> torch.Tensor:
        """Check the caller's memory for dispatched rows."""
        if self._spec.layout == "rank":
            raise ConfigError("out was given with layout rank, where rows stay in their slots; do not give it")
        return self._writable(self._out, out, self._capacity)

    def combine_out(self, out: object, tokens: int) -> torch.Tensor:
        """Check the caller's memory for y."""
        return self._writable(self._y, out, tokens)

    def combine(self, rows: object, got: object, weighted: object, owner: object) -> torch.Tensor:
        refuse_tracing("combine")
        if weighted is not True and weighted is not False:
            raise ConfigError(
                f"weighted is a {type(weighted).__name__}; it is True or False: the weights are those of the dispatch"
            )
        if weighted and self._spec.by_token:
            raise ConfigError(
                "weighted is True with layout token, where combine takes sums of rows: multiply the rows by "
                "got.weights before you add them, and give weighted=False"
            )
        _check_got(got, owner, "combine")
        assert isinstance(got, Dispatched)
        if self._rows.fits(rows, self._capacity, self._device):
            assert isinstance(rows, torch.Tensor)
            return _detached(rows)
        return _detached(self._fewer_rows(rows, got))

    def _fewer_rows(self, rows: object, got: Dispatched) -> torch.Tensor:
        """Check rows that are not as many as the capacity. Kernels read all rows up to the last offset."""
        tensor = self._tensor(self._rows, rows, None)
        if (n := tensor.shape[0]) > self._capacity:
            return self._tensor(self._rows, rows, self._capacity)
        if got.counted is None and self._device.type != "cpu":
            raise ConfigError(
                f"rows has {n} rows, and this exchange's capacity is {self._capacity}: give as many, or call "
                "got.exact() before, so that the host knows how many rows came"
            )
        if n < (there := got.count()):
            raise ConfigError(f"rows has {n} rows, and {there} came, gaps included: give the results of all of them")
        return tensor

    def dispatch_known(
        self, x: object, got: Dispatched, out: object, owner: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Check rows that go where those of an earlier dispatch went, and the memory for them."""
        refuse_tracing("dispatch_known")
        _check_got(got, owner, "dispatch_known")
        return _detached(self._tensor(self._x, x, got.tokens)), self._writable(self._out, out, self._capacity)

    def _count(self, num_tokens: int | torch.Tensor | None, rows: int) -> torch.Tensor | None:
        """Check the number of tokens. The value of a tensor is data: the backend refuses it, with all ranks."""
        if num_tokens is None:
            return None
        if isinstance(num_tokens, torch.Tensor):
            return _check_in_detail("num_tokens", num_tokens, (1,), (torch.int32,), self._device)
        if type(num_tokens) is not int or not 0 <= num_tokens <= rows:
            raise ConfigError(f"num_tokens is {num_tokens!r}; x has {rows} rows, so 0 to {rows} can be sent")
        if capturing(self._device):
            raise ConfigError(
                f"num_tokens is {num_tokens} inside a capture, so every replay would send that many; give an int32[1] "
                f"tensor on {self._device}, whose value each replay reads"
            )
        return torch.full((1,), num_tokens, dtype=torch.int32, device=self._device)

    def _writable(self, form: Form, out: object, rows: int) -> torch.Tensor:
        tensor = self._tensor(form, out, rows)
        if tensor.requires_grad:
            raise ConfigError("out requires grad, and it is overwritten; give out.detach()")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ConfigError(
                "out was made in inference mode, and torch does not write to it outside that mode; call .clone()"
            )
        return tensor

    def _tensor(self, form: Form, tensor: object, rows: int | None) -> torch.Tensor:
        """Return the argument if it has this form, else raise. A subclass becomes a plain tensor."""
        if form.fits(tensor, rows, self._device):
            assert isinstance(tensor, torch.Tensor)
            return tensor
        plain = _check_in_detail(form.name, tensor, (rows, form.columns), form.dtypes, self._device)
        if offset := plain.data_ptr() % form.alignment:
            raise ConfigError(
                f"{form.name} begins {offset} bytes after a multiple of {form.alignment}; rows on GPUs move in pieces "
                f"of {form.alignment} bytes: call .clone()"
            )
        return plain


def _check_got(got: object, owner: object, op: str) -> None:
    if not isinstance(got, Dispatched):
        raise ConfigError(f"got is a {type(got).__name__}; {op} takes the result of dispatch")
    if got._owner is not owner:
        raise ConfigError(f"got comes from another exchange; {op} takes the result of this exchange's dispatch")


def refuse_overlap(name: str, read: torch.Tensor, written: torch.Tensor) -> None:
    """Raise where the input and the output of an operation overlap: kernels read and write at once. Costs 0.15 us."""
    first, other = read.data_ptr(), written.data_ptr()
    if (other < first + read.nbytes if first < other else first < other + written.nbytes) and read.numel():
        raise ConfigError(
            f"{name} and the memory that is written to overlap, and both are in use at the same time; give another "
            f"out, or {name}.clone()"
        )


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a tensor, so that the memory kept for a dispatch holds no autograd graph."""
    return tensor.detach() if tensor.requires_grad else tensor


def _check_in_detail(
    name: str,
    tensor: object,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> torch.Tensor:
    """Raise unless this is a contiguous tensor on this device, of one of these dtypes and of this shape (None: any).

    A tensor of a subclass can pass; it is returned as a plain tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name} is a {type(tensor).__name__}; a tensor is needed")
    with _torch.DisableTorchFunctionSubclass():
        if reason := _not_plain(tensor):
            raise ConfigError(f"{name} {reason}")
        if tensor.device != device:
            raise ConfigError(f"{name} is on {tensor.device}; this world's ranks are on {device}")
        if tensor.dtype not in dtypes:
            raise ConfigError(f"{name} is {tensor.dtype}; {' or '.join(str(dtype) for dtype in dtypes)} is needed")
        if reason := _not_dense(tensor):
            raise ConfigError(f"{name} {reason}")
        has = tuple(tensor.shape)
        if len(has) != len(shape) or any(want not in (None, size) for want, size in zip(shape, has, strict=True)):
            wanted = ", ".join("any" if want is None else str(want) for want in shape)
            raise ConfigError(f"{name} has shape {list(has)}; [{wanted}] is needed")
        if not tensor.is_contiguous():
            raise ConfigError(f"{name} has strides {tensor.stride()}; it must be contiguous: call .contiguous()")
        if tensor.numel() and not tensor.data_ptr():
            raise ConfigError(
                f"{name} has no memory: its storage was freed or never allocated; give a tensor that has values"
            )
        return tensor.as_subclass(torch.Tensor)


def _not_plain(tensor: torch.Tensor) -> str | None:
    """Return why a tensor is not a plain tensor with memory of its own, and what to do; None where it is one."""
    kind = type(tensor).__name__
    if _torch._functorch.is_functorch_wrapped_tensor(tensor):
        return "belongs to torch.vmap or a transform of torch.func, which is not supported; call it outside"
    if torch._is_functional_tensor(tensor):
        return "is being traced, and has no memory; an exchange cannot be traced: call it outside"
    if tensor.is_nested:
        return "is a nested tensor; rows of one length are needed: call .to_padded_tensor(), or give .values()"
    if _torch._dispatch_keys(tensor).has(_torch.DispatchKey.Python):
        if kind == "FakeTensor":
            return "is a FakeTensor, which has no values; an exchange cannot be traced: call it with real tensors"
        inner = ".to_local()" if hasattr(tensor, "to_local") else "the tensor that it wraps"
        return f"is a {kind}, a subclass of Tensor without memory of its own; give {inner}"
    return None


def _not_dense(tensor: torch.Tensor) -> str | None:
    """Return why a tensor's memory does not hold its elements in order, and what to do; None where it does."""
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}; a dense tensor is needed: call .to_dense()"
    if tensor.is_neg():
        return "is a negative view, whose memory holds the negated values; call .resolve_neg()"
    if tensor.is_conj():
        return "is a conjugate view, whose memory holds the conjugated values; call .resolve_conj()"
    if tensor._is_zerotensor():
        return "is a tensor of zeros without memory; make it by torch.zeros"
    return None
