"""Run all checks in order, and decide whether the first config of a new user can run here."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing

from raymoe.config import Job, load_job
from raymoe.doctor.cuda import judge_peer_access, judge_stream_memory_operations
from raymoe.doctor.finding import Device, Finding, Machine, Needs, count, gpus_of, warn
from raymoe.doctor.gpus import judge_driver, judge_gpus, judge_nvlink, judge_tma
from raymoe.doctor.host import judge_cache, judge_memfd, judge_memory, judge_shm
from raymoe.doctor.ipc import judge_ipc
from raymoe.doctor.probes import BOUNDS, Probes
from raymoe.doctor.software import judge_nvrtc, judge_ray, judge_torch
from raymoe.errors import PlacementError

# The verdict: whether a config can run here, and why not.

ON_GPUS = ("exchange", "overlap", "p2p", "pointwise", "products")
"""Workloads that `world.device: auto` runs on GPU ranks if there are GPUs; the others run on CPU ranks."""
_KIND = {"cpu": "CPU", "cuda": "GPU"}


def device_of(machine: Machine) -> Device:
    """Return the kind of ranks that the config would run on."""
    needs = machine.needs
    if needs.device == "auto":
        return "cuda" if needs.workload in ON_GPUS and gpus_of(machine) else "cpu"
    return "cuda" if needs.device == "cuda" else "cpu"


def verdict(findings: Sequence[Finding], machine: Machine) -> str:
    """Return the last line; raise PlacementError with its text if the config cannot run here."""
    config, ranks, gpus = machine.needs.config, machine.needs.ranks, len(gpus_of(machine))
    device = device_of(machine)
    blocking = [finding for finding in findings if device in finding.blocks]
    if blocking:
        first, more = blocking[0], len(blocking) - 1
        others = f" (and {count(more, 'more check')} failed)" if more else ""
        reason = f"{first.name}: {first.state}; {first.way_out}"
        raise PlacementError(f"{config} cannot run here on {_KIND[device]} ranks: {reason}{others}")
    if device == "cuda" and gpus < ranks:
        shortage = f"it asks for {ranks} GPU ranks and {count(gpus, 'GPU')} can be seen"
        raise PlacementError(f"{config} cannot run here: {shortage}; lower world.ranks, or use a larger machine")
    blocking_gpus = [finding.name for finding in findings if "cuda" in finding.blocks]
    if config == DEFAULT and device == "cpu" and gpus > 1 and not blocking_gpus:
        return f"{config} can run here, on 2 GPU ranks; on {ranks} CPU ranks with --set world.device=cpu"
    without_gpus = f"; GPU ranks cannot: {', '.join(blocking_gpus)}" if blocking_gpus and device == "cpu" else ""
    return f"{config} can run here, on {ranks} {_KIND[device]} ranks{without_gpus}"


DEFAULT, DEFAULT_ON_GPUS = "quickstart", "quickstart_gpus"
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
    judge_cache,
    judge_torch,
    judge_memory,
)


def examine(config: str = DEFAULT, bounds: Mapping[str, float] = BOUNDS) -> Generator[str, None, None]:
    """Yield the lines to print, each when its check is done. Raise PlacementError if the config cannot run."""
    needs = needs_of(load_job(config), config)
    findings = []
    with closing(Probes(bounds)) as probes:
        machine = Machine(probes, needs)
        for check in CHECKS:
            findings.append(_judge(check, machine))
            yield findings[-1].line()
        yield verdict(findings, machine)


def usable_gpus(bounds: Mapping[str, float] = BOUNDS) -> int:
    """Return how many GPUs the ranks of quickstart can use here; 0 if any check says that GPU ranks cannot run.

    This takes seconds. It leaves out Ray, which a run starts anyway.
    """
    with closing(Probes({name: bound for name, bound in bounds.items() if name != "ray"})) as probes:
        machine = Machine(probes, needs_of(load_job(DEFAULT_ON_GPUS), DEFAULT_ON_GPUS))
        findings = [_judge(check, machine) for check in CHECKS if check is not judge_ray]
        return 0 if any("cuda" in finding.blocks for finding in findings) else len(gpus_of(machine))


def _judge(check: Callable[[Machine], Finding], machine: Machine) -> Finding:
    try:
        return check(machine)
    except Exception as error:  # noqa: BLE001  (a driver may return unexpected values; the other checks still count)
        name = check.__name__.removeprefix("judge_")
        return warn(name, f"this check raised {type(error).__name__}: {error}", "please report this bug in raymoe")


def needs_of(job: Job, config: str) -> Needs:
    from raymoe.workload.memory_needed import bytes_per_rank

    return Needs(config, job.workload, job.world.device, job.world.ranks, bytes_per_rank(job))
