"""What the findings mean for a config: whether it can run here, and why not."""

from __future__ import annotations

from collections.abc import Sequence

from raymoe.doctor.facts import count, gpus_of
from raymoe.doctor.finding import Device, Finding, Machine
from raymoe.job.errors import PlacementError

ON_GPUS = ("exchange", "overlap", "p2p")
"""Workloads that `world.device: auto` runs on GPU ranks where there are GPUs; the others run on CPU ranks for now."""
_KIND = {"cpu": "CPU", "cuda": "GPU"}


def device_of(machine: Machine) -> Device:
    """Where the ranks of the config would run."""
    needs = machine.needs
    if needs.device == "auto":
        return "cuda" if needs.workload in ON_GPUS and gpus_of(machine) else "cpu"
    return "cuda" if needs.device == "cuda" else "cpu"


def verdict(findings: Sequence[Finding], machine: Machine) -> str:
    """The last line; PlacementError, whose sentence it is, where the config cannot run here."""
    config, ranks, gpus = machine.needs.config, machine.needs.ranks, len(gpus_of(machine))
    device = device_of(machine)
    wrong = [finding for finding in findings if device in finding.blocks]
    if wrong:
        first, more = wrong[0], len(wrong) - 1
        others = f" (and {count(more, 'more check')} failed)" if more else ""
        said = f"{first.name}: {first.found}; {first.way_out}"
        raise PlacementError(f"{config} cannot run here on {_KIND[device]} ranks: {said}{others}")
    if device == "cuda" and gpus < ranks:
        asked = f"it asks for {ranks} GPU ranks and {count(gpus, 'GPU')} can be seen"
        raise PlacementError(f"{config} cannot run here: {asked}; lower world.ranks, or use a larger machine")
    blocked = [finding.name for finding in findings if "cuda" in finding.blocks]
    aside = f"; GPU ranks cannot: {', '.join(blocked)}" if blocked and device == "cpu" else ""
    return f"{config} can run here, on {ranks} {_KIND[device]} ranks{aside}"
