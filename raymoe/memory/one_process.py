"""Objects that belong to one process: peers map its memory, and it holds theirs. No copy of them works, and no fork."""

from __future__ import annotations

import os
import weakref
from typing import NoReturn, Protocol


class OfOneProcess:
    """An object of one process. `pickle`, `copy.copy` and `copy.deepcopy` raise TypeError, as for a lock or a file."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"a raymoe {kind} cannot be pickled or copied: it belongs to the process that made it, whose peers have "
            "mapped its memory; make one in each process, and of layers save and load state_dict()"
        )


class Forked(Protocol):
    """An object that learns that its process is a fork of the one that made it."""

    _forked: bool


_KNOWN: weakref.WeakSet[Forked] = weakref.WeakSet()


def tell_of_forks(known: Forked) -> None:
    """Set `_forked` of the object in each process that is forked from this one."""
    _KNOWN.add(known)


def _mark_forked() -> None:
    for known in _KNOWN:
        known._forked = True


os.register_at_fork(after_in_child=_mark_forked)  # cheaper than a call of getpid in every method
