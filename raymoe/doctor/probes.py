"""The probes of one examination, beside one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from raymoe.doctor.child import Child
from raymoe.doctor.finding import Outcome

# Seconds that a probe may take: from the start of the command, or from when it is looked at where it starts later.
BOUNDS = {"host": 60.0, "nvml": 60.0, "cuda": 60.0, "ipc": 60.0, "nvrtc": 60.0, "torch": 90.0, "ray": 150.0}
LATER = {"ipc"}  # where a GPU takes one process at a time, this one and `cuda` would be in each other's way


class Probes(Mapping[str, Outcome]):
    """What the probes tell. To look at one waits for it, at most until its bound."""

    def __init__(self, bounds: Mapping[str, float] = BOUNDS) -> None:
        self._bounds = bounds
        self._children: dict[str, Child] = {}
        self._outcomes: dict[str, Outcome] = {}
        for name in bounds:
            if name not in LATER:
                self._start(name)

    def __getitem__(self, name: str) -> Outcome:
        if name not in self._outcomes and name not in self._children:
            self._start(name)
        if name not in self._outcomes:
            self._outcomes[name] = self._children[name].outcome()
        return self._outcomes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bounds)

    def __len__(self) -> int:
        return len(self._bounds)

    def close(self) -> None:
        """End what is still running."""
        for name, child in self._children.items():
            if name not in self._outcomes:
                child.end()

    def _start(self, name: str) -> None:
        try:
            self._children[name] = Child(name, self._bounds[name])
        except OSError as error:
            self._outcomes[name] = Outcome(trouble=f"no process could be started: {error}")
