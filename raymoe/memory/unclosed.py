"""Release what belongs to objects that were dropped without `close`, with a warning."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from raymoe.errors import RaymoeError

Release = Callable[[], object]


class Unclosed:
    """The dropped objects of one rank.

    >>> class Owner: ...
    >>> unclosed, owner = Unclosed(), Owner()
    >>> end_watch = unclosed.watch(owner, "an owner", lambda: print("released"), at_once=False)
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     del owner
    >>> str(caught[0].message)
    'an owner was dropped without close(); close it, or use it in a with statement'
    >>> unclosed.free()
    released
    """

    def __init__(self) -> None:
        self._pending: deque[Release] = deque()

    def watch(self, owner: object, name: str, *releases: Release, at_once: bool) -> Callable[[], object]:
        """Call `releases` after `owner` is gone: at once, or with the next `free`.

        They must not refer to the owner. The owner's `close` calls the result, which ends the watch.
        """
        finalizer = weakref.finalize(owner, _dropped, name, releases, None if at_once else self._pending)
        finalizer.atexit = False  # at exit the kernel and the driver free everything
        return finalizer.detach

    def free(self) -> None:
        """Release what was dropped since the last call."""
        while self._pending:
            release = self._pending.popleft()
            with suppress(RaymoeError):  # the caller did not ask for this; what stays is freed with the process
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
