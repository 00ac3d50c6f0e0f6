"""Refuses to pickle or copy objects that belong to one process: peers map its memory, and it holds theirs."""

from __future__ import annotations

from typing import NoReturn


class OfOneProcess:
    """An object of one process. `pickle`, `copy.copy` and `copy.deepcopy` raise TypeError, as for a lock or a file."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"a raymoe {kind} cannot be pickled or copied: it belongs to the process that made it, whose peers have "
            "mapped its memory; make one in each process, and of layers save and load state_dict()"
        )
