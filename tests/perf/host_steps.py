"""The step times of one model by the dispatchers of several hosts in turns, on ranks under torchrun."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

ON_GPU = torch.cuda.is_available()


def begin_ranks() -> torch.device:
    """Start torch.distributed under torchrun, and return this rank's device."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo" if ON_GPU else "gloo", device_id=device if ON_GPU else None)
    return device


def microseconds(step: Callable[[], object], model: torch.nn.Module) -> float:
    """Return the time of one step, which all ranks begin together."""
    model.zero_grad(set_to_none=False)
    if not ON_GPU:
        dist.barrier()
        begun = time.perf_counter()
        step()
        return (time.perf_counter() - begun) * 1e6
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of this rank's gradients."""
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: (grad.to_local() if isinstance(grad, DTensor) else grad).clone() for name, grad in named.items()}


def difference(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of all gradients, as a part of the norm of all gradients."""
    assert own.keys() == other.keys()
    apart = sum(float((other[name] - grad).float().norm()) ** 2 for name, grad in own.items())
    return (apart / sum(float(grad.float().norm()) ** 2 for grad in own.values())) ** 0.5


def everyones(value: object) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def tried(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the result of work that all ranks do, and None, or why some rank failed."""
    result, reason = None, None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - another library may raise anything; the line says it
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return result, next((text for text in everyones(reason) if text is not None), None)


@dataclass
class Comparison:
    """The losses, gradients and times of one model by several dispatchers, which it takes by their names."""

    model: torch.nn.Module
    step: Callable[[], torch.Tensor]
    """Runs forward and backward pass; returns the loss."""
    take: Callable[[str], None]
    """Lets the model take a dispatcher. An error is the reason for which it has no times."""
    shared: dict[str, Any]
    """Further keys of each line."""
    out: Path | None = None
    _gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    _results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def eager(self, names: list[str], rounds: int) -> None:
        """Compare and time them, and print a line for each. The first one's gradients are the reference."""
        for name in names:
            _, reason = tried(lambda name=name: self.take(name))
            self._results[name] = {"skipped": reason} if reason else self._first(self.step)
        running = [name for name in names if self.runs(name)]
        times: dict[str, list[float]] = {name: [] for name in running}
        for turn in range(rounds):
            for place in range(len(running)):
                name = running[(turn + place) % len(running)]
                self.take(name)
                times[name].append(max(everyones(microseconds(self.step, self.model))))
        for name in names:
            self._say(name, times.get(name, []))

    def alone(self, name: str, step: Callable[[], torch.Tensor], rounds: int) -> None:
        """Compare and time another step, and print its line."""
        self._results[name] = self._first(step)
        turns = range(rounds if self.runs(name) else 0)
        self._say(name, [max(everyones(microseconds(step, self.model))) for _ in turns])

    def runs(self, name: str) -> bool:
        return "loss" in self._results.get(name, {})

    def _first(self, step: Callable[[], torch.Tensor]) -> dict[str, Any]:
        """Run three steps; return loss and difference of the last, or the reason why they fail."""

        def steps() -> tuple[float, float]:
            for _ in range(3):
                self.model.zero_grad(set_to_none=False)
                loss = float(step())
            now = gradients_of(self.model)
            self._gradients = self._gradients or now
            return loss, difference(self._gradients, now)

        result, reason = tried(steps)
        if reason is not None:
            return {"skipped": reason}
        losses, apart = zip(*everyones(result), strict=True)
        return {"loss": sum(losses) / len(losses), "gradient_difference": max(apart)}

    def _say(self, name: str, times: list[float]) -> None:
        line = {
            "host": name,
            **self.shared,
            "ranks": dist.get_world_size(),
            "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
            "torch": torch.__version__,
            **self._results[name],
            "samples": len(times),
        }
        if times:
            line |= {"us_p50": statistics.median(times), "us_min": min(times), "us_max": max(times)}
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)
            if self.out is not None:
                with self.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
