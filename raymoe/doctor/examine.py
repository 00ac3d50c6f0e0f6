"""All checks in order, and what they mean for the config that a newcomer runs first."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing

from raymoe.doctor.cuda import judge_peer_access, judge_stream_memory_operations
from raymoe.doctor.finding import Finding, Machine, Needs, warn
from raymoe.doctor.gpus import judge_driver, judge_gpus, judge_nvlink, judge_tma
from raymoe.doctor.host import judge_memfd, judge_memory, judge_shm
from raymoe.doctor.ipc import judge_ipc
from raymoe.doctor.local_ray import judge_ray
from raymoe.doctor.nvrtc import judge_nvrtc
from raymoe.doctor.probes import BOUNDS, Probes
from raymoe.doctor.tensors import judge_torch
from raymoe.doctor.verdict import verdict
from raymoe.job import Job, load_job

DEFAULT = "quickstart"
CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    judge_driver,
    judge_gpus,
    judge_nvlink,
    judge_peer_access,
    judge_ipc,
    judge_nvrtc,
    judge_tma,
    judge_stream_memory_operations,
    judge_ray,
    judge_shm,
    judge_memfd,
    judge_torch,
    judge_memory,
)


def examine(config: str = DEFAULT, bounds: Mapping[str, float] = BOUNDS) -> Generator[str, None, None]:
    """The lines to print, each when its check is done. PlacementError at the end where the config cannot run here."""
    needs = needs_of(load_job(config), config)
    findings = []
    with closing(Probes(bounds)) as probes:
        machine = Machine(probes, needs)
        for check in CHECKS:
            findings.append(_judged(check, machine))
            yield findings[-1].line()
        yield verdict(findings, machine)


def _judged(check: Callable[[Machine], Finding], machine: Machine) -> Finding:
    try:
        return check(machine)
    except Exception as error:  # noqa: BLE001  (a driver may tell what nobody foresaw; the other checks still count)
        name = check.__name__.removeprefix("judge_")
        return warn(name, f"this check broke: {type(error).__name__}: {error}", "a bug in raymoe, worth reporting")


def needs_of(job: Job, config: str) -> Needs:
    from raymoe.workload.room import bytes_per_rank

    return Needs(config, job.workload, job.world.device, job.world.ranks, bytes_per_rank(job))
