"""Launch kernels/moe/router.cu, which chooses the experts of each token, router_backward.cu and router_sums.cu."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import F32, U32, Address, Params
from raymoe.errors import ConfigError
from raymoe.rows.pipe_launch import KernelCall, Prepared, device_of
from raymoe.rows.pipe_tensors import row_type

if TYPE_CHECKING:
    import torch

LANES = 32
MOST_PER_LANE = 32
MOST_TOPK = LANES
FEW_TOKENS = 512
"""Up to so many tokens, a block has one warp, so that tokens spread over all SMs."""
WARPS = 4


@dataclass(frozen=True)
class RouterParams(Params):
    """The parameters of kernels/moe/router.cu."""

    logits: Address
    bias: Address
    topk_idx: Address
    topk_weights: Address
    tokens: U32
    scale: F32


@dataclass(frozen=True)
class Choosing:
    """The choice that a router makes: which kernel it needs. `RouterForm` of raymoe.moe says what the fields mean."""

    experts: int
    topk: int
    score: str
    normalise: bool
    groups: int
    topk_groups: int


@dataclass(slots=True)
class Route:
    """logits[T, E] of any dtype, contiguous; bias[E] float32; topk_idx[T, K] int64; topk_weights[T, K] float32.

    `differentiable` also loads the kernel of the gradient, which a capture of the backward pass could not.
    """

    choosing: Choosing
    logits: torch.Tensor
    bias: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    scale: float = 1.0
    differentiable: bool = False


def experts_per_lane(choosing: Choosing, item: int) -> int | None:
    """The experts that a lane holds; None: no lane has the registers, or logits of `item` bytes cannot be loaded.

    A group has a number of lanes that is a power of two. Without groups, lanes hold what makes loads wide.

    >>> plain = Choosing(256, 8, "softmax", True, 1, 1)
    >>> experts_per_lane(plain, 4), experts_per_lane(Choosing(60, 4, "softmax", True, 1, 1), 4)
    (8, 2)
    >>> experts_per_lane(Choosing(160, 6, "softmax", True, 8, 3), 4), experts_per_lane(plain, 2)
    (5, 8)
    >>> experts_per_lane(Choosing(2048, 8, "softmax", True, 1, 1), 4)  # None
    """
    experts, least = choosing.experts, -(-choosing.experts // LANES)
    if choosing.groups > 1:
        each = experts // choosing.groups
        while each % 2 == 0 and each // 2 >= least:
            each //= 2
    else:
        step = 4 if experts % 4 == 0 and least > 2 else 2 if item == 2 else 1
        each = -(-least // step) * step
    loaded = each * item % 4 == 0 and experts * item % 4 == 0
    return each if least <= each <= MOST_PER_LANE and loaded else None


@functools.lru_cache(maxsize=256)
def takes(choosing: Choosing, item: int) -> bool:
    """Whether the kernel makes this choice from logits of so many bytes."""
    return choosing.topk <= MOST_TOPK and experts_per_lane(choosing, item) is not None


def route_call(call: Route) -> KernelCall:
    """The kernel, shape and parameters of `route`."""
    choosing, (tokens, experts) = call.choosing, call.logits.shape
    each = experts_per_lane(choosing, call.logits.element_size())
    if each is None or choosing.topk > MOST_TOPK or experts != choosing.experts:
        raise _not_taken(choosing, call.logits)
    defines = {
        "EXPERTS": experts,
        "PER_LANE": each,
        "LOGIT_TYPE": row_type(call.logits),
        "TOPK": choosing.topk,
        "SCORE": choosing.score.upper(),
        "GROUPS": choosing.groups,
        "TOPK_GROUPS": choosing.topk_groups,
    }
    if call.bias is not None:
        defines["BIASED"] = 1
    if choosing.normalise and choosing.score != "chosen":
        defines["NORMALISED"] = 1
    source = KernelSource("moe/router", (RouterParams,), tuple((name, str(value)) for name, value in defines.items()))
    bias = 0 if call.bias is None else call.bias.data_ptr()
    params = RouterParams(
        call.logits.data_ptr(), bias, call.topk_idx.data_ptr(), call.topk_weights.data_ptr(), tokens, call.scale
    )
    warps = 1 if tokens <= FEW_TOKENS else WARPS
    return KernelCall(source, LANES * warps, 0, params, tokens, warps, blocks_of_sm=0, breaks=(FEW_TOKENS + 1,))


def _not_taken(choosing: Choosing, logits: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"a router over {choosing.experts} experts in {choosing.groups} groups, top {choosing.topk}, of logits "
        f"{list(logits.shape)} in {logits.dtype}; the kernel takes up to {LANES * MOST_PER_LANE} experts "
        f"and top {MOST_TOPK}"
    )


def route(call: Route) -> None:
    """Launch kernels/moe/router.cu on the current stream."""
    logits, bias = call.logits, call.bias
    tokens = len(logits)
    kind = "router", call.choosing, call.scale, logits.dtype, logits.shape[1], bias is None, call.differentiable
    device = device_of(logits.get_device())
    prepared = device.find(kind, tokens)
    if prepared is None:
        made = route_call(call)
        if not made.tiles:
            return
        if call.differentiable:
            device.launch(_backward_source(call.choosing, logits), early=False)
        prepared = Prepared(device, made, None, ROUTE if bias is None else (*ROUTE, "bias"))
        device.keep(kind, tokens, made.breaks, prepared)
    addresses = [tokens, logits.data_ptr(), call.topk_idx.data_ptr(), call.topk_weights.data_ptr()]
    if bias is not None:
        addresses.append(bias.data_ptr())
    prepared(tokens, addresses)


ROUTE = ("tokens", "logits", "topk_idx", "topk_weights")
"""The parameters that each call sets."""


# Gradients.


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

    choosing: Choosing
    dweights: torch.Tensor
    logits: torch.Tensor
    topk_idx: torch.Tensor
    dlogits: torch.Tensor
    scale: float = 1.0


def route_backward_call(call: RouteBackward) -> KernelCall:
    """The kernel, shape and parameters of `route_backward`."""
    tokens, source = len(call.logits), _backward_source(call.choosing, call.logits)
    params = RouterBackwardParams(
        call.dweights.data_ptr(),
        call.logits.data_ptr(),
        call.topk_idx.data_ptr(),
        call.dlogits.data_ptr(),
        tokens,
        call.scale,
    )
    warps = 1 if tokens <= FEW_TOKENS else WARPS
    return KernelCall(source, LANES * warps, 0, params, tokens, warps, blocks_of_sm=0, breaks=(FEW_TOKENS + 1,))


def _backward_source(choosing: Choosing, logits: torch.Tensor) -> KernelSource:
    each = experts_per_lane(choosing, logits.element_size())
    if each is None or choosing.topk > MOST_TOPK or logits.shape[1] != choosing.experts:
        raise _not_taken(choosing, logits)
    defines = {
        "EXPERTS": choosing.experts,
        "PER_LANE": each,
        "LOGIT_TYPE": row_type(logits),
        "TOPK": choosing.topk,
        "SCORE": choosing.score.upper(),
    }
    if choosing.normalise and choosing.score != "chosen":
        defines["NORMALISED"] = 1
    named = tuple((name, str(value)) for name, value in defines.items())
    return KernelSource("moe/router_backward", (RouterBackwardParams,), named)


def route_backward(call: RouteBackward) -> None:
    """Launch kernels/moe/router_backward.cu on the current stream."""
    logits = call.logits
    tokens = len(logits)
    kind = "router_backward", call.choosing, call.scale, logits.dtype, logits.shape[1]
    device = device_of(logits.get_device())
    prepared = device.find(kind, tokens)
    if prepared is None:
        made = route_backward_call(call)
        if not made.tiles:
            return
        prepared = Prepared(device, made, None, ROUTE_BACKWARD)
        device.keep(kind, tokens, made.breaks, prepared)
    tensors = call.dweights, logits, call.topk_idx, call.dlogits
    prepared(tokens, (tokens, *(each.data_ptr() for each in tensors)))


ROUTE_BACKWARD = ("tokens", "dweights", "logits", "topk_idx", "dlogits")
"""The parameters that each call sets."""


# Sums over tokens.

SUMMING_WARPS = 8
MOST_RUNS = 128


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
    logits: torch.Tensor
    topk_idx: torch.Tensor
    score_sums: torch.Tensor
    load: torch.Tensor


def runs_of(tokens: int) -> tuple[int, int]:
    """The number of runs, and the tokens of a run. They follow from the number of tokens alone, as the sums must.

    >>> runs_of(0), runs_of(20), runs_of(4096)
    ((0, 8), (3, 8), (128, 32))
    """
    run = max(SUMMING_WARPS, -(-tokens // MOST_RUNS))
    return -(-tokens // run), run


def sums_call(call: RouterSums) -> KernelCall:
    """The kernel, shape and parameters of `router_sums`."""
    (tokens, experts), topk = call.logits.shape, call.topk_idx.shape[1]
    each = experts_per_lane(Choosing(experts, topk, "softmax", False, 1, 1), call.logits.element_size())
    runs, run = runs_of(tokens)
    if each is None or call.score_sums.shape != (runs, experts) or call.load.shape != (runs, experts):
        raise ConfigError(
            f"sums of logits {list(call.logits.shape)} into {list(call.score_sums.shape)} and {list(call.load.shape)}; "
            f"the kernel takes up to {LANES * MOST_PER_LANE} experts, and needs {runs} rows of {experts}"
        )
    defines = {"EXPERTS": experts, "PER_LANE": each, "LOGIT_TYPE": row_type(call.logits), "TOPK": topk}
    if call.sigmoid:
        defines["SIGMOID_SCORES"] = 1
    named = tuple((name, str(value)) for name, value in defines.items())
    source = KernelSource("moe/router_sums", (RouterSumsParams,), named)
    sums, load = call.score_sums.data_ptr(), call.load.data_ptr()
    params = RouterSumsParams(call.logits.data_ptr(), call.topk_idx.data_ptr(), sums, load, tokens, run)
    shared_bytes = 4 * (SUMMING_WARPS + 1) * experts
    return KernelCall(source, LANES * SUMMING_WARPS, shared_bytes, params, runs, blocks_of_sm=0)


def router_sums(call: RouterSums) -> None:
    """Launch kernels/moe/router_sums.cu on the current stream."""
    logits, topk_idx, score_sums, load = call.logits, call.topk_idx, call.score_sums, call.load
    (tokens, experts), (runs, run) = logits.shape, runs_of(len(logits))
    shapes = score_sums.shape == (runs, experts), load.shape == (runs, experts)
    kind = "router_sums", call.sigmoid, logits.dtype, experts, topk_idx.shape[1], shapes
    device = device_of(logits.get_device())
    prepared = device.find(kind, tokens)
    if prepared is None:
        made = sums_call(call)
        if not made.tiles:
            return
        prepared = Prepared(device, made, None, ROUTER_SUMS)
        device.keep(kind, tokens, made.breaks, prepared)
    addresses = logits.data_ptr(), topk_idx.data_ptr(), score_sums.data_ptr(), load.data_ptr()
    prepared(runs, (tokens, run, *addresses))


ROUTER_SUMS = ("tokens", "run", "logits", "topk_idx", "score_sums", "load")
"""The parameters that each call sets."""
