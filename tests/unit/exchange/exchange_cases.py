"""Cases of the exchange tests: a spec, a few steps, and the code that a rank runs for them.

The reference here is an oracle in float64 that uses no plans or slots: y = sum over k of w * f_e(x). Every expert has
a different map f_e, which is not linear through zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from raymoe.exchange.backend import Dispatched
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from tests.unit.exchange.nccl.gloo_rounds import on_tensors

BOUND = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
ROUTINGS = ("uniform", "repeated", "one", "none", "masked", "skewed")


@dataclass(frozen=True)
class Case:
    ranks: int
    spec: ExchangeSpec
    backend: str
    routing: tuple[str, ...]  # of each step
    seed: int = 0
    ragged: bool = True
    prefix: bool = False  # send num_tokens < T'
    weighted: bool = True
    given: bool = False  # memory given by the caller
    wide_topk_idx: bool = True
    exact: bool = False  # combine the rows that came alone: the host reads their number
    sms: int | None = None  # the limit that a caller sets on a GPU; None leaves it to the exchange


@dataclass
class Batch:
    """The input of one rank in one step."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    num_tokens: int

    def on(self, device: torch.device) -> Batch:
        return Batch(self.x.to(device), self.ids.to(device), self.weights.to(device), self.num_tokens)


@dataclass
class Result:
    """The output of one rank in one step; rows in float32, which holds each of the dtypes exactly."""

    x: np.ndarray
    weights: np.ndarray
    offsets: list[int]
    counts: list[int]
    y: np.ndarray


def batches(case: Case, step: int) -> list[Batch]:
    """Make the batches of all ranks; every rank and the judge make the same ones."""
    spec, drawn = case.spec, []
    for rank in range(case.ranks):
        rng = np.random.default_rng((case.seed, step, rank))
        tokens = int(rng.integers(0, spec.tokens + 1)) if case.ragged else spec.tokens
        ids = route(case.routing[step], rng, tokens, spec)
        x = torch.from_numpy(rng.uniform(-2, 2, (tokens, spec.hidden))).to(getattr(torch, spec.dtype))
        weights = torch.from_numpy(rng.uniform(0.1, 1, (tokens, spec.topk)).astype(np.float32))
        count = int(rng.integers(0, tokens + 1)) if case.prefix else tokens
        ids = ids.astype(np.int64 if case.wide_topk_idx else np.int32)
        drawn.append(Batch(x, torch.from_numpy(ids), weights, count))
    return drawn


def route(kind: str, rng: np.random.Generator, tokens: int, spec: ExchangeSpec) -> np.ndarray:
    shape = (tokens, spec.topk)
    if kind == "none":
        return np.full(shape, -1)
    if kind == "one":
        return np.full(shape, spec.experts - 1)
    if kind == "repeated":  # a token may name one expert several times
        return rng.integers(0, spec.experts, shape)
    ids = np.array([rng.permutation(spec.experts)[: spec.topk] for _ in range(tokens)]).reshape(shape)
    if kind == "masked":
        ids[rng.random(shape) < 0.5] = -1
    if kind == "skewed":
        ids[rng.random(shape) < 0.7] = 0
    return ids


def expert_map(expert: int, x: np.ndarray) -> np.ndarray:
    return x * (0.5 + expert / 8) + (expert - 2.25) / 4


