"""Launch kernels/moe/product_fp8.cu on the current stream of a tensor's GPU.

Maps, counters and captures are as in `product_launch.py`. Scales need no maps: their addresses and strides are
parameters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable

from raymoe.cuda.launch import Shape
from raymoe.cuda.params import address_setter
from raymoe.cuda.tensor_map import EncodedMap
from raymoe.moe.kept_maps import KeptMaps
from raymoe.moe.left_sms import blocks_of_product
from raymoe.moe.product_fp8 import SCALES, ScaledProduct, ScaledProductParams
from raymoe.moe.product_launch import TOLD
from raymoe.moe.products import THREADS, TOKEN_BOXES
from raymoe.rows.pipe_tensors import ALIGNMENT
from raymoe.rows.row_launch import RowsDevice, device_of

_ADDRESSES = ("expert_offsets", "expert_counts", "y", "gate_up", "bias", "row_weights", "taken", "trace")
_NO_MAP = EncodedMap((0,) * 16)


def launch(scaled: ScaledProduct) -> None:
    """Launch the kernel on the current stream. Without rows there is nothing to do."""
    x = scaled.product.x
    if not len(x):
        return
    device = device_of(x.get_device())
    kind = _kind(scaled)
    prepared = device.find(kind, 0)
    if prepared is None:
        prepared = PreparedScaledProduct(device, scaled)
        device.keep(kind, 0, (), prepared)
    prepared(scaled)


def _kind(scaled: ScaledProduct) -> Hashable:
    """Return everything that the kernel, its block and its parameters depend on, besides what a call sets."""
    product = scaled.product
    tensors = product.bias, product.row_weights, scaled.y_scales, product.trace
    switches = tuple(tensor is not None for tensor in tensors)
    tiles = product.tiles, None if product.pieces is None else product.pieces.piece_tiles
    return "product_fp8", product.weight.shape, tiles, product.gate, switches


class PreparedScaledProduct:
    """The kernel of one kind of product, and its parameters. Safe from several threads."""

    def __init__(self, device: RowsDevice, scaled: ScaledProduct) -> None:
        scaled.check()
        self._device, self._ordinal = device, device.gpu.ordinal
        params = scaled.params((_NO_MAP, _NO_MAP, (_NO_MAP,) * len(TOKEN_BOXES)), 0)
        tiles = scaled.product.tiles
        self._block = THREADS, tiles.shared_bytes(scaled.product.weight.shape[0])
        self._launch = device.launch(scaled.source(), False)
        self._launch.check(Shape(1, *self._block), params)
        self._fields = params.packed()
        self._memory = memoryview(self._fields).cast("B")
        offsets = ScaledProductParams.offsets()
        self._weights_at, self._tokens_at = offsets["product.first"], offsets["product.tokens"]
        self._set_addresses = address_setter(
            self._fields, ScaledProductParams, tuple(f"product.{name}" for name in _ADDRESSES)
        )
        self._set_told = address_setter(self._fields, ScaledProductParams, tuple(f"product.{name}" for name in TOLD))
        self._set_scales = address_setter(self._fields, ScaledProductParams, SCALES)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._fields))
        self._pointers_at = ctypes.addressof(self._pointers)
        self._weight_maps, self._token_maps = KeptMaps(device.gpu), KeptMaps(device.gpu)

    def __call__(self, scaled: ScaledProduct) -> None:
        """Launch for a product of this kind, which has rows. Of its tensors only their alignment is checked."""
        product = scaled.product
        x, weight, y = product.x.data_ptr(), product.weight.data_ptr(), product.y.data_ptr()
        if (x | weight | y) % ALIGNMENT:
            scaled.check()
        weights = self._weight_maps.of(weight, product.weight_maps)
        tokens = self._token_maps.of((x, len(product.x)), product.token_maps)
        bias, row_weights, trace = (
            0 if tensor is None else tensor.data_ptr() for tensor in (product.bias, product.row_weights, product.trace)
        )
        stream = self._device.current_stream(self._ordinal)
        left = 0 if product.pieces is None else product.pieces.sms
        blocks = blocks_of_product(self._device.gpu.sms, product.most_tiles, left)
        taken, places = self._device.counter(stream), (product.offsets.data_ptr(), product.counts.data_ptr())
        with self._launch.lock:  # the driver copies the parameters before it returns
            self._memory[self._weights_at : self._weights_at + len(weights)] = weights
            self._memory[self._tokens_at : self._tokens_at + len(tokens)] = tokens
            self._set_addresses(*places, y, 0, bias, row_weights, taken, trace)
            if product.pieces is not None:
                self._set_told(*product.told)
            self._set_scales(*scaled.scales())
            self._launch.enqueue(stream, self._pointers_at, blocks, self._block)
