"""Check the arguments of the functions over rows: norms, SwiGLU, pointwise.

Rows are the last dimension of a tensor. The checks also run where torch.compile traces the functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict

import torch

from raymoe.errors import ConfigError
from raymoe.fp8 import FP8

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DTYPES_IN_WORDS = "torch.bfloat16, torch.float16 or torch.float32"
SCALES = ("row", "column")


# The keyword arguments that choose the form of the result.


class Plain(TypedDict, total=False):
    """The result has the dtype of the input. `sms`: the most SMs that the kernel may take (None: all)."""

    output: None
    sms: int | None


class Quantised(TypedDict, total=False):
    """The result is a pair: values as float8_e4m3fn, and a float32 scale for each 128 elements of a row.

    `scales="row"` has shape [..., ceil(H / 128)], as `Exchange.dispatch` takes them. `scales="column"` has the same
    shape [T, ceil(H / 128)] with the rows of a column adjacent, each column padded to 16 bytes, as DeepGEMM takes them.
    """

    output: Required[Literal["float8_e4m3"]]
    scales: Literal["row", "column"]
    sms: int | None


class PlainNorm(Plain, total=False):
    """Of a norm. `batch_invariant`: the bits of a row's result depend on that row, the vectors and the other arguments
    alone, not on other rows or their number. It chooses a kernel that need not be the fastest for that number."""

    batch_invariant: bool


class QuantisedNorm(Quantised, total=False):
    """Of a norm. `batch_invariant` as in `PlainNorm`; values and scales then depend on the row alone."""

    batch_invariant: bool


@dataclass(frozen=True)
class ResultForm:
    """The checked options of one call.

    >>> ResultForm(output="float8_e4m3", scales="column").column
    True
    >>> ResultForm(output="float8")
    Traceback (most recent call last):
        ...
    raymoe.errors.ConfigError: output is 'float8'; it is None (the dtype of the input) or 'float8_e4m3'
    """

    output: str | None = None
    scales: str = "row"
    sms: int | None = None

    def __post_init__(self) -> None:
        if self.output not in (None, FP8):
            raise ConfigError(f"output is {self.output!r}; it is None (the dtype of the input) or {FP8!r}")
        if self.scales not in SCALES:
            raise ConfigError(f"scales is {self.scales!r}; they lie by 'row' or by 'column'")
        if self.scales == "column" and self.output is None:
            raise ConfigError(f"scales is 'column' and output is None, which has no scales; ask for output={FP8!r}")
        if self.sms is not None and (type(self.sms) is not int or self.sms < 1):
            raise ConfigError(f"sms is {self.sms!r}; it is None (all) or a number of SMs from 1")

    @property
    def quantised(self) -> bool:
        return self.output is not None

    @property
    def column(self) -> bool:
        return self.scales == "column"


@dataclass(frozen=True)
class NormForm(ResultForm):
    """The checked options of one call of a norm.

    >>> NormForm(sms=48, batch_invariant=True).launch
    (48, True)
    """

    batch_invariant: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.batch_invariant) is not bool:
            raise ConfigError(f"batch_invariant is {self.batch_invariant!r}; it is True or False")

    @property
    def launch(self) -> tuple[int | None, bool]:
        """The last arguments of the operators of norms."""
        return self.sms, self.batch_invariant


PLAIN, PLAIN_NORM = ResultForm(), NormForm()


def form_of(options: dict[str, Any]) -> ResultForm:
    """Check the options of a call."""
    return ResultForm(**options) if options else PLAIN


def norm_form_of(options: dict[str, Any]) -> NormForm:
    """Check the options of a call of a norm."""
    return NormForm(**options) if options else PLAIN_NORM


def refuse_gradient(op: str, *tensors: torch.Tensor) -> None:
    """Raise if a quantised result would have to be differentiated."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ConfigError(f"{op} with output={FP8!r} has no gradient; leave output out, or call it under torch.no_grad")


# Tensors.


def check_rows(op: str, name: str, x: object) -> torch.Tensor:
    """Return x if it is a tensor of rows that the functions take."""
    if not isinstance(x, torch.Tensor):
        raise ConfigError(f"{op}: {name} is a {type(x).__name__}; a tensor is needed")
    if x.dtype not in DTYPES:
        raise ConfigError(f"{op}: {name} is {x.dtype}; {DTYPES_IN_WORDS} is needed")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ConfigError(f"{op}: {name} has shape {list(x.shape)}; rows of at least one element are needed")
    return x


def check_like(op: str, name: str, value: object, x: torch.Tensor, shape: tuple[int, ...] | torch.Size) -> None:
    """Raise unless `value` has this shape, and the dtype and device of x."""
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{op}: {name} is a {type(value).__name__}; a tensor is needed")
    if tuple(value.shape) != tuple(shape):
        raise ConfigError(f"{op}: {name} has shape {list(value.shape)}; x asks for {list(shape)}")
    if value.dtype != x.dtype or value.device != x.device:
        raise ConfigError(f"{op}: {name} is {value.dtype} on {value.device}; x is {x.dtype} on {x.device}")


def check_vector(op: str, name: str, value: object, x: torch.Tensor) -> None:
    """Raise unless `value` is a vector [H] on the device of x. Its dtype may differ from that of x."""
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{op}: {name} is a {type(value).__name__}; a tensor is needed")
    fits = value.dim() == 1 and value.shape[0] == x.shape[-1] and value.device == x.device
    if not fits or value.dtype not in DTYPES:
        raise ConfigError(
            f"{op}: {name} is {value.dtype} of shape {list(value.shape)} on {value.device}; "
            f"{DTYPES_IN_WORDS} of shape {list(x.shape[-1:])} on {x.device} is needed"
        )
