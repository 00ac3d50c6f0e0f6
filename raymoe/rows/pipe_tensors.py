"""The tensors of kernels over rows: their checks, and the parameters with their addresses and strides."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from raymoe.cuda.params import ROW_TYPES, U32, U64, Address, Params
from raymoe.errors import ConfigError
from raymoe.rows.pipe_shape import MOST_HIDDEN, PipeShape
from raymoe.rows.row_launch import MOST_TILES, too_many_tiles

SCALED = 128
"""Elements of a row of 8-bit floats that share a scale."""
EIGHT = 8
"""Elements that a thread moves at a time."""
ALIGNMENT = 16
"""Bytes: bulk copies begin and end at multiples of it."""


@dataclass(frozen=True)
class PipeRows(Params):
    """Twin of the struct in kernels/include/raymoe/rows/tiles.cuh."""

    at: Address = 0
    stride: U64 = 0
    eight_bytes: U32 = 0
    offset: U32 = 0


@dataclass(frozen=True)
class PipeWork(Params):
    """Twin of the struct in kernels/include/raymoe/rows/tiles.cuh."""

    rows: U64
    taken: Address
    """The counter of a dynamic kernel. Each launch sets it."""
    tiles: U32
    tile_rows: U32
    pieces: U32
    piece: U32
    width: U32
    stage_bytes: U32


@dataclass(frozen=True)
class PipeFp8(Params):
    """Twin of the struct in kernels/include/raymoe/rows/elements.cuh."""

    values: Address = 0
    stride: U64 = 0
    scales: Address = 0
    scale_row: U64 = 0
    scale_block: U64 = 0


STRUCTS = (PipeRows, PipeWork, PipeFp8)


def row_type(tensor: torch.Tensor) -> str:
    """The name that the kernels have for a dtype."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ROW_TYPES:
        raise ConfigError(f"a tensor of {name}; the kernels take {', '.join(ROW_TYPES)}")
    return ROW_TYPES[name]


def registers_of(tensor: torch.Tensor) -> int:
    """The 32-bit registers that hold eight elements of a tensor."""
    return EIGHT * tensor.element_size() // 4


def takes_hidden(hidden: int) -> bool:
    return hidden % EIGHT == 0 and EIGHT <= hidden <= MOST_HIDDEN


def check_hidden(hidden: int) -> int:
    if not takes_hidden(hidden):
        raise ConfigError(
            f"rows of {hidden} elements; the kernels take multiples of {EIGHT} up to {MOST_HIDDEN}: pad the rows, or "
            "run on the CPU"
        )
    return hidden


