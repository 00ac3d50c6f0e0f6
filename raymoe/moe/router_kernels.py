"""The router by kernels: memory for the results, and the launch of router.cu, router_backward.cu and router_sums.cu.

`route`, `route_backward` and `router_sums` have the arguments of the formulas of their names. Each kernel has a class
with its tensors: `launch` enqueues it, `kernel_call` only computes the kernel, its shape and its parameters.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import F32, U32, Address, Params
from raymoe.errors import ConfigError
from raymoe.moe.router_formulas import RouterForm
from raymoe.rows.pipe_tensors import as_dense, row_type
from raymoe.rows.row_launch import KernelCall, device_of
from raymoe.rows.row_results import new_like

LANES = 32
MOST_PER_LANE = 32
MOST_TOPK = LANES
WARPS = 4
FEW_TOKENS = 512
"""Up to this many tokens a block has one warp, so that tokens spread over all SMs."""
SUMMING_WARPS = 8
MOST_RUNS = 128


def routes(logits: Tensor, form: RouterForm) -> bool:
    """Whether the kernels take this form; else the formulas compute."""
    experts, groups = form.experts, form.groups
    held = experts_per_lane(experts, groups, logits.element_size()) or experts_per_lane(experts, groups, 4)
    return held is not None and form.topk <= MOST_TOPK


def route(
    logits: Tensor, bias: Tensor | None, form: RouterForm, *, differentiable: bool = False
) -> tuple[Tensor, Tensor]:
    """Return ids and weights; `differentiable`: `route_backward` will follow."""
    logits = _as_logits(logits, form.experts, form.groups)
    if bias is not None and not (bias.dtype is torch.float32 and bias.is_contiguous()):
        bias = bias.float().contiguous()
    size = len(logits), form.topk
    topk_idx = logits.new_empty(size, dtype=torch.int64)
    topk_weights = logits.new_empty(size, dtype=torch.float32)
    Route(form, logits, bias, topk_idx, topk_weights, differentiable).launch()
    return topk_idx, topk_weights


def route_backward(dweights: Tensor, logits: Tensor, topk_idx: Tensor, form: RouterForm) -> Tensor:
    """Return the gradient of the logits."""
    taken = _as_logits(logits, form.experts, form.groups)
    dlogits = new_like(taken)
    RouteBackward(form, dweights.contiguous(), taken, topk_idx, dlogits).launch()
    return dlogits if dlogits.dtype == logits.dtype else dlogits.to(logits.dtype)


def router_sums(logits: Tensor, topk_idx: Tensor, sigmoid: bool) -> tuple[Tensor, Tensor]:
    """Return the sums of each expert's scores, float32[E], and its entries, int64[E]."""
    experts = logits.shape[1]
    logits = _as_logits(logits, experts, 1)
    runs, _ = runs_of(len(logits))
    score_sums = logits.new_empty(runs, experts, dtype=torch.float32)
    load = logits.new_empty(runs, experts, dtype=torch.int32)
    RouterSums(sigmoid, logits, topk_idx.long().contiguous(), score_sums, load).launch()
    return score_sums.sum(dim=0), load.sum(dim=0)


def _as_logits(logits: Tensor, experts: int, groups: int) -> Tensor:
    """Return logits as the kernels take them: float32 where they cannot load 16 bits, contiguous and aligned."""
    if experts_per_lane(experts, groups, logits.element_size()) is None:
        logits = logits.float()
    return as_dense(logits)


