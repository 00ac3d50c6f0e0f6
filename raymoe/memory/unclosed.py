"""Releases what was dropped without `close`, with a warning."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from raymoe.errors import RaymoeError

Release = Callable[[], object]


class Unclosed:
    """Those of one rank of a world.

    >>> class Owner: ...
    >>> unclosed, owner = Unclosed(), Owner()
    >>> forget = unclosed.watch(owner, "an owner", lambda: print("let go"), at_once=False)
    >>> with warnings.catch_warnings(record=True) as told:
    ...     warnings.simplefilter("always")
    ...     del owner
    >>> str(told[0].message)
    'an owner was dropped without close(); close it, or use it in a with statement'
    >>> unclosed.free()
    let go
    """

    def __init__(self) -> None:
        self._found: deque[Release] = deque()

    def watch(self, owner: object, name: str, *releases: Release, at_once: bool) -> Callable[[], object]:
        """Call `releases` after `owner` is gone: at once, or with the next `free`.

        They must not refer to the owner. The result is to be called by the owner's `close`, which makes this void.
        """
        finalizer = weakref.finalize(owner, _dropped, name, releases, None if at_once else self._found)
        finalizer.atexit = False  # the kernel and the driver free what a process held
        return finalizer.detach

    def free(self) -> None:
        """Release what was dropped since the last time."""
        while self._found:
            release = self._found.popleft()
            with suppress(RaymoeError):  # it goes with the process then, and the caller has a task of its own
                release()


def _dropped(name: str, releases: tuple[Release, ...], later: deque[Release] | None) -> None:
    if later is not None:
        later.extend(releases)
    else:
        for release in releases:
            release()
    warnings.warn(
        f"{name} was dropped without close(); close it, or use it in a with statement", ResourceWarning, stacklevel=2
    )
