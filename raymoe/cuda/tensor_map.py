"""Tensor maps: they describe a tensor, and the box of it that one load of TMA takes.

`TensorMap` is the description. The driver encodes it in 128 bytes, which a kernel has in its parameters.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Annotated

from raymoe.cuda.driver import bindings, call
from raymoe.cuda.params import Params

MOST_BOX = 256
"""Elements of a box in each dimension."""
SWIZZLE_BYTES = 128


@dataclass(frozen=True)
class EncodedMap(Params):
    """An encoded tensor map in the parameters of a kernel (kernels/include/raymoe/base/ptx_matrix.cuh)."""

    words: Annotated[tuple[int, ...], ctypes.c_uint64 * 16]


ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "uint8": 1}
"""Bytes of the elements that a map may have. 8-bit floats are uint8 for it."""


@dataclass(frozen=True)
class TensorMap:
    """A tensor, innermost dimension first, and the box of one load.

    A box is 128 bytes wide in the innermost dimension, and is stored with the 128-byte swizzle: row r of the box has
    its 16-byte pieces in the order i XOR (r mod 8). Elements outside of the tensor are zeros.
    """

    address: int
    """A multiple of 16."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes between neighbours, from the second dimension on; multiples of 16."""
    box: tuple[int, ...]
    element: str = "bfloat16"

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.element]

    def encoded(self) -> EncodedMap:
        """Encode it by the driver, for the current context's GPU."""
        cuda = bindings()
        kinds, swizzles = cuda.CUtensorMapDataType, cuda.CUtensorMapSwizzle
        encoded = call(
            "cuTensorMapEncodeTiled",
            getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{self.element.upper()}"),
            len(self.sizes),
            self.address,
            [cuda.cuuint64_t(size) for size in self.sizes],
            [cuda.cuuint64_t(stride) for stride in self.strides],
            [cuda.cuuint32_t(extent) for extent in self.box],
            [cuda.cuuint32_t(1)] * len(self.sizes),
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return EncodedMap(struct.unpack("=16Q", ctypes.string_at(encoded.getPtr(), 128)))
