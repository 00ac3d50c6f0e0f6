"""The tensors, exchanges and products of a layer for combine_beside_product.py, whole and in pieces of columns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

import raymoe.moe.product_fp8_launch as product_fp8_launch
import raymoe.moe.product_launch as product_launch
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.backend import column_pieces as pieces_of_dispatch
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.peer import column_pieces
from raymoe.exchange.peer.workspace import Workspace
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8, FP8_BLOCK, quantise, quantise_weight
from raymoe.memory.world import World
from raymoe.moe.differentiable import expert_major, expert_major_pair
from raymoe.moe.product_fp8 import TILES as SCALED_TILES
from raymoe.moe.product_fp8 import ScaledProduct
from raymoe.moe.products import Gate, Product
from raymoe.moe.scaled_layer import scaled_spec
from raymoe.rows.row_results import new_quantised

LAST_COLUMNS = (1024, 512)
"""Columns that are combined after the product."""
PIECES = (2, 4)
"""Numbers of pieces of columns, each a product and a combine of its own."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer; `tokens` of each rank."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    topk: int

    def spec(self) -> ExchangeSpec:
        return ExchangeSpec(self.tokens, self.hidden, self.experts, self.topk, depth=0)


@dataclass(slots=True)
class FewerBlocks(Product):
    """A product of at most so many blocks, which leaves SMs to others."""

    blocks: int = 0

    @property
    def most_tiles(self) -> int:
        tiles: int = Product.most_tiles.fget(self)  # type: ignore[attr-defined]
        return min(self.blocks, tiles)


@dataclass(frozen=True)
class ExpertProduct:
    """A product of this rank's experts, whose launches may have any number of blocks."""

    x: torch.Tensor
    weight: torch.Tensor
    places: tuple[torch.Tensor, torch.Tensor]
    y: torch.Tensor
    gated: bool
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
    """Of 8-bit operands: those of rows, of weights and of 8-bit results."""

    def launch(
        self, blocks: int, trace: torch.Tensor | None = None, pieces: column_pieces.ColumnPieces | None = None
    ) -> None:
        form: dict[str, Any] = {"gate": Gate() if self.gated else None, "trace": trace, "blocks": blocks}
        form["pieces"] = pieces
        if self.scales is None:
            product_launch.launch(FewerBlocks(self.x, self.weight, *self.places, self.y, **form))
            return
        product = FewerBlocks(self.x, self.weight, *self.places, self.y, tiles=SCALED_TILES, **form)
        product_fp8_launch.launch(ScaledProduct(product, *self.scales))


@dataclass(frozen=True)
class PartOfCombine:
    """A combine of some columns, by exchanges on each number of SMs."""

    results: torch.Tensor
    y: torch.Tensor
    exchanges: dict[int | str, tuple[Exchange, Dispatched]]

    def run(self, limit: int | str) -> None:
        exchange, got = self.exchanges[limit]
        exchange.combine(self.results, got, out=self.y)


@dataclass(frozen=True)
class Pieces:
    """The down product and its combine in pieces of columns: a product for each, and exchanges for any of them."""

    products: list[ExpertProduct]
    sums: list[torch.Tensor]
    exchanges: dict[int | str, tuple[Exchange, Dispatched]]

    def combine(self, piece: int, limit: int | str) -> None:
        exchange, got = self.exchanges[limit]
        exchange.combine(self.products[piece].y, got, out=self.sums[piece])


