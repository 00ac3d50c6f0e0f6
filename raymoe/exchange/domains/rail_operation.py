"""Publish why an operation failed that had begun on a rail: such an error is not harmless, and all ranks learn why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raymoe.errors import Aborted, PeerTimeout, RaymoeError, WiringError
from raymoe.exchange.backend import HARMLESS_ERRORS
from raymoe.net.rail import Rail


@contextmanager
def publish_failures(rail: Rail, op: str, rank: int) -> Iterator[None]:
    """Run the part of an operation in which peers may have this rank's data, or wait for it.

    An error of this rank's own goes to the ranks of all rails (`Rail.fail`), which would wait for it until their
    deadlines. It no longer has a type that counts as harmless, so the exchange becomes unusable.
    """
    try:
        yield
    except (PeerTimeout, Aborted, WiringError):  # of a wait or a peer: the other ranks find out by themselves
        raise
    except Exception as error:
        if type(error) is RaymoeError:  # the reason of a rank that has failed: all ranks read it
            raise
        kind = type(error).__name__
        reason = f"rank {rank} left {op} after its rows had begun to cross between domains, because of {kind}: {error}"
        rail.fail(reason)
        if isinstance(error, HARMLESS_ERRORS):
            raise RaymoeError(reason) from error
        raise
