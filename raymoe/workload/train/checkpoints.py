"""The checkpoints of workload train: a folder for each, in it a file of each rank, and one that says it is complete.

All ranks of a case call these methods together. A rank that is lost in the middle leaves a folder that is not complete,
and the next generation takes the one before it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from raymoe.config import Case
from raymoe.errors import CannotWrite, ConfigError
from raymoe.memory.world import World

KEPT = 2
COMPLETE, STARTS = "complete", "starts.json"
State = dict[str, Any]


class Checkpoints:
    """The checkpoints of a case. Without a folder in the job they are in a temporary one, named by the run."""

    def __init__(self, case: Case, world: World) -> None:
        asked = case.job.train.folder
        base = Path(tempfile.gettempdir()) / f"raymoe-{world.name}-train" if asked is None else Path(asked)
        self.world, self.folder = world, base / f"case-{case.index}"
        self.facts = json.dumps(case.job.resolved() | {"steps": None, "name": None}, sort_keys=True, default=str)

    def latest(self) -> int:
        """Return the step of the last complete checkpoint, that of all ranks; 0 if there is none."""
        own = {int(path.parent.name) for path in self.folder.glob(f"*/{COMPLETE}") if path.parent.name.isdigit()}
        steps: list[set[int]] = self.world.swap(own, "train: checkpoints")  # type: ignore[assignment]
        return max(set.intersection(*steps), default=0)

    def started(self, step: int) -> list[int]:
        """Note that this generation goes on from a step; return the steps from which all of them went on."""
        starts: list[int] | None = None
        problem: CannotWrite | None = None
        if self.world.rank == 0:
            path = self.folder / STARTS
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                starts = [*(json.loads(path.read_text()) if path.exists() else []), step]
                path.write_text(json.dumps(starts))
            except (OSError, ValueError) as error:
                problem = CannotWrite(f"checkpoints cannot be kept in {self.folder} ({error}); set train.folder")
        self.world.agree(problem, "train: folder of checkpoints")
        noted: list[int] = self.world.swap(starts, "train: starts")[0]  # type: ignore[assignment]
        return noted

    def load(self, step: int) -> State:
        """Return this rank's part of the checkpoint of a step."""
        state: State = torch.load(self._file(step), map_location=self.world.device, weights_only=True)
        if state["facts"] != self.facts:
            raise ConfigError(
                f"the checkpoint {self._file(step)} is of another job; set train.folder to a folder of its own, or "
                "remove it"
            )
        return state

    def save(self, step: int, state: State) -> None:
        """Write this rank's part of a checkpoint. It counts when all ranks have written theirs."""
        problem: CannotWrite | None = None
        try:
            self._file(step).parent.mkdir(parents=True, exist_ok=True)
            torch.save(state | {"facts": self.facts}, self._file(step))
        except (OSError, RuntimeError) as error:  # torch raises the second for a full disk
            problem = CannotWrite(f"rank {self.world.rank} cannot write {self._file(step)}: {error}")
        self.world.agree(problem, "train: checkpoint")
        if self.world.rank == 0:
            (self._file(step).parent / COMPLETE).touch()
            old = sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())[:-KEPT]
            for before in old:
                shutil.rmtree(self.folder / str(before), ignore_errors=True)

    def remove(self) -> None:
        """Remove them all, after the last step."""
        self.world.barrier("train: remove checkpoints")
        if self.world.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.folder.parent.exists() and not any(self.folder.parent.iterdir()):
                self.folder.parent.rmdir()

    def _file(self, step: int) -> Path:
        return self.folder / str(step) / f"rank-{self.world.rank}.pt"