class LayerTensors:
    """The tokens, rows and weights of one shape and dtype on this rank, and exchanges on each number of SMs."""

    def __init__(self, world: World, shape: Shape, dtype: str, sms: Sequence[int], stack: ExitStack) -> None:
        self.world, self.shape, self.dtype, device = world, shape, dtype, world.device
        torch.manual_seed(world.rank)
        spec = scaled_spec(shape.spec(), world, "auto") if dtype == FP8 else shape.spec()
        specs = {last: (columns_of(shape, shape.hidden - last), columns_of(shape, last)) for last in LAST_COLUMNS}
        of_pieces = {count: columns_of(shape, shape.hidden // count) for count in PIECES}
        others = [*(each for pair in specs.values() for each in pair), *of_pieces.values()]
        self.space = stack.enter_context(Workspace(world, spec, *others))
        self.exchanges: dict[int | str, Exchange] = {
            limit: stack.enter_context(self._exchange(spec, limit)) for limit in ("auto", *sms)
        }
        self.x = torch.randn(shape.tokens, shape.hidden, dtype=torch.bfloat16, device=device)
        scores = torch.rand(shape.tokens, shape.experts, device=device)
        self.weights, self.ids = scores.topk(shape.topk)
        self.spec = self.exchanges["auto"].spec
        self.got: dict[int | str, Dispatched] = {}
        self.out = self._rows_of_exchange()
        for limit in self.exchanges:
            self.got[limit] = self.dispatch(limit, self.out)
        self.results = torch.randn(len(self.out), shape.hidden, dtype=torch.bfloat16, device=device)
        self.summed = torch.empty(shape.tokens, shape.hidden, dtype=torch.bfloat16, device=device)
        self.parts = {
            last: (self._part(most, 0, sms, stack), self._part(rest, most.hidden, ["auto"], stack))
            for last, (most, rest) in specs.items()
        }
        self.products = {"up": self._up(), "down": self._down()}
        self.pieces = {count: self._pieces(each, count, sms, stack) for count, each in of_pieces.items()}
        self.out = self._rows_of_exchange()  # the product keeps the rows that came

    def _exchange(self, spec: ExchangeSpec, limit: int | str) -> Exchange:
        return Exchange(self.world, spec, "fused", workspace=self.space, sms=limit)

    def told(self, limit: int) -> column_pieces.ColumnPieces:
        """Return the pieces of the down product, which leaves so many SMs to the combine beside it."""
        pieces = pieces_of_dispatch(self.got["auto"])
        assert pieces is not None
        return replace(pieces, sms=limit)

    def enqueue_told(self, limit: int, trace: torch.Tensor | None = None) -> None:
        """Enqueue the down product, which stores its columns in pieces, and the combine of its rows beside it."""
        down, pieces = self.products["down"], self.told(limit)
        pieces.rows = down.y
        down.launch(self.world.gpu.sms, trace, pieces)
        self.exchanges["auto"].combine_unkept(down.y, self.got["auto"], True, self.summed, pieces)

    def forget_told(self, limit: int) -> None:
        """Let the next product of the same dispatch begin anew: a layer has one for each dispatch."""
        self.told(limit).words.zero_()

    def _part(self, spec: ExchangeSpec, begin: int, sms: Sequence[int | str], stack: ExitStack) -> PartOfCombine:
        """Make the combine of the columns from `begin` on, as many as the spec has."""
        results = self.results[:, begin : begin + spec.hidden].contiguous()
        return PartOfCombine(results, self._sums(spec), self._exchanges_of(spec, sms, stack))

    def _pieces(self, spec: ExchangeSpec, count: int, sms: Sequence[int], stack: ExitStack) -> Pieces:
        down, width = self.products["down"], spec.hidden
        products = []
        for begin in range(0, self.shape.hidden, width):
            weight = down.weight.view(torch.uint8)[:, begin : begin + width].contiguous().view(down.weight.dtype)
            scales = None
            if down.scales is not None:
                of_x, of_weight, _ = down.scales
                blocks = slice(begin // FP8_BLOCK, (begin + width) // FP8_BLOCK)
                scales = of_x, of_weight[:, blocks].contiguous(), None
            y = torch.zeros(len(down.x), width, dtype=torch.bfloat16, device=down.x.device)
            products.append(ExpertProduct(down.x, weight, down.places, y, False, scales))
        sums = [self._sums(spec) for _ in products]
        assert len(products) == count
        return Pieces(products, sums, self._exchanges_of(spec, ["auto", *sms], stack))

    def _sums(self, spec: ExchangeSpec) -> torch.Tensor:
        return torch.empty(self.shape.tokens, spec.hidden, dtype=torch.bfloat16, device=self.x.device)

    def _exchanges_of(
        self, spec: ExchangeSpec, sms: Sequence[int | str], stack: ExitStack
    ) -> dict[int | str, tuple[Exchange, Dispatched]]:
        """Make exchanges on each number of SMs, with a dispatch of some columns of the tokens."""
        x = self.x[:, : spec.hidden].contiguous()
        out = torch.empty(spec.rows(self.world.size), spec.hidden, dtype=x.dtype, device=x.device)
        exchanges: dict[int | str, tuple[Exchange, Dispatched]] = {}
        for limit in sms:
            exchange = stack.enter_context(self._exchange(spec, limit))
            exchanges[limit] = exchange, exchange.dispatch(x, self.ids, self.weights, out=out, zero_gaps=False)
        return exchanges

    def _rows_of_exchange(self) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.spec.output_dtype)
        size = self.spec.rows(self.world.size), self.spec.hidden
        return torch.zeros(size, dtype=dtype, device=self.world.device)

    def dispatch(self, limit: int | str, out: torch.Tensor) -> Dispatched:
        return self.exchanges[limit].dispatch(self.x, self.ids, self.weights, out=out, zero_gaps=False)

    def combine(self, limit: int | str) -> None:
        self.exchanges[limit].combine(self.results, self.got[limit], out=self.summed)

    def run(self, op: str, limit: int | str) -> None:
        """Enqueue an operation of the exchange."""
        if op == "combine":
            self.combine(limit)
        else:
            self.dispatch(limit, self.out)

    def result_of(self, op: str) -> torch.Tensor:
        """Return the memory that an operation writes, as bytes."""
        tensor = {"combine": self.summed, "dispatch": self.out}.get(op)
        return (self.products[op].y if tensor is None else tensor).view(torch.uint8)

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        got = self.got["auto"]
        return got.expert_offsets.to(torch.int32).clone(), got.expert_counts.to(torch.int32).clone()

    def _up(self) -> ExpertProduct:
        shape, got = self.shape, self.got["auto"]
        if got.scales is None and self.dtype == FP8:  # CPU ranks exchange rows as they are
            rows, of_rows = quantise(expert_major(got))
        elif self.dtype == FP8:
            rows, of_rows = expert_major_pair(got)
        else:
            rows = expert_major(got)
        weight, of_weight = self._weights(2 * shape.ffn, shape.hidden)
        if of_weight is None:
            y = torch.zeros(len(rows), shape.ffn, dtype=torch.bfloat16, device=rows.device)
            return ExpertProduct(rows, weight, self._places(), y, gated=True)
        y, of_y = new_quantised(torch.Size((len(rows), shape.ffn)), rows.device, column=True)
        y.view(torch.uint8).zero_()
        return ExpertProduct(rows, weight, self._places(), y, True, (of_rows, of_weight, of_y))

    def _down(self) -> ExpertProduct:
        shape, device = self.shape, self.world.device
        weight, of_weight = self._weights(shape.hidden, shape.ffn)
        y = torch.zeros(len(self.out), shape.hidden, dtype=torch.bfloat16, device=device)
        h = torch.randn(len(self.out), shape.ffn, dtype=torch.bfloat16, device=device)
        if of_weight is None:
            return ExpertProduct(h, weight, self._places(), y, gated=False)
        values, of_values = quantise(h)
        return ExpertProduct(values, weight, self._places(), y, False, (of_values, of_weight, None))

    def _weights(self, outputs: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw the weights of this rank's experts. Those of 8 bits are drawn expert by expert: they are wider first."""
        experts, device = self.spec.local_experts(self.world.size), self.world.device
        size = experts, outputs, columns
        if self.dtype != FP8:
            return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=columns**-0.5), None
        one = quantise_weight(torch.empty(size[1:], device=device).normal_(std=columns**-0.5))
        values, scales = (part.new_empty(experts, *part.shape) for part in one)
        for expert in range(experts):
            drawn = quantise_weight(torch.empty(size[1:], device=device).normal_(std=columns**-0.5))
            values[expert], scales[expert] = drawn
        return values, scales


def columns_of(shape: Shape, hidden: int) -> ExchangeSpec:
    return replace(shape, hidden=hidden).spec()
