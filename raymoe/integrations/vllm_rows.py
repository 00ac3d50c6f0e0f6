"""Bring tokens to the experts of an inference engine and their results back. Nothing here imports vLLM.

`raymoe.integrations.vllm` wraps this in vLLM's classes. So it can be tested and timed where vLLM is not installed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from raymoe.errors import ConfigError, RaymoeError
from raymoe.exchange.abilities import BACKENDS, backends_of
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.shared import SharedExchanges
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import quantise
from raymoe.memory.member import Member
from raymoe.memory.world import World
from raymoe.moe.grouped import grouped_linear, grouped_swiglu


@dataclass(frozen=True)
class Options:
    """The options of an engine.

    >>> Options.of({"sms": 32}).sms
    32
    >>> Options.of({"sm": 32})
    Traceback (most recent call last):
    raymoe.errors.ConfigError: the options of raymoe have 'sm'; there are backend, sms, experts, layout, timeout_s
    """

    backend: str = "auto"
    """The backend of the exchange: auto, fused, staged and so on."""
    sms: int | str = "auto"
    """The SMs of a GPU that its kernels may take."""
    experts: str = "vllm"
    """`vllm`: the experts that vLLM chooses. `raymoe`: products that pay for the rows that came, `layout: expert`."""
    layout: str = "expert"
    """`expert`: a row for each token and expert. `token`: a row for each token, once a rank. That needs a K-th of the
    memory for rows, and a second dispatch for ids and weights."""
    timeout_s: float = 60.0
    """The limit of every wait for a peer."""

    def __post_init__(self) -> None:
        if self.layout not in ("expert", "token"):
            raise ConfigError(f"layout is {self.layout!r}; it is expert or token")
        if self.experts not in ("vllm", "raymoe"):
            raise ConfigError(f"experts is {self.experts!r}; it is vllm or raymoe")
        if self.experts == "raymoe" and self.layout != "expert":
            raise ConfigError("raymoe's experts take rows expert by expert: leave out layout")
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend is {self.backend!r}; it is one of {', '.join(backends_of('cpu', 'cuda'))}")
        Member(rank=0, size=1, timeout_s=self.timeout_s)

    @classmethod
    def of(cls, chosen: object) -> Options:
        """Make options from a mapping."""
        names = [field.name for field in fields(cls)]
        if not isinstance(chosen, dict):
            raise ConfigError(f"the options of raymoe are {chosen!r}; give a mapping, which may be empty")
        for name in chosen:
            if name not in names:
                raise ConfigError(f"the options of raymoe have {name!r}; there are {', '.join(names)}")
        return cls(**chosen)


@dataclass(frozen=True)
class Brought:
    """The rows of this rank's experts: one for each (token, expert), with k = 1, or with layout `token` one for each
    token, with k = K."""

    x: torch.Tensor
    """[n, H]. Rows without an expert are unspecified; there are none of them where the rows are exact."""
    scales: torch.Tensor | None
    """float32[n, H / 128] of rows that crossed as fp8."""
    ids: torch.Tensor
    """int32[n, k]: the experts of each row; -1 where there is none."""
    weights: torch.Tensor
    """float32[n, k]"""
    counts: torch.Tensor
    """int32[L]: the rows of each expert."""


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of this rank's experts, gate rows before up rows."""

    gate_up: torch.Tensor
    """[L, 2F, H]"""
    down: torch.Tensor
    """[L, H, F]"""
    scales: tuple[torch.Tensor, torch.Tensor] | None = None
    """float32 of blocks of 128 x 128, where the weights are float8_e4m3fn."""


