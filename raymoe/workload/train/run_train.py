"""Train a small model for a long time, compare its first losses with an unsharded run, and go on after a lost rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from raymoe.config import Case
from raymoe.errors import WrongResult
from raymoe.memory.world import World
from raymoe.moe.expert_loads import routing_stats, update_router_bias
from raymoe.moe.layer import expert_parameters
from raymoe.moe.training import average_expert_gradients, clip_grad_norm
from raymoe.workload.layer.run_layer import tokens_per_second
from raymoe.workload.measure import Line, Step, Steps, load_keys, measure, result_line, shape_keys
from raymoe.workload.progress import MOST_POINTS, OpWork, Progress, StepWork, step_listener
from raymoe.workload.traffic import Load, Traffic
from raymoe.workload.train.checkpoints import Checkpoints
from raymoe.workload.train.model import BIAS_SPEED, MAX_NORM, MOMENTUM, RATE, Text, TrainedModel, UnshardedModel

BOUNDS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""The largest difference of a loss from that of the unsharded run, relative to it. Roundings differ, which may move a
token whose experts have nearly the same score, and all later steps see that."""
PIECE = 48 * 1024 // 4
"""Numbers of gradients in one message on the board of the world."""


@dataclass(frozen=True)
class TrainSteps(Steps):
    """Of a generation that begins at step `first`: the steps up to `oracle` are compared with the unsharded run."""

    first: int = 0
    oracle: int = 0

    def verified(self, index: int) -> bool:
        return self.verify and self.first + index < self.oracle


