"""The kernel of kernels/copy.cu: what it takes, and a launch of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raymoe.device.jit import KernelSource
from raymoe.device.kernels import Kernels
from raymoe.device.launch import Launch, Shape
from raymoe.device.params import U32, U64, Address, Params
from raymoe.device.ring import Ring
from raymoe.device.sync import STRUCTS, Watch
from raymoe.job.errors import ConfigError

THREADS = 128


@dataclass(frozen=True)
class CopyParams(Params):
    """Twin of the struct in kernels/copy.cu, where the words are described."""

    dst: Address
    src: Address
    bytes: U64
    operation: Address = 0
    credit: Address = 0
    lag: U64 = 0
    signal: Address = 0
    watch: Watch = field(default_factory=Watch)
    op: U32 = 0
    peer: U32 = 0
    stages: U32 = 0
    stage_bytes: U32 = 0

    def __post_init__(self) -> None:
        if (self.credit or self.signal) and not self.operation:
            raise ConfigError("a copy with a credit or a signal word needs an operation, which counts its runs")
        if self.credit and not self.watch.poison:
            raise ConfigError("a copy that waits for a credit needs a watch, which bounds the wait")
        for name in ("operation", "credit", "signal"):
            if getattr(self, name) % 8:
                raise ConfigError(f"{name} of a copy is at {getattr(self, name):#x}; words are 8-byte aligned")


COPY = KernelSource("copy", (CopyParams, *STRUCTS))


def copy_launch(kernels: Kernels, params: CopyParams, blocks: int, ring: Ring) -> Launch:
    """A launch of the copy kernel on `blocks` blocks; `params` without stages, which are the ring's."""
    whole = replace(params, stages=ring.stages, stage_bytes=ring.stage_bytes)
    return Launch(kernels.function(COPY), Shape(blocks, THREADS, ring.shared_bytes), whole)
