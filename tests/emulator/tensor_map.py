"""Packs tensor maps for the emulator, as the driver does for a GPU."""

from __future__ import annotations

import struct

from raymoe.cuda.tensor_map import MOST_BOX, SWIZZLE_BYTES, EncodedMap, TensorMap

_MARK = 0x70616D206F6D7972  # MARK of runtime/ptx_tensor.cpp, whose struct Map this packs
_MOST_DIMENSIONS = 5


def emulated_map(tensor: TensorMap) -> EncodedMap:
    """Encode a map for the emulator. What the driver would refuse is an error."""
    dimensions = len(tensor.sizes)
    assert 1 <= dimensions <= _MOST_DIMENSIONS
    assert len(tensor.box) == dimensions and len(tensor.strides) == dimensions - 1
    assert tensor.address and tensor.address % 16 == 0
    assert all(0 < size <= 1 << 32 for size in tensor.sizes)
    assert all(stride % 16 == 0 and stride < 1 << 40 for stride in tensor.strides)
    assert all(0 < extent <= MOST_BOX for extent in tensor.box)
    assert tensor.box[0] * tensor.element_bytes == SWIZZLE_BYTES
    fill = (0,) * (_MOST_DIMENSIONS - dimensions)
    form = f"=QQIIII{_MOST_DIMENSIONS}I{_MOST_DIMENSIONS}I{_MOST_DIMENSIONS - 1}Q"
    packed = struct.pack(
        form,
        *(_MARK, tensor.address, dimensions, SWIZZLE_BYTES, tensor.element_bytes, 0),
        *(*tensor.sizes, *fill),
        *(*tensor.box, *fill),
        *(*tensor.strides, *fill),
    )
    return EncodedMap(struct.unpack("=16Q", packed.ljust(128, b"\0")))