def oracle(batch: Batch, weighted: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the expected y, and for each element the sum of |w * row|, to which errors are relative.

    Experts return rows of the batch's dtype. Their rounding is not an error of the exchange.
    """
    x = batch.x.double().numpy()
    want, scale = np.zeros_like(x), np.zeros_like(x)
    for token in range(batch.num_tokens):
        for expert, weight in zip(batch.ids[token].tolist(), batch.weights[token].double().tolist(), strict=True):
            if expert >= 0:
                row = torch.from_numpy(expert_map(expert, x[token])).to(batch.x.dtype).double().numpy()
                row = row * (weight if weighted else 1.0)
                want[token] += row
                scale[token] += np.abs(row)
    return want, scale


ENGINE = "engine staged"
"""A case's backend: staged, with rows moved by the copy engine."""
MANY = "many fused"
CHUNKED = "chunked fused"
"""A case's backend: fused, with the kernels for many tokens."""


def spec_of(case: Case) -> ExchangeSpec:
    return replace(case.spec, transport="copy_engine") if case.backend == ENGINE else case.spec


def open_exchange(world: World, case: Case, **options: Any) -> Exchange:
    """Open the exchange of a case.

    Backend `tensor NAME` runs the GPU ranks' backend NAME on CPU ranks. MANY is `fused` with the kernels for many
    tokens, however few there are. CHUNKED is `fused` between domains, with rows in chunks, the last of them smaller.
    """
    kind, _, name = case.backend.rpartition(" ")
    if case.sms is not None:
        options["sms"] = case.sms
    if case.backend == CHUNKED:
        return Exchange(world, case.spec, backend=name, chunk=case.spec.tokens // 5 + 3, **options)
    if case.backend == MANY:
        with mock.patch("raymoe.exchange.peer.workspace.FEW_TOKENS", 0):
            return Exchange(world, case.spec, backend=name, **options)
    if kind in ("", "engine"):
        return Exchange(world, spec_of(case), backend=name, **options)
    with mock.patch("raymoe.exchange.exchange.make_backend", on_tensors):
        return Exchange(world, case.spec, backend=name, **options)


def run_case(world: World, case: Case) -> list[Result]:
    """Run all steps of a case on a rank, in one exchange."""
    with open_exchange(world, case) as exchange:
        for rows in exchange._own:
            rows.fill_(torch.nan)
        return [run_step(exchange, case, batches(case, step)[world.rank]) for step in range(len(case.routing))]


def run_step(exchange: Exchange, case: Case, batch: Batch) -> Result:
    """Run one step without capture. On a GPU nothing waits before `check`."""
    spec, capacity, device = case.spec, case.spec.rows(case.ranks), exchange.world.device
    own = batch.on(device)
    out = torch.full((capacity, spec.hidden), torch.nan, dtype=own.x.dtype, device=device) if case.given else None
    into = torch.full_like(own.x, torch.nan) if case.given else None
    count: Any = own.num_tokens
    if case.wide_topk_idx:
        count = torch.tensor([count], dtype=torch.int32, device=device)
    got = exchange.dispatch(own.x, own.ids, own.weights, count, out=out if spec.layout == "expert" else None)
    x = expert_major(got)
    rows = apply_experts(exchange, got, x)
    if case.exact:  # in memory of their own, after which nothing is
        rows = rows[: len(got.exact().weights)].clone()
    y = exchange.combine(rows, got, weighted=case.weighted, out=into)
    exchange.check()
    return result_of(got, x, y)


def result_of(got: Dispatched, x: torch.Tensor, y: torch.Tensor) -> Result:
    offsets = got.expert_offsets.tolist()
    return Result(
        x[: offsets[-1]].float().cpu().numpy().copy(),
        got.weights.cpu().numpy(),
        offsets,
        got.expert_counts.tolist(),
        y.float().cpu().numpy(),
    )


def standing(got: Dispatched) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each of C places the local expert whose rows are there or just before, and whether it holds a row."""
    offsets, counts = got.expert_offsets, got.expert_counts
    places = torch.arange(len(got.weights), dtype=offsets.dtype, device=offsets.device)
    expert = torch.searchsorted(offsets[1:], places, right=True).clamp(max=len(counts) - 1)
    return expert, (places >= offsets[expert]) & (places < offsets[expert] + counts[expert])


def expert_major(got: Dispatched) -> torch.Tensor:
    """Return the rows of the C places, without a wait. Gaps keep their content: zeros with padding `zero`."""
    if got.index is None:
        return got.x
    last = got.expert_offsets[-1]
    places = torch.arange(len(got.index), device=got.index.device)
    return got.x.index_select(0, torch.where(places < last, got.index, got.index[0].clamp(0, len(got.x) - 1)))


def apply_experts(exchange: Exchange, got: Dispatched, x: torch.Tensor) -> torch.Tensor:
    """Return the rows of this rank's experts, without a wait. Other rows are NaN and must not change the result."""
    local, there = standing(got)
    expert = (local + exchange.world.rank * len(got.expert_counts)).double()[:, None]
    rows = x.double() * (0.5 + expert / 8) + (expert - 2.25) / 4  # as `expert_map` has it
    return torch.where(there[:, None], rows, torch.nan).to(x.dtype)
