"""Tensor maps of products, encoded once for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from raymoe.cuda.gpu import Gpu
from raymoe.cuda.tensor_map import TensorMap

MOST_MAPS = 1024
"""Maps that one kind of product keeps of its weights, and as many of its rows; the oldest is dropped first."""


class KeptMaps:
    """Encoded maps, by a key that has all that they depend on. torch's allocator gives the same addresses again."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._kept: dict[Hashable, bytes] = {}

    def of(self, key: Hashable, maps: Callable[[], tuple[TensorMap, ...]]) -> bytes:
        """Return the encoded maps of this key; encode them at first."""
        encoded = self._kept.get(key)
        if encoded is None:
            with self._gpu.current():  # a thread of torch's autograd may have no context yet
                encoded = b"".join(bytes(each.encoded().packed()) for each in maps())
            while len(self._kept) >= MOST_MAPS:
                self._kept.pop(next(iter(self._kept)), None)
            self._kept[key] = encoded
        return encoded
