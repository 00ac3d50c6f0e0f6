"""Launch kernels/moe/outer_product.cu on the current stream of a tensor's GPU.

`launch` prepares a launch for each shape of results, once, as product_launch.py does it.
"""

from __future__ import annotations

import ctypes

import torch

import raymoe.moe.product_launch as product_launch
from raymoe.cuda.launch import Shape
from raymoe.cuda.params import address_setter
from raymoe.cuda.tensor_map import EncodedMap
from raymoe.moe.kept_maps import KeptMaps
from raymoe.moe.outer_products import SHARED_BYTES, THREADS, OuterParams, OuterProduct, clipped_map, fits
from raymoe.rows.pipe_tensors import ALIGNMENT
from raymoe.rows.row_launch import RowsDevice, device_of

_ADDRESSES = ("expert_offsets", "expert_counts", "d_weight", "taken")
_NO_MAP = EncodedMap((0,) * 16)


def takes(dy: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether the kernel multiplies rows like dy[C, N], transposed, by x[C, K]. Their GPU, dtype and widths decide."""
    return (
        product_launch.has_kernel(x)
        and dy.dtype == x.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and fits(dy.shape[1], x.shape[1])
    )


def launch(product: OuterProduct) -> None:
    """Launch the kernel on the current stream. Without rows the results are zeros, or nothing is added."""
    if not len(product.x):
        if not product.adds:
            product.d_weight.zero_()
        return
    if not len(product.counts):
        return
    device = device_of(product.x.get_device())
    kind = "outer", product.d_weight.shape, product.x.dtype, product.adds
    prepared = device.find(kind, 0)
    if prepared is None:
        prepared = PreparedOuter(device, product)
        device.keep(kind, 0, (), prepared)
    prepared(product)


class PreparedOuter:
    """The kernel for results of one shape, and its parameters. Safe from several threads."""

    def __init__(self, device: RowsDevice, product: OuterProduct) -> None:
        product.check()
        self._device, self._ordinal = device, device.gpu.ordinal
        params = product.params((_NO_MAP, _NO_MAP), 0)
        self._block = THREADS, SHARED_BYTES
        self._blocks = min(device.gpu.sms, product.tiles)
        self._launch = device.launch(product.source(), False)
        self._launch.check(Shape(1, *self._block), params)
        self._fields = params.packed()
        self._memory = memoryview(self._fields).cast("B")
        offsets = OuterParams.offsets()
        self._dy_at, self._x_at = offsets["dy"], offsets["x"]
        self._set_addresses = address_setter(self._fields, OuterParams, _ADDRESSES)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._fields))
        self._pointers_at = ctypes.addressof(self._pointers)
        # By the address of the rows alone: maps do not depend on their number.
        self._dy_maps, self._x_maps = KeptMaps(device.gpu), KeptMaps(device.gpu)

    def __call__(self, product: OuterProduct) -> None:
        """Launch for a product of this kind, which has rows. Of its tensors only their alignment is checked."""
        dy, x, d_weight = product.dy.data_ptr(), product.x.data_ptr(), product.d_weight.data_ptr()
        if (dy | x | d_weight) % ALIGNMENT:
            product.check()
        dy_map = self._dy_maps.of(dy, lambda: (clipped_map(product.dy),))
        x_map = self._x_maps.of(x, lambda: (clipped_map(product.x),))
        addresses = product.offsets.data_ptr(), product.counts.data_ptr(), d_weight
        stream = self._device.current_stream(self._ordinal)
        with self._launch.lock:  # the driver copies the parameters before it returns
            self._memory[self._dy_at : self._dy_at + len(dy_map)] = dy_map
            self._memory[self._x_at : self._x_at + len(x_map)] = x_map
            self._set_addresses(*addresses, self._device.counter(stream))
            self._launch.enqueue(stream, self._pointers_at, self._blocks, self._block)
