"""A job: what the user asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from raymoe.job.errors import ConfigError
from raymoe.job.matrix import combinations
from raymoe.job.meaning import meaningful
from raymoe.job.scalars import Scalar
from raymoe.job.sections import Exchange, Overlap, P2p, Routing, Section, Shape, Steps, World


class Job(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """The job's name, part of its run directory's; the file's unless said."""
    workload: Literal["p2p", "exchange", "overlap", "layer"]
    """What a step is: messages between two ranks, dispatch and combine, each of these beside a matrix product, or a
    whole MoE layer."""
    world: World = World()
    shape: Shape = Shape()
    routing: Routing = Routing()
    exchange: Exchange = Exchange()
    steps: Steps = Steps()
    p2p: P2p = P2p()
    overlap: Overlap = Overlap()
    matrix: dict[str, Annotated[tuple[Scalar, ...], Field(strict=False, min_length=1)]] = Field(default_factory=dict)
    """Keys with the values that they take in turn: one case for each combination."""

    def resolved(self) -> dict[str, Any]:
        """Every key that means something in this job, as plain values. `from_resolved` gives the same job back."""
        return meaningful(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def from_resolved(cls, resolved: dict[str, Any]) -> Job:
        """The job that `resolved` came from."""
        from raymoe.job.rules import broken

        try:
            job = cls.model_validate(resolved)
            said = [str(wrong) for case in job.cases() for wrong in broken(case.job)]
        except ValidationError as error:
            said = [f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}" for wrong in error.errors()]
        if said:
            raise ConfigError(f"not a resolved job: {'; '.join(said)}")
        return job

    def cases(self) -> tuple[Case, ...]:
        """The job once for each combination of the matrix, in file order, the last key changing fastest."""
        if not self.matrix:
            return (Case("default", 0, self),)
        base = self.model_dump(exclude={"matrix"})
        named = combinations(base, self.matrix)
        return tuple(Case(name, i, Job.model_validate(meaningful(plain))) for i, (name, plain) in enumerate(named))


@dataclass(frozen=True)
class Case:
    """One combination of the matrix; `job` has its values and no matrix of its own."""

    name: str
    index: int
    job: Job