class ExpertRowsOfLayer:
    """Brings the tokens of one layer to their experts. All ranks make it, in one order, and call it in one order.

    With `exact` the host knows how many rows came, and experts get these rows alone. On GPUs it waits for the number
    once a layer. Without `exact` a step can be captured in a CUDA graph: experts get as many rows as could come from
    `most` tokens a rank. So there is an exchange for each power of two up to the most tokens of any step.

    `first_id` is the id of this rank's first expert in `ids`.
    """

    def __init__(self, world: World, spec: ExchangeSpec, options: Options, *, exact: bool, first_id: int) -> None:
        self.world, self.spec, self.exact, self.first_id = world, spec, exact, first_id
        self.site = world.shared(SharedExchanges).next_number()
        sizes = [spec.tokens] if exact and world.device.type == "cpu" else sizes_of_steps(spec.tokens)
        self._exchanges = {
            tokens: world.exchange(replace(spec, tokens=tokens), options.backend, sms=options.sms)
            for tokens in reversed(sizes)  # the first one makes the memory that all of them use
        }
        self._got: tuple[Exchange, Dispatched] | None = None
        if not exact and not self.largest.capturable:
            raise ConfigError(
                f"the exchange is {self.largest.backend}, which no CUDA graph captures: take another backend, or run "
                "the engine eagerly"
            )

    @property
    def largest(self) -> Exchange:
        """The exchange for the most tokens."""
        return self._exchanges[self.spec.tokens]

    def bring(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, most: int, scales: torch.Tensor | None = None
    ) -> Brought:
        """Send tokens as `send` does, and number the rows that came."""
        got = self.send(x, ids, weights, most, scales)
        there = got.count() if self.exact else len(got.x)
        # Scales lie column by column, and kernels of engines want them row by row.
        row_scales = None if got.scales is None else got.scales[:there].contiguous()
        local, row_weights = self._experts_of_rows(got, there)
        row_ids = torch.where(local >= 0, local + self.first_id, -1)
        return Brought(got.x[:there], row_scales, row_ids, row_weights, got.expert_counts)

    def send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, most: int, scales: torch.Tensor | None = None
    ) -> Dispatched:
        """Send tokens, with the `scales` of values that are fp8 already. No rank gives more than `most` tokens."""
        size = min(size for size in self._exchanges if size >= min(most, self.spec.tokens))
        exchange = self._exchanges[size]
        dtype = getattr(torch, self.spec.output_dtype)
        # Memory of the caller's allocator, or of the graph that is captured; nothing here keeps it after the layer.
        out = torch.empty(exchange.spec.rows(self.world.size), self.spec.hidden, dtype=dtype, device=x.device)
        tokens = Tokens(x.contiguous(), ids.contiguous(), weights.float().contiguous(), None, scales, False, self.site)
        got = exchange.dispatch_unkept(tokens, out)
        self._got = exchange, got
        return got

    def multiply(self, weights: ExpertWeights) -> torch.Tensor:
        """Return the results of the experts, [C, H], row by row of those that came. The host waits for nothing.

        Between CPU ranks rows cross wide. Experts of fp8 quantise them here then.
        """
        assert self._got is not None, "products follow a dispatch"
        _, got = self._got
        places = got.expert_offsets, got.expert_counts
        if weights.scales is None:
            return grouped_linear(grouped_swiglu(got.x, weights.gate_up, *places), weights.down, *places)
        of_gate_up, of_down = weights.scales
        rows = quantise(got.x) if got.scales is None else (got.x, got.scales)
        h = grouped_swiglu(rows, (weights.gate_up, of_gate_up), *places, output="float8_e4m3")
        return grouped_linear(h, (weights.down, of_down), *places).to(getattr(torch, self.spec.dtype))

    def _experts_of_rows(self, got: Dispatched, there: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of each row's experts on this rank, -1 where there is none, and the weights."""
        if got.topk_idx is not None:
            return got.topk_idx[:there], got.weights[:there]
        places = torch.arange(there, dtype=torch.int32, device=got.weights.device)
        expert = torch.searchsorted(got.expert_offsets[1:], places, right=True, out_int32=True)
        return torch.where(expert < len(got.expert_counts), expert, -1)[:, None], got.weights[:there, None]

    def combine(self, rows: torch.Tensor, weighted: bool, out: torch.Tensor) -> None:
        """Write the sum of each token's results to `out`, times the weights if `weighted`.

        With layout `token` a row is the weighted sum of its experts' results already.
        """
        assert self._got is not None, "a combine follows a dispatch"
        (exchange, got), self._got = self._got, None
        rows = rows.reshape(-1, self.spec.hidden)
        if rows.data_ptr() == out.data_ptr():  # an engine may let experts write to the memory of the output
            out.copy_(exchange.combine_unkept(rows, got, weighted))
        else:
            exchange.combine_unkept(rows, got, weighted, out)


def sizes_of_steps(most: int) -> list[int]:
    """Return the sizes for which there are exchanges.

    >>> sizes_of_steps(12), sizes_of_steps(1)
    ([1, 2, 4, 8, 12], [1])
    """
    return [*(2**power for power in range((most - 1).bit_length())), most]


class FailureWatch:
    """Ends this process when a wait of an exchange has failed. Closed with the world.

    Replays of graphs raise nothing: after a failed wait their results would be NaN, and the engine would go on.
    """

    def __init__(self, world: World) -> None:
        self._failures: list[Callable[[], RaymoeError | None]] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"raymoe failures of rank {world.rank}", daemon=True)
        self._thread.start()

    def add(self, exchange: Exchange) -> None:
        """Watch an exchange, and those that share its workspace."""
        if exchange.failure not in self._failures:
            self._failures.append(exchange.failure)

    def close(self, together: bool) -> None:  # noqa: ARG002
        """Stop."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(0.2):
            for failure in tuple(self._failures):
                if (error := failure()) is not None:
                    print(f"raymoe ends this process, whose experts cannot go on: {error}", file=sys.stderr, flush=True)
                    os._exit(1)
