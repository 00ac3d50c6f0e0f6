"""Launch kernels/moe/product.cu on the current stream of a tensor's GPU.

`launch` prepares a launch for each kind of product, once. A call sets addresses and copies tensor maps into the
parameters. A capture copies the parameters into its graph, the maps with them. The host reads nothing of the GPU's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Hashable

import torch

from raymoe.cuda.launch import Shape
from raymoe.cuda.params import address_setter
from raymoe.cuda.tensor_map import EncodedMap
from raymoe.moe.kept_maps import KeptMaps
from raymoe.moe.left_sms import blocks_of_product
from raymoe.moe.products import SHARED_BYTES, THREADS, TILES, TOKEN_BOXES, Gate, Product, ProductParams, fits, is_dense
from raymoe.rows.pipe_tensors import ALIGNMENT
from raymoe.rows.row_launch import RowsDevice, device_of

CAPABILITY = (9, 0)
"""The only one that has `wgmma`."""
_ADDRESSES = ("expert_offsets", "expert_counts", "y", "gate_up", "bias", "row_weights", "taken", "trace")
TOLD = ("pieces", "dispatch")
_NO_MAP = EncodedMap((0,) * 16)


def takes(x: torch.Tensor, weight: torch.Tensor, gate: Gate | None) -> bool:
    """Whether the kernel multiplies rows like x[C, K] by weight[L, N, K]. Its GPU and the dtype, sizes and memory of
    the weights decide; rows are copied where their memory does not fit."""
    experts, rows, columns = weight.shape
    return (
        has_kernel(x)
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and experts > 0
        and fits(rows if gate is None else rows // 2, columns)
        and is_dense(weight, gate is not None)
        and weight.data_ptr() % ALIGNMENT == 0
        and TILES.shared_bytes(experts) <= SHARED_BYTES
    )


def has_kernel(x: torch.Tensor) -> bool:
    """Whether the kernel runs on the GPU of this tensor."""
    return x.is_cuda and _has_wgmma(x.get_device())


@functools.cache
def _has_wgmma(ordinal: int) -> bool:
    return torch.cuda.get_device_capability(ordinal) == CAPABILITY


def launch(product: Product) -> None:
    """Launch the kernel on the current stream. Without rows there is nothing to do."""
    if not len(product.x):
        return
    device = device_of(product.x.get_device())
    kind = _kind(product)
    prepared = device.find(kind, 0)
    if prepared is None:
        prepared = PreparedProduct(device, product)
        device.keep(kind, 0, (), prepared)
    prepared(product)


def _kind(product: Product) -> Hashable:
    """Return everything that the kernel, its block and its parameters depend on, besides addresses and rows."""
    tensors = product.gate_up, product.bias, product.row_weights, product.trace
    tiles = product.tiles, None if product.pieces is None else product.pieces.piece_tiles
    form = tiles, product.gate, product.zero_gaps, product.x.dtype, product.transposed
    return "product", product.weight.shape, form, tuple(tensor is not None for tensor in tensors)


class PreparedProduct:
    """The kernel of one kind of product, and its parameters. Safe from several threads."""

    def __init__(self, device: RowsDevice, product: Product) -> None:
        product.check()
        self._device, self._ordinal = device, device.gpu.ordinal
        none = _NO_MAP
        params = product.params((none, none, (none,) * len(TOKEN_BOXES)), 0)
        self._block = THREADS, product.tiles.shared_bytes(product.weight.shape[0])
        self._launch = device.launch(product.source(), False)
        self._launch.check(Shape(1, *self._block), params)
        self._fields = params.packed()
        self._memory = memoryview(self._fields).cast("B")
        self._places = {name: offset for name, offset in ProductParams.offsets().items() if "." not in name}
        self._set_addresses = address_setter(self._fields, ProductParams, _ADDRESSES)
        self._set_told = address_setter(self._fields, ProductParams, TOLD)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._fields))
        self._pointers_at = ctypes.addressof(self._pointers)
        self._weight_maps, self._token_maps = KeptMaps(device.gpu), KeptMaps(device.gpu)

    def __call__(self, product: Product) -> None:
        """Launch for a product of this kind, which has rows. Of its tensors only their alignment is checked."""
        x, weight, places = product.x.data_ptr(), product.weight.data_ptr(), self._places
        addresses = [
            product.offsets.data_ptr(),
            product.counts.data_ptr(),
            product.y.data_ptr(),
            *(0 if tensor is None else tensor.data_ptr() for tensor in (product.gate_up, product.bias)),
            0 if product.row_weights is None else product.row_weights.data_ptr(),
        ]
        if (x | weight | addresses[2] | addresses[3]) % ALIGNMENT:
            product.check()
        weights = self._weight_maps.of(weight, product.weight_maps)
        tokens = self._token_maps.of((x, len(product.x)), product.token_maps)
        trace = 0 if product.trace is None else product.trace.data_ptr()
        stream = self._device.current_stream(self._ordinal)
        left = 0 if product.pieces is None else product.pieces.sms
        blocks = blocks_of_product(self._device.gpu.sms, product.most_tiles, left)
        one = len(weights) // 2
        with self._launch.lock:  # the driver copies the parameters before it returns
            self._memory[places["first"] : places["first"] + one] = weights[:one]
            self._memory[places["second"] : places["second"] + one] = weights[one:]
            self._memory[places["tokens"] : places["tokens"] + len(tokens)] = tokens
            self._set_addresses(*addresses, self._device.counter(stream), trace)
            if product.pieces is not None:
                self._set_told(*product.told)
            self._launch.enqueue(stream, self._pointers_at, blocks, self._block)
