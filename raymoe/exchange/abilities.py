"""The backends of an exchange and their abilities: one table for the library and for the rules of a config.

No torch here: `raymoe validate` reads the table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Abilities:
    """The ranks that a backend serves, and what it can do there."""

    devices: tuple[str, ...]
    """The kinds of ranks: `cpu`, `cuda` or both."""
    hopper_kernels: bool = False
    """Whether it launches kernels that need compute capability 9.0."""
    nccl: bool = False
    """Whether NCCL moves the rows of GPU ranks."""
    float8: bool = False
    """Whether rows of dispatch can cross as fp8."""
    copy_engine: bool = False
    """Whether it has transport `copy_engine`."""
    between_domains: bool = False
    """Whether GPU ranks can be in several domains."""
    chunks: bool = False
    """Whether it waits for chunks of the rows that cross between domains."""
    waits_on_host: bool = False
    """Whether the host of a GPU rank waits in an operation. Then no CUDA graph captures it."""

    @property
    def only_device(self) -> str | None:
        """The kind of ranks that it needs; None if it serves both."""
        return self.devices[0] if len(self.devices) == 1 else None


BACKENDS = {
    # `auto` chooses a backend that can do what is asked for.
    "auto": Abilities(("cpu", "cuda"), float8=True, copy_engine=True, between_domains=True, chunks=True),
    "fused": Abilities(("cuda",), hopper_kernels=True, float8=True, between_domains=True, chunks=True),
    "staged": Abilities(("cuda",), hopper_kernels=True, float8=True, copy_engine=True, between_domains=True),
    "host": Abilities(("cpu",)),
    "collective": Abilities(("cpu", "cuda"), nccl=True, waits_on_host=True),
    "allgather": Abilities(("cpu", "cuda"), nccl=True, between_domains=True),
}


def backends_of(*devices: str) -> tuple[str, ...]:
    """List the backends of these kinds of ranks, one kind after the other.

    >>> backends_of("cpu")
    ('auto', 'host', 'collective', 'allgather')
    >>> backends_of("cuda")
    ('auto', 'fused', 'staged', 'collective', 'allgather')
    """
    names = [name for device in devices for name, abilities in BACKENDS.items() if device in abilities.devices]
    return tuple(dict.fromkeys(names))
