"""Arguments of dispatch and combine, checked before anything is sent: a peer must never learn of a caller's mistake."""

from __future__ import annotations

import torch

from raymoe.exchange.backend import Tokens
from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.spec import FP8, ExchangeSpec
from raymoe.job.errors import ConfigError

_GPU_ALIGNMENT = 16  # bytes: kernels and bulk copies move rows in pieces of so many


def capturing(device: torch.device) -> bool:
    """Whether what is enqueued on this device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Arguments:
    """What the tensors of one exchange must be."""

    def __init__(self, spec: ExchangeSpec, ranks: int, device: torch.device) -> None:
        self._spec, self._device, self._capacity = spec, device, spec.rows(ranks)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._output: torch.dtype = getattr(torch, spec.output_dtype)

    def dispatch(
        self, x: object, topk_idx: object, topk_weights: object, num_tokens: int | torch.Tensor | None
    ) -> Tokens:
        spec = self._spec
        x, scales = self._quantised(x)
        rows = self._rows("x", x, None, self._dtype if scales is None else torch.float8_e4m3fn)
        if len(rows) > spec.tokens:
            raise ConfigError(f"x has {len(rows)} rows; this exchange was made for at most {spec.tokens} tokens a rank")
        ids = self._tensor("topk_idx", topk_idx, (len(rows), spec.topk), torch.int32, torch.int64)
        weights = self._tensor("topk_weights", topk_weights, (len(rows), spec.topk), torch.float32)
        if scales is not None:
            scales = self._tensor("scales", scales, (len(rows), spec.scales), torch.float32).detach()
        return Tokens(rows.detach(), ids, weights.detach(), self._count(num_tokens, len(rows)), scales)

    def _quantised(self, x: object) -> tuple[object, object | None]:
        """A pair of values and scales, taken apart; anything else has no scales."""
        if not isinstance(x, tuple):
            return x, None
        if len(x) != 2:
            raise ConfigError(f"x is a tuple of {len(x)}; rows that are quantised already are a pair: values, scales")
        if self._spec.dispatch_wire != FP8:
            raise ConfigError(
                f"x is a pair of values and scales, and rows cross as {self._spec.dispatch_wire}; pairs want wire {FP8}"
            )
        if self._spec.hidden % _GPU_ALIGNMENT:
            raise ConfigError(
                f"x is quantised already with hidden {self._spec.hidden}; rows of 8-bit floats move in pieces of "
                f"{_GPU_ALIGNMENT}: quantise in the dispatch"
            )
        return x[0], x[1]

    def given(self, out: object) -> torch.Tensor:
        """Memory that the caller gives for dispatched rows."""
        if self._spec.layout == "rank":
            raise ConfigError("out was given with layout rank, where rows stay in the slots that they came in")
        return self._writable(out, self._capacity, self._output)

    def given_home(self, out: object, tokens: int) -> torch.Tensor:
        """Memory that the caller gives for y."""
        return self._writable(out, tokens, self._dtype)

    def combine(self, rows: object, got: object, owner: object) -> torch.Tensor:
        if not isinstance(got, Dispatched):
            raise ConfigError(f"got is a {type(got).__name__}; combine takes what dispatch gave")
        if got._owner is not owner:
            raise ConfigError("got comes from another exchange; combine takes what this exchange's dispatch gave")
        return self._rows("rows", rows, self._capacity, self._dtype).detach()

    def _count(self, num_tokens: int | torch.Tensor | None, rows: int) -> torch.Tensor | None:
        """On CPUs the number is looked at; on a GPU that would mean to wait for it, and the backend looks there."""
        if num_tokens is None:
            return None
        if isinstance(num_tokens, torch.Tensor):
            self._tensor("num_tokens", num_tokens, (1,), torch.int32)
            if self._device.type == "cpu":
                _check_count(int(num_tokens.item()), rows)
            return num_tokens
        _check_count(num_tokens, rows)
        if capturing(self._device):
            raise ConfigError(
                f"num_tokens is {num_tokens} inside a capture, and every replay would send that many; give an int32[1] "
                f"tensor on {self._device}, whose value each replay reads"
            )
        return torch.full((1,), num_tokens, dtype=torch.int32, device=self._device)

    def _writable(self, out: object, rows: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._rows("out", out, rows, dtype)
        if tensor.requires_grad:
            raise ConfigError("out requires grad; memory to be written over cannot")
        return tensor

    def _rows(self, name: str, tensor: object, rows: int | None, dtype: torch.dtype) -> torch.Tensor:
        found = self._tensor(name, tensor, (rows, self._spec.hidden), dtype)
        if self._device.type == "cuda" and (behind := found.data_ptr() % _GPU_ALIGNMENT):
            raise ConfigError(
                f"{name} begins {behind} bytes behind a multiple of {_GPU_ALIGNMENT}; rows on GPUs move in pieces of "
                f"{_GPU_ALIGNMENT} bytes: call .clone()"
            )
        return found

    def _tensor(self, name: str, tensor: object, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on this world's device, of this shape (None: any) and one of these dtypes."""
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{name} is a {type(tensor).__name__}; a tensor is needed")
        if tensor.device != self._device:
            raise ConfigError(f"{name} is on {tensor.device}; this world's ranks are on {self._device}")
        if tensor.dtype not in dtypes:
            raise ConfigError(f"{name} is {tensor.dtype}; {' or '.join(str(dtype) for dtype in dtypes)} is needed")
        found = tuple(tensor.shape)
        if len(found) != len(shape) or any(want not in (None, have) for want, have in zip(shape, found, strict=True)):
            wanted = ", ".join("any" if want is None else str(want) for want in shape)
            raise ConfigError(f"{name} has shape {list(found)}; [{wanted}] is needed")
        if not tensor.is_contiguous():
            raise ConfigError(f"{name} has strides {tensor.stride()}; it must be contiguous: call .contiguous()")
        return tensor


def _check_count(num_tokens: object, rows: int) -> None:
    if type(num_tokens) is not int or not 0 <= num_tokens <= rows:
        raise ConfigError(f"num_tokens is {num_tokens!r}; x has {rows} rows, so 0 to {rows} can be sent")
