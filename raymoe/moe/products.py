"""Products of experts by kernels/moe/product.cu: each expert's rows times its weights.

The kernel takes weights as rows of its tiles and tokens as columns, in steps of 8. So an expert costs the rows that it
has. docs/products.md says when that pays.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import inf
from typing import Annotated

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import F32, U32, Address, Params
from raymoe.cuda.tensor_map import EncodedMap, TensorMap
from raymoe.errors import ConfigError
from raymoe.exchange.peer.column_pieces import ColumnPieces
from raymoe.exchange.peer.trace import traced
from raymoe.rows.pipe_tensors import ALIGNMENT

THREADS = 384
ROW_BYTES = 128
"""Of a row of weights or tokens in a stage."""
HALF_ROWS = 128
"""Rows of weights in each half of a tile."""
PIECE = 64
"""Outputs of transposed weights in a box."""
TOKEN_BOXES = (64, 32, 16, 8)
SHARED_BYTES = 227 << 10
ELEMENTS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float8_e4m3fn: "uint8"}
OUTPUT_STEP, COLUMN_STEP = 16, 8
"""Outputs and columns of a weight are multiples of these."""


@dataclass(frozen=True)
class TileClass:
    """A build of the kernel: the most tokens of a tile, and its stages."""

    tokens: int
    stages: int

    @property
    def stage_bytes(self) -> int:
        return (2 * HALF_ROWS + self.tokens) * ROW_BYTES

    def shared_bytes(self, experts: int) -> int:
        """The stages, their barriers, two records of tiles with theirs, and the first tile of each expert.

        >>> TileClass(176, 4).shared_bytes(256) <= SHARED_BYTES
        True
        """
        return self.stages * (self.stage_bytes + 16) + 2 * (16 + 32) + 4 * (experts + 1)


TILES = TileClass(176, 4)
"""The class that is the fastest from one row of an expert to thousands (docs/products.md)."""


@dataclass(frozen=True)
class ProductParams(Params):
    """The parameters of kernels/moe/product.cu."""

    first: EncodedMap
    second: EncodedMap
    tokens: Annotated[tuple[EncodedMap, ...], EncodedMap.array(len(TOKEN_BOXES))]
    expert_offsets: Address
    expert_counts: Address
    y: Address
    gate_up: Address
    bias: Address
    row_weights: Address
    taken: Address
    trace: Address
    experts: U32
    outputs: U32
    columns: U32
    alpha: F32
    limit: F32
    up_plus: F32
    pieces: Address = 0
    dispatch: Address = 0
    piece_tiles: U32 = 0
    unused: U32 = 0
    unused_too: Annotated[tuple[int, ...], ctypes.c_uint64 * 2] = (0,) * 2


@dataclass(frozen=True)
class Gate:
    """How gate and up become one: see `Activation`."""

    interleaved: bool = False
    alpha: float = 1.0
    limit: float = inf
    up_plus: float = 0.0

    @property
    def general(self) -> bool:
        return (self.alpha, self.limit, self.up_plus) != (1.0, inf, 0.0)


@dataclass(slots=True)
class Product:
    """x[C, K] times weight[L, N, K], of bfloat16 or float16. The offsets are int32[L + 1], the counts int32[L].

    `weight` is contiguous; or, without a gate, its `weight.transpose(1, 2)` is.

    Without a gate y is [C, N]. With one, N is gate and up rows, y is [C, N / 2], and `gate_up`, [C, N], takes the
    products. `bias` is [L, N], `row_weights` float32[C]. With `zero_gaps` a gap becomes zeros up to a multiple of 16.
    `trace`, int64[blocks, 16], takes the times of blocks, by the points of raymoe/exchange/peer/trace.py. With `pieces`
    y is stored piece of columns by piece, for the combine that comes next in the stream.
    """

    x: torch.Tensor
    weight: torch.Tensor
    offsets: torch.Tensor
    counts: torch.Tensor
    y: torch.Tensor
    gate: Gate | None = None
    gate_up: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    row_weights: torch.Tensor | None = None
    zero_gaps: bool = False
    tiles: TileClass = TILES
    trace: torch.Tensor | None = None
    pieces: ColumnPieces | None = None

    @property
    def reads(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors that the kernel reads."""
        return self.x, self.weight, self.offsets, self.counts, self.bias, self.row_weights

    @property
    def outputs(self) -> int:
        return self.weight.shape[1] // (1 if self.gate is None else 2)

    @property
    def transposed(self) -> bool:
        return not self.weight.is_contiguous()

    @property
    def element(self) -> str:
        """The type of operands for tensor maps."""
        return ELEMENTS[self.x.dtype]

    @property
    def _stage_columns(self) -> int:
        return ROW_BYTES // self.x.element_size()

    @property
    def most_tiles(self) -> int:
        """An upper bound of the number of tiles, from the sizes alone.

        >>> x, weight, places = torch.empty(352, 64), torch.empty(2, 512, 64), torch.empty(3)
        >>> Product(x, weight, places, places, x).most_tiles
        8
        """
        experts, rows = self.weight.shape[0], len(self.x)
        outputs_of_tile = 2 * HALF_ROWS if self.gate is None else HALF_ROWS
        return -(-self.outputs // outputs_of_tile) * (min(experts, rows) + rows // self.tiles.tokens)

    def source(self) -> KernelSource:
        """Return the build for this product."""
        switches = {
            "GATED_ROWS": self.gate is not None,
            "INTERLEAVED": self.gate is not None and self.gate.interleaved,
            "TRANSPOSED_WEIGHTS": self.transposed,
            "GENERAL_GATE": self.gate is not None and self.gate.general,
            "STORES_GATE_UP": self.gate_up is not None,
            "BIASED_ROWS": self.bias is not None,
            "WEIGHTED_ROWS": self.row_weights is not None,
            "ZERO_GAPS": self.zero_gaps,
            "HALF_FLOATS": self.element == "float16",
            "TELLS_PIECES": self.pieces is not None,
        }
        defines = [("MOST_TOKENS", str(self.tiles.tokens)), ("PRODUCT_STAGES", str(self.tiles.stages))]
        defines += [(name, "1") for name, wanted in switches.items() if wanted]
        defines += traced(self.trace is not None)
        return KernelSource("moe/product", (ProductParams, EncodedMap), tuple(defines))

    def maps(self) -> tuple[TensorMap, TensorMap, tuple[TensorMap, ...]]:
        """Return the maps of both halves of the weights, and of the tokens by boxes of 64, 32, 16 and 8 rows."""
        return *self.weight_maps(), self.token_maps()

    def weight_maps(self) -> tuple[TensorMap, TensorMap]:
        """Return the maps of both halves of the weights: gate and up, or twice the whole."""
        experts, rows, columns = self.weight.shape
        if self.transposed:
            output_bytes = rows * self.weight.element_size()
            sizes, strides = (rows, columns, experts), (output_bytes, columns * output_bytes)
            whole = TensorMap(self.weight.data_ptr(), sizes, strides, (PIECE, self._stage_columns, 1), self.element)
            return whole, whole
        row_bytes = columns * self.weight.element_size()
        interleaved = self.gate is not None and self.gate.interleaved
        between = 2 * row_bytes if interleaved else row_bytes
        sizes = (columns, self.outputs, experts)
        strides, box = (between, rows * row_bytes), (self._stage_columns, HALF_ROWS, 1)
        up = 0 if self.gate is None else row_bytes if interleaved else self.outputs * row_bytes
        at = self.weight.data_ptr()
        first, second = (TensorMap(address, sizes, strides, box, self.element) for address in (at, at + up))
        return first, second

    def token_maps(self) -> tuple[TensorMap, ...]:
        """Return the maps of the tokens, by boxes of 64, 32, 16 and 8 rows."""
        rows, columns = self.x.shape
        strides, width = (columns * self.x.element_size(),), self._stage_columns
        return tuple(
            TensorMap(self.x.data_ptr(), (columns, rows), strides, (width, box_rows), self.element)
            for box_rows in TOKEN_BOXES
        )

    def check(self) -> None:
        """Refuse what the kernel cannot compute."""
        columns = self.weight.shape[2]
        if not fits(self.outputs, columns):
            raise ConfigError(
                f"{self.outputs} outputs of {columns} columns; the product takes multiples of {OUTPUT_STEP} outputs "
                f"and {COLUMN_STEP} columns"
            )
        for name in ("x", "weight", "y", "gate_up"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.data_ptr() % ALIGNMENT:
                raise ConfigError(f"product: {name} does not begin at a multiple of {ALIGNMENT} bytes: call .clone()")

    def params(self, encoded: tuple[EncodedMap, EncodedMap, tuple[EncodedMap, ...]], taken: int) -> ProductParams:
        """Return the parameters; `taken` is the address of the counter of tiles."""
        gate = self.gate or Gate()
        first, second, tokens = encoded
        return ProductParams(
            first=first,
            second=second,
            tokens=tokens,
            expert_offsets=self.offsets.data_ptr(),
            expert_counts=self.counts.data_ptr(),
            y=self.y.data_ptr(),
            gate_up=0 if self.gate_up is None else self.gate_up.data_ptr(),
            bias=0 if self.bias is None else self.bias.data_ptr(),
            row_weights=0 if self.row_weights is None else self.row_weights.data_ptr(),
            taken=taken,
            trace=0 if self.trace is None else self.trace.data_ptr(),
            experts=self.weight.shape[0],
            outputs=self.outputs,
            columns=self.weight.shape[2],
            alpha=gate.alpha,
            limit=gate.limit,
            up_plus=gate.up_plus,
            pieces=self.told[0],
            dispatch=self.told[1],
            piece_tiles=0 if self.pieces is None else self.pieces.piece_tiles,
        )

    @property
    def told(self) -> tuple[int, int]:
        """The parameters `pieces` and `dispatch`."""
        return (0, 0) if self.pieces is None else (self.pieces.words.data_ptr(), self.pieces.dispatch)


def is_dense(weight: torch.Tensor, gated: bool) -> bool:
    """Whether the kernel takes the strides of a weight.

    >>> weight = torch.empty(2, 16, 8)
    >>> is_dense(weight, True), is_dense(weight.transpose(1, 2), False), is_dense(weight.transpose(1, 2), True)
    (True, True, False)
    """
    return weight.is_contiguous() or (not gated and weight.transpose(1, 2).is_contiguous())


def fits(outputs: int, columns: int) -> bool:
    """Whether the kernel computes as many outputs of as many columns.

    >>> fits(16, 8), fits(24, 64), fits(16, 12)
    (True, False, False)
    """
    return outputs % OUTPUT_STEP == 0 and columns % COLUMN_STEP == 0 and min(outputs, columns) > 0