@functools.lru_cache(maxsize=256)
def experts_per_lane(experts: int, groups: int, item: int) -> int | None:
    """The experts that a lane holds; None: no lane has the registers, or logits of `item` bytes cannot be loaded.

    A group has a number of lanes that is a power of two. Without groups, lanes hold what makes loads wide.

    >>> experts_per_lane(256, 1, item=4), experts_per_lane(60, 1, item=4)
    (8, 2)
    >>> experts_per_lane(160, 8, item=4), experts_per_lane(256, 1, item=2)
    (5, 8)
    >>> experts_per_lane(2048, 1, item=4)  # None
    """
    least = -(-experts // LANES)
    if groups > 1:
        per_lane = experts // groups
        while per_lane % 2 == 0 and per_lane // 2 >= least:
            per_lane //= 2
    else:
        step = 4 if experts % 4 == 0 and least > 2 else 2 if item == 2 else 1
        per_lane = -(-least // step) * step
    loaded = per_lane * item % 4 == 0 and experts * item % 4 == 0
    return per_lane if least <= per_lane <= MOST_PER_LANE and loaded else None


# The choice of experts.


@dataclass(frozen=True)
class RouterParams(Params):
    """The parameters of kernels/moe/router.cu."""

    logits: Address
    bias: Address
    topk_idx: Address
    topk_weights: Address
    tokens: U32
    scale: F32


@dataclass(slots=True)
class Route:
    """logits[T, E] of any dtype, contiguous; bias[E] float32; topk_idx[T, K] int64; topk_weights[T, K] float32.

    `differentiable` also loads the kernel of the gradient, which a capture of the backward pass could not.
    """

    form: RouterForm
    logits: Tensor
    bias: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    differentiable: bool = False

    def launch(self) -> None:
        """Launch the kernel on the current stream."""
        logits, bias = self.logits, self.bias
        tokens = len(logits)
        kind = "router", self.form, logits.dtype, logits.shape[1], bias is None, self.differentiable
        device = device_of(logits.get_device())
        prepared = device.find(kind, tokens)
        if prepared is None:
            call = self.kernel_call()
            if not call.tiles:
                return
            if self.differentiable:
                device.launch(_backward_source(self.form, logits), early=False)
            prepared = device.prepare(kind, tokens, call, ROUTE if bias is None else (*ROUTE, "bias"))
        addresses = [tokens, logits.data_ptr(), self.topk_idx.data_ptr(), self.topk_weights.data_ptr()]
        if bias is not None:
            addresses.append(bias.data_ptr())
        prepared(tokens, addresses)

    def kernel_call(self) -> KernelCall:
        """Return the kernel, its shape and its parameters."""
        form, logits, bias = self.form, self.logits, self.bias
        defines = _defines_of(form, logits)
        defines |= {"GROUPS": form.groups, "TOPK_GROUPS": form.topk_groups}
        if bias is not None:
            defines["BIASED"] = 1
        params = RouterParams(
            logits=logits.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            topk_idx=self.topk_idx.data_ptr(),
            topk_weights=self.topk_weights.data_ptr(),
            tokens=len(logits),
            scale=form.scale,
        )
        return _by_tokens(_source("router", RouterParams, defines), params, len(logits))


ROUTE = ("tokens", "logits", "topk_idx", "topk_weights")
"""The parameters that each launch sets."""


def _defines_of(form: RouterForm, logits: Tensor) -> dict[str, int | str]:
    """The macros of a form that the kernel of the choice and that of its gradient both have."""
    per_lane = experts_per_lane(form.experts, form.groups, logits.element_size())
    if per_lane is None or form.topk > MOST_TOPK or logits.shape[1] != form.experts:
        raise ConfigError(
            f"a router over {form.experts} experts in {form.groups} groups, top {form.topk}, of logits "
            f"{list(logits.shape)} in {logits.dtype}; the kernel takes up to {LANES * MOST_PER_LANE} experts "
            f"and top {MOST_TOPK}"
        )
    defines: dict[str, int | str] = {
        "EXPERTS": form.experts,
        "PER_LANE": per_lane,
        "LOGIT_TYPE": row_type(logits),
        "TOPK": form.topk,
        "SCORE": form.score.upper(),
    }
    if form.normalise and form.score != "chosen":
        defines["NORMALISED"] = 1
    return defines


def _source(stem: str, struct: type[Params], defines: dict[str, int | str]) -> KernelSource:
    return KernelSource(f"moe/{stem}", (struct,), tuple((name, str(value)) for name, value in defines.items()))


def _by_tokens(source: KernelSource, params: Params, tokens: int) -> KernelCall:
    """A launch in which a warp takes a token."""
    warps = 1 if tokens <= FEW_TOKENS else WARPS
    return KernelCall(source, LANES * warps, 0, params, tokens, warps, blocks_of_sm=0, breaks=(FEW_TOKENS + 1,))


# Its gradient.


@dataclass(frozen=True)
class RouterBackwardParams(Params):
    """The parameters of kernels/moe/router_backward.cu."""

    dweights: Address
    logits: Address
    topk_idx: Address
    dlogits: Address
    tokens: U32
    scale: F32


@dataclass(slots=True)
class RouteBackward:
    """The gradient of logits[T, E] from dweights[T, K] float32 and topk_idx[T, K] int64, all contiguous.

    `dlogits` has the dtype of the logits. The groups and the bias of the choice have no part in it.
    """

    form: RouterForm
    dweights: Tensor
    logits: Tensor
    topk_idx: Tensor
    dlogits: Tensor

    def launch(self) -> None:
        """Launch the kernel on the current stream."""
        logits = self.logits
        tokens = len(logits)
        kind = "router_backward", self.form, logits.dtype, logits.shape[1]
        device = device_of(logits.get_device())
        prepared = device.find(kind, tokens)
        if prepared is None:
            call = self.kernel_call()
            if not call.tiles:
                return
            prepared = device.prepare(kind, tokens, call, ROUTE_BACKWARD)
        tensors = self.dweights, logits, self.topk_idx, self.dlogits
        prepared(tokens, (tokens, *(tensor.data_ptr() for tensor in tensors)))

    def kernel_call(self) -> KernelCall:
        """Return the kernel, its shape and its parameters."""
        params = RouterBackwardParams(
            dweights=self.dweights.data_ptr(),
            logits=self.logits.data_ptr(),
            topk_idx=self.topk_idx.data_ptr(),
            dlogits=self.dlogits.data_ptr(),
            tokens=len(self.logits),
            scale=self.form.scale,
        )
        return _by_tokens(_backward_source(self.form, self.logits), params, len(self.logits))


ROUTE_BACKWARD = ("tokens", "dweights", "logits", "topk_idx", "dlogits")
"""The parameters that each launch sets."""


def _backward_source(form: RouterForm, logits: Tensor) -> KernelSource:
    return _source("router_backward", RouterBackwardParams, _defines_of(form, logits))


# Sums over tokens.


@dataclass(frozen=True)
class RouterSumsParams(Params):
    """The parameters of kernels/moe/router_sums.cu."""

    logits: Address
    topk_idx: Address
    score_sums: Address
    load: Address
    tokens: U32
    run: U32


@dataclass(slots=True)
class RouterSums:
    """logits[T, E] of any dtype and topk_idx[T, K] int64, contiguous; a row of score_sums (float32) and of load (int32)
    for each run of tokens. The sums over these rows are the results.
    """

    sigmoid: bool
    logits: Tensor
    topk_idx: Tensor
    score_sums: Tensor
    load: Tensor

    def launch(self) -> None:
        """Launch the kernel on the current stream."""
        logits, topk_idx, score_sums, load = self.logits, self.topk_idx, self.score_sums, self.load
        (tokens, experts), (runs, run) = logits.shape, runs_of(len(logits))
        shapes = score_sums.shape == (runs, experts), load.shape == (runs, experts)
        kind = "router_sums", self.sigmoid, logits.dtype, experts, topk_idx.shape[1], shapes
        device = device_of(logits.get_device())
        prepared = device.find(kind, tokens)
        if prepared is None:
            call = self.kernel_call()
            if not call.tiles:
                return
            prepared = device.prepare(kind, tokens, call, ROUTER_SUMS)
        addresses = logits.data_ptr(), topk_idx.data_ptr(), score_sums.data_ptr(), load.data_ptr()
        prepared(runs, (tokens, run, *addresses))

    def kernel_call(self) -> KernelCall:
        """Return the kernel, its shape and its parameters."""
        logits, score_sums, load = self.logits, self.score_sums, self.load
        tokens, experts = logits.shape
        per_lane = experts_per_lane(experts, 1, logits.element_size())
        runs, run = runs_of(tokens)
        if per_lane is None or score_sums.shape != (runs, experts) or load.shape != (runs, experts):
            raise ConfigError(
                f"sums of logits {list(logits.shape)} into {list(score_sums.shape)} and {list(load.shape)}; "
                f"the kernel takes up to {LANES * MOST_PER_LANE} experts, and needs {runs} rows of {experts}"
            )
        defines: dict[str, int | str] = {
            "EXPERTS": experts,
            "PER_LANE": per_lane,
            "LOGIT_TYPE": row_type(logits),
            "TOPK": self.topk_idx.shape[1],
        }
        if self.sigmoid:
            defines["SIGMOID_SCORES"] = 1
        params = RouterSumsParams(
            logits=logits.data_ptr(),
            topk_idx=self.topk_idx.data_ptr(),
            score_sums=score_sums.data_ptr(),
            load=load.data_ptr(),
            tokens=tokens,
            run=run,
        )
        source = _source("router_sums", RouterSumsParams, defines)
        shared_bytes = 4 * (SUMMING_WARPS + 1) * experts
        return KernelCall(source, LANES * SUMMING_WARPS, shared_bytes, params, runs, blocks_of_sm=0)


ROUTER_SUMS = ("tokens", "run", "logits", "topk_idx", "score_sums", "load")
"""The parameters that each launch sets."""


def runs_of(tokens: int) -> tuple[int, int]:
    """The number of runs, and the tokens of a run. They follow from the number of tokens alone, as the sums must.

    >>> runs_of(0), runs_of(20), runs_of(4096)
    ((0, 8), (3, 8), (128, 32))
    """
    run = max(SUMMING_WARPS, -(-tokens // MOST_RUNS))
    return -(-tokens // run), run