def run_train(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """Return the line of a step, with the losses of all steps and those from which restarted ranks went on."""
    job, total = case.job, case.job.steps.warmup + case.job.steps.count
    training = Training(case, world)
    first, warmup = training.first, max(0, job.steps.warmup - training.first)
    bound, oracle = BOUNDS[training.model.dtype], min(job.train.oracle, total)
    steps = TrainSteps(warmup, total - first - warmup, job.steps.verify, bound, first, oracle)
    backend = training.model.exchange.backend
    work = StepWork((OpWork("step", 0.0, {"backend": backend}),), float(job.shape.tokens))
    report = step_listener(progress, total, first, work)
    samples = measure(world, steps, training, report, f"{case.name}: training by {backend}, from step {first}")
    if samples.max_error is not None or training.max_error is not None:
        samples.max_error = max(samples.max_error or 0.0, training.max_error or 0.0)
    line = result_line(case, "step", Traffic(0, 0), samples, 0) | shape_keys(case, backend)
    line |= {"bytes_wire": None, "gbps_wire": None, "routing": "sigmoid"}
    line |= {"tokens_per_s": tokens_per_second(world.size * job.shape.tokens, samples.us[0])}
    line |= {"losses": in_points(training.losses), "starts": training.starts[-MOST_POINTS:]}
    if world.device.type == "cuda":
        line |= {"sms": training.model.exchange.sms, "device": torch.cuda.get_device_name(world.device)}
    line |= load_keys(training.load(), 0)
    if len(training.losses) == total:
        training.checkpoints.remove()
    return [line]


def in_points(losses: list[float]) -> list[list[float]]:
    """Return the mean losses of equal parts of the steps, at most MOST_POINTS, each after the number of steps by then.

    >>> in_points([4.0, 2.0]), len(in_points([1.0] * 401)), in_points([1.0] * 401)[-1]
    ([[1, 4.0], [2, 2.0]], 134, [401, 1.0])
    """
    together = math.ceil(len(losses) / MOST_POINTS) or 1
    parts = [losses[start : start + together] for start in range(0, len(losses), together)]
    ends = [min(len(losses), (place + 1) * together) for place in range(len(parts))]
    return [[end, round(sum(part) / len(part), 6)] for end, part in zip(ends, parts, strict=True)]


class Training:
    """A model in training on this rank, and what its checkpoints keep."""

    def __init__(self, case: Case, world: World) -> None:
        self.world, self.job = world, case.job
        self.every, self.total = case.job.train.checkpoint_every, case.job.steps.warmup + case.job.steps.count
        self.model, self.text = TrainedModel(case.job, world), Text(case.job.routing.seed, case.job.shape.tokens)
        own = expert_parameters(self.model)
        self.others = [parameter for name, parameter in self.model.named_parameters() if name not in own]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM)
        self.losses: list[float] = []
        self.max_error: float | None = None
        compared = case.job.steps.verify and case.job.train.oracle > 0
        self._unsharded = UnshardedModel(case.job, self.model) if compared else None  # from the first weights
        self.checkpoints = Checkpoints(case, world)
        self.first = self._resume()
        self.starts = self.checkpoints.started(self.first)
        self._us = 0.0

    def __call__(self, index: int, *, verify: bool) -> Step:
        """Train the step unless it is done: the loop asks for a verified step twice. Return its time and error."""
        step = self.first + index
        if step == len(self.losses):
            self._train(step)
        error = self._error(step) if verify else None
        if not verify and (step + 1) % self.every == 0 and step + 1 < self.total:
            self.checkpoints.save(step + 1, self._state())
        return Step((self._us,), error)

    def load(self) -> Load:
        """Return the load of the layer with the busiest expert, over the steps of this generation."""
        layers = [
            Load([float(rows) for rows in stats.load], stats.rows, stats.capacity)
            for stats in routing_stats(self.model).values()
        ]
        busiest, steps = max(layers, key=Load.imbalance), max(1, len(self.losses) - self.first)
        return Load([rows / steps for rows in busiest.by_expert], busiest.busiest_rows, busiest.capacity)

    def _train(self, step: int) -> None:
        ids, following = (part.to(self.world.device) for part in self.text.of(self.world.rank, step))
        self.world.barrier("train: step")
        began = perf_counter_ns()
        loss: Any = nn.functional.cross_entropy(self.model(ids), following)
        self.optimizer.zero_grad()
        loss.backward()
        average_expert_gradients(self.model)
        self._average_others()
        clip_grad_norm(self.model, MAX_NORM)
        self.model.exchange.check()  # a refused step has NaN among its gradients
        self.optimizer.step()
        update_router_bias(self.model, BIAS_SPEED)
        losses = [float(str(answer)) for answer in self.world.swap(float(loss.detach()), "train: loss")]
        self._us = (perf_counter_ns() - began) / 1e3
        mean = sum(losses) / len(losses)
        if not math.isfinite(mean):
            raise WrongResult(f"the loss of step {step} is {losses} on the ranks, and finite numbers are needed")
        self.losses.append(mean)

    def _average_others(self) -> None:
        """Turn the gradients of what all ranks hold into their means, by messages of the hosts, in rank order."""
        gradients = [parameter.grad for parameter in self.others if parameter.grad is not None]
        own = torch.cat([gradient.flatten().float() for gradient in gradients]).cpu()
        means = []
        for piece in torch.split(own, PIECE):
            parts: list[bytes] = self.world.swap(piece.numpy().tobytes(), "train: gradients")  # type: ignore[assignment]
            rows = [torch.frombuffer(bytearray(part), dtype=torch.float32) for part in parts]
            means.append(torch.stack(rows).mean(dim=0))
        whole = torch.cat(means).to(self.world.device)
        for gradient, mean in zip(
            gradients, torch.split(whole, [gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(mean.view_as(gradient))

    def _error(self, step: int) -> float:
        assert self._unsharded is not None
        wanted = self._unsharded.loss_of(step)
        error = abs(self.losses[step] - wanted) / wanted
        self.max_error = max(error, self.max_error or 0.0)
        return error

    def _resume(self) -> int:
        """Load the last checkpoint of all ranks, if there is one; return its step."""
        step = self.checkpoints.latest()
        if step:
            state = self.checkpoints.load(step)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.losses, self.max_error = state["losses"], state["max_error"]
        return step

    def _state(self) -> dict[str, object]:
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer, "losses": self.losses, "max_error": self.max_error}
