"""What a ring of bulk copies (kernels/include/raymoe/ring.cuh) takes of a block's shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from raymoe.job.errors import ConfigError

MAX_STAGE_BYTES = (1 << 20) - 16
"""A barrier counts at most 2^20 - 1 bytes a phase."""


@dataclass(frozen=True)
class Ring:
    """`stages` of `stage_bytes`; half of them hold loads under way, the other half stores.

    >>> Ring(stages=12, stage_bytes=16384).shared_bytes
    196704
    """

    stages: int = 12
    stage_bytes: int = 16384

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ConfigError(f"a ring of {self.stages} stages; it has at least 1")
        if not 16 <= self.stage_bytes <= MAX_STAGE_BYTES or self.stage_bytes % 16:
            raise ConfigError(
                f"a ring with stages of {self.stage_bytes} bytes; bulk copies take a multiple of 16, up to "
                f"{MAX_STAGE_BYTES}"
            )

    @property
    def shared_bytes(self) -> int:
        """The stages, and a barrier of 8 bytes for each."""
        return self.stages * (self.stage_bytes + 8)