def work_of(shape: PipeShape, rows: int, hidden: int) -> PipeWork:
    """The tiles of `rows` rows, cut as `shape` says.

    >>> work_of(PipeShape("PIPED", 2, 1, 4, 1024, tile_rows=1, piece=16), rows=3, hidden=200)
    PipeWork(rows=3, taken=0, tiles=6, tile_rows=1, pieces=2, piece=16, width=25, stage_bytes=1024)
    """
    width = hidden // EIGHT
    piece = shape.piece or width
    pieces = -(-width // piece)
    tiles = -(-rows // shape.tile_rows) * pieces
    if tiles >= MOST_TILES:
        raise too_many_tiles(rows)
    return PipeWork(rows, 0, tiles, shape.tile_rows, pieces, piece, width, shape.stage_bytes)


# The kinds of tensors for which launches are prepared.

SCALES = ("fp8.scales", "fp8.scale_row", "fp8.scale_block")


def addresses_of(
    vectors: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], kind: list[Hashable]
) -> list[int] | None:
    """The addresses of vectors and of rows of one shape; None: one of them is not aligned.

    `kind` grows by everything that the kernel and its parameters depend on, except addresses and the number of rows.
    Shapes are not in it, because the functions over rows have checked them.
    """
    addresses, bits = [], 0
    for vector in vectors:
        at = vector.data_ptr()
        addresses.append(at)
        bits |= at
        kind.append(vector.dtype if vector.is_contiguous() else (vector.dtype, vector.stride()))
    count, regular = rows[0].numel(), True
    for tensor in rows:
        at = tensor.data_ptr()
        addresses.append(at)
        bits |= at
        kind.append(tensor.dtype)
        regular = regular and tensor.is_contiguous() and tensor.numel() == count
    if not regular:
        # One is not contiguous, so there are at least two rows, and parameters have the strides of all.
        kind.append(tuple((tensor.shape[1:], tensor.stride(), tensor.numel() == count) for tensor in rows))
    return None if bits % ALIGNMENT else addresses


def scales_of(scales: torch.Tensor, kind: list[Hashable]) -> tuple[int, int, int]:
    """The values of the parameters SCALES; `kind` grows by the scales' dtype and shape."""
    kind.append((scales.dtype, scales.shape[1:]))
    row, block = scales.stride()
    return scales.data_ptr(), 4 * row, 4 * block


# Tensors as kernels take them: copied only if their memory does not fit.


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x if it is contiguous, else view it as [T, H] with the elements of a row adjacent. Rows begin at multiples
    of 16 bytes: x is copied if they do not."""
    if x.is_contiguous() and not x.data_ptr() % ALIGNMENT:
        return x
    rows = x.reshape(-1, x.shape[-1])
    fits = rows.stride(1) == 1 and rows.stride(0) * rows.element_size() % ALIGNMENT == 0
    return rows if fits and rows.data_ptr() % ALIGNMENT == 0 else rows.clone(memory_format=torch.contiguous_format)


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it is contiguous and begins at a multiple of 16 bytes, else a copy that is and does."""
    fits = tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def flat(rows: torch.Tensor) -> torch.Tensor:
    """View contiguous rows as [T, H]."""
    return rows if rows.dim() == 2 else rows.view(-1, rows.shape[-1])


# Checks, and the parameters of tensors.


def rows_in(tensor: torch.Tensor) -> int:
    """The number of rows of a tensor [..., H]."""
    return tensor.shape[0] if tensor.dim() == 2 else tensor.numel() // max(1, tensor.shape[-1])


def as_matrix(rows: torch.Tensor) -> torch.Tensor:
    """View rows of any number of dimensions as [T, H]. More than two dimensions are contiguous."""
    if rows.dim() == 2:
        return rows
    if not rows.is_contiguous() or not rows.dim():
        raise ConfigError(f"a tensor of shape {list(rows.shape)} is not contiguous; make it so, or [T, H]")
    return rows.view(-1, rows.shape[-1])


def rows_of(tensor: torch.Tensor, name: str, shape: Sequence[int], offset: int = 0) -> PipeRows:
    """The rows of a tensor, which must have this shape."""
    if tuple(tensor.shape) != tuple(shape):
        raise ConfigError(f"{name} has the shape {tuple(tensor.shape)}; it must be {tuple(shape)}")
    item = tensor.element_size()
    stride = tensor.stride(0) * item if shape[0] > 1 else shape[1] * item
    if shape[0] and shape[1] > 1 and tensor.stride(1) != 1:
        raise ConfigError(f"{name} has elements of a row that are {tensor.stride(1)} apart; make it contiguous")
    if tensor.data_ptr() % ALIGNMENT or stride % ALIGNMENT:
        raise ConfigError(
            f"{name} begins at {tensor.data_ptr():#x} with rows {stride} bytes apart; both must be multiples of "
            f"{ALIGNMENT}: make it contiguous"
        )
    return PipeRows(tensor.data_ptr(), stride, EIGHT * item, offset)


def one_dtype(tensors: Sequence[torch.Tensor]) -> None:
    dtypes = dict.fromkeys(str(tensor.dtype) for tensor in tensors)
    if len(dtypes) > 1:
        raise ConfigError(f"tensors of {' and '.join(dtypes)}, which must have one dtype")


def in_stage(tensors: Sequence[torch.Tensor], shape: PipeShape) -> tuple[PipeRows, ...]:
    """The rows of inputs, with the place of their tiles in a stage: one after the other."""
    placed, offset = [], 0
    for number, tensor in enumerate(tensors):
        placed.append(rows_of(tensor, f"input {number}", tensors[0].shape, offset))
        offset += shape.tile_rows * (shape.piece or tensor.shape[1] // EIGHT) * EIGHT * tensor.element_size()
    return tuple(placed)


def vector_of(vector: torch.Tensor, hidden: int, name: str) -> int:
    """The address of a vector of `hidden` elements."""
    row_type(vector)
    if tuple(vector.shape) != (hidden,) or (hidden > 1 and vector.stride(0) != 1) or vector.data_ptr() % ALIGNMENT:
        raise ConfigError(
            f"{name} has the shape {tuple(vector.shape)} at {vector.data_ptr():#x}; it must be ({hidden},), contiguous "
            f"and aligned to {ALIGNMENT} bytes"
        )
    return vector.data_ptr()


def fp8_of(values: torch.Tensor, scales: torch.Tensor, shape: Sequence[int]) -> PipeFp8:
    """The rows of 8-bit floats, and their scales by the scales' own strides."""
    blocks = (shape[0], -(-shape[1] // SCALED))
    if values.dtype != torch.float8_e4m3fn or tuple(values.shape) != tuple(shape) or values.stride(1) != 1:
        raise ConfigError(
            f"fp8 values are {values.dtype} {tuple(values.shape)}; float8_e4m3fn {tuple(shape)} is needed"
        )
    stride = values.stride(0) if shape[0] > 1 else shape[1]
    if values.data_ptr() % EIGHT or stride % EIGHT:
        raise ConfigError(
            f"fp8 values begin at {values.data_ptr():#x}; rows of them must begin at multiples of {EIGHT}"
        )
    if scales.dtype != torch.float32 or tuple(scales.shape) != blocks:
        raise ConfigError(f"scales are {scales.dtype} {tuple(scales.shape)}; float32 {blocks} is needed")
    row, block = (4 * stride for stride in scales.stride())
    return PipeFp8(values.data_ptr(), stride, scales.data_ptr(), row, block)
