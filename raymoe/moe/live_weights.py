"""New weights for layers that are in use: checked whole, then copied to where captured graphs read them.

A load is collective. All ranks check first, and no byte changes unless the load is right on all of them. Then each rank
waits for its own steps, which end only when all ranks have come to them, and meets the others. So every step before
the load reads old weights alone on all ranks, and every later one new weights alone, replays of graphs included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from math import prod
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from raymoe.cuda.current import capturing
from raymoe.errors import CaptureError, ConfigError, RaymoeError, WeightsMissing
from raymoe.memory.missing_weights import MissingWeights
from raymoe.memory.sleeping import SleepingMemory
from raymoe.memory.world import World
from raymoe.moe.experts import ExpertsOfRank, local


@dataclass(frozen=True)
class WeightPiece:
    """A part of a parameter. `experts` are the numbers, among those of all ranks, of the experts along dimension 0.

    -1 is no expert: such a part is left out. `at` is where the piece begins in each further dimension of an expert, or
    in all dimensions of another parameter; None: it is whole there.
    """

    name: str
    values: Tensor
    experts: Sequence[int] | None = None
    at: Sequence[int] | None = None


class WeightSource(Protocol):
    """Weights that may change while nobody reads them, as those of a trainer."""

    def reading(self) -> AbstractContextManager[tuple[int, Iterable[WeightPiece]]]:
        """Keep them unchanged inside the `with`. Gives their epoch and the pieces."""


@dataclass(frozen=True)
class WeightTarget:
    """A parameter of this rank. `experts` are the numbers of the experts that it holds, of `of` in all; -1: none."""

    name: str
    memory: Tensor
    experts: Sequence[int] | None = None
    of: int = 0

    @property
    def whole(self) -> int:
        """How many numbers a whole load gives it."""
        if self.experts is None or not self.experts:
            return self.memory.numel()
        return self.memory.numel() // len(self.experts) * sum(expert >= 0 for expert in self.experts)

    def pairs(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return which row of a piece goes to which place: an expert's row to each of its slots here."""
        assert self.experts is not None
        rows = {expert: row for row, expert in enumerate(numbers) if expert >= 0}
        return [(rows[expert], place) for place, expert in enumerate(self.experts) if expert in rows]

    def checked(self, piece: WeightPiece, cast: bool) -> tuple[Sequence[int] | None, list[int]]:
        """Return the numbers of the piece's experts and its begin in the other dimensions; raise if it does not fit."""
        values, shape = piece.values, list(piece.values.shape)
        if values.dtype != self.memory.dtype and torch.float8_e4m3fn in (values.dtype, self.memory.dtype):
            raise ConfigError(
                f"{self.name} is {self.memory.dtype} and was given {values.dtype}, and a cast knows no scales; give "
                "the values and scales that raymoe.fp8.quantise_weight makes"
            )
        if values.dtype != self.memory.dtype and not cast:
            raise ConfigError(
                f"{self.name} is {self.memory.dtype} and was given {values.dtype}; cast=True rounds it as it is copied"
            )
        if values.dim() != self.memory.dim():
            raise ConfigError(f"{self.name} has shape {list(self.memory.shape)} and was given {shape}")
        first = 0 if self.experts is None else 1
        sizes, own = shape[first:], list(self.memory.shape[first:])
        at = [0] * len(own) if piece.at is None else list(piece.at)
        if piece.at is None and sizes != own:
            raise ConfigError(
                f"{self.name} was given {shape}, and {'an expert' if first else 'it'} has {own}; say where a slice "
                "begins by at="
            )
        if len(at) != len(own) or any(a < 0 or a + n > most for a, n, most in zip(at, sizes, own, strict=True)):
            raise ConfigError(
                f"{self.name} was given {sizes} from {at} on, and {'an expert' if first else 'it'} has {own}"
            )
        return (self._numbers(piece) if first else None), at

    def _numbers(self, piece: WeightPiece) -> Sequence[int]:
        """Return the numbers of the piece's experts: those given, or of all ranks, or this rank's own."""
        assert self.experts is not None
        count, numbers = piece.values.shape[0], piece.experts
        if numbers is None:
            if count not in (self.of, len(self.experts)):
                raise ConfigError(
                    f"{self.name} was given {count} experts; without experts= it takes all {self.of}, or the "
                    f"{len(self.experts)} of this rank"
                )
            if count == self.of == len(self.experts) and list(self.experts) != list(range(self.of)):
                raise ConfigError(
                    f"{self.name} was given {count} experts, which may be all of them or those in the slots of this "
                    f"rank, {list(self.experts)}; say which by experts="
                )
            return range(self.of) if count == self.of else self.experts
        somebodys = [number for number in numbers if number != -1]
        if len(numbers) != count or len({*somebodys}) != len(somebodys) or any(not 0 <= e < self.of for e in somebodys):
            raise ConfigError(
                f"{self.name} was given {count} experts with the numbers {list(numbers)}; each has one of its own "
                f"from 0 to {self.of - 1}"
            )
        return numbers


def targets_of(model: nn.Module) -> dict[str, WeightTarget]:
    """Return what can be loaded, by name: all parameters and saved buffers."""
    targets = {}
    for path, module in model.named_modules():
        saved = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for own, tensor in {**module._parameters, **saved}.items():
            if tensor is None:
                continue
            name, memory = f"{path}.{own}" if path else own, local(tensor.detach())
            assert memory is not None
            if isinstance(module, ExpertsOfRank):
                targets[name] = WeightTarget(name, memory, module.numbers, module.of)
            elif memory.shape != tensor.shape:
                raise ConfigError(f"{name} is spread over ranks, so no rank can load it alone; load its state_dict")
            else:
                targets[name] = WeightTarget(name, memory)
    return targets


@dataclass
class _Coverage:
    """The parts of one parameter that were given: by place of an expert, boxes of (begin, end) in each dimension."""

    boxes: defaultdict[int, list[list[tuple[int, int]]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, places: Iterable[int], box: list[tuple[int, int]]) -> None:
        for place in places:
            for other in self.boxes[place]:
                if all(
                    a < other_end and other_a < end for (a, end), (other_a, other_end) in zip(box, other, strict=True)
                ):
                    raise ConfigError(f"a part of {name} was given twice")
            self.boxes[place].append(box)

    @property
    def numbers(self) -> int:
        """How many numbers were given."""
        return sum(prod(end - a for a, end in box) for boxes in self.boxes.values() for box in boxes)


@dataclass(frozen=True)
class _Copy:
    """One copy, from the memory of a piece, or of a copy of it, to that of a parameter."""

    to: Tensor
    values: Tensor


class Loading:
    """A load in several pieces, which takes effect at its end, on all ranks or on none.

    Until then passes read the old weights. Pieces are copied to memory beside them, unless `staged` is False: then the
    program leaves them unchanged until the end.
    """

    def __init__(
        self, world: World, model: nn.Module, *, partial: bool = False, cast: bool = False, staged: bool = True
    ) -> None:
        if capturing(world.device):
            raise CaptureError("weights were to be loaded inside a capture; load them between replays")
        self._world, self._model = world, model
        self._partial, self._cast, self._staged = partial, cast, staged
        self._targets = targets_of(model)
        self._given: defaultdict[str, _Coverage] = defaultdict(_Coverage)
        self._copies: list[_Copy] = []
        self._began = _epochs(model)
        self.epoch: int | None = None
        """The number of these weights. All ranks must have the same; None: one more than that of the old weights."""

    def load(
        self, weights: Tensor | Mapping[str, Tensor], name: str = "", *, experts: Any = None, at: Any = None
    ) -> None:
        """Give parts: a tensor and the name of its parameter, or several by name.

        `experts` has the numbers of the experts along dimension 0; others than those of this rank are left out. By
        default they are those of all ranks or of this one. `at` is where a slice begins in each other dimension.
        """
        parts = {name: weights} if isinstance(weights, Tensor) else weights
        for full, values in parts.items():
            self.add(WeightPiece(full, values, experts, at))

    def add(self, piece: WeightPiece) -> None:
        """Give one piece."""
        if (target := self._targets.get(piece.name)) is None:
            raise ConfigError(f"no parameter is named {piece.name!r}; there are {', '.join(self._targets)}")
        numbers, at = target.checked(piece, self._cast)
        values = piece.values.detach()
        sizes = values.shape[0 if numbers is None else 1 :]
        inside = tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))
        box = [(a, a + n) for a, n in zip(at, sizes, strict=True)]
        if numbers is None:
            self._given[piece.name].add(piece.name, [0], box)
            self._copy(target.memory[inside], values)
            return
        pairs = target.pairs(numbers)
        self._given[piece.name].add(piece.name, [place for _, place in pairs], box)
        for row, place, count in _runs(pairs):
            self._copy(target.memory[(slice(place, place + count), *inside)], values[row : row + count])

    def _copy(self, to: Tensor, values: Tensor) -> None:
        if self._staged:
            values = values.to(to.device, to.dtype, copy=True)
        self._copies.append(_Copy(to, values))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """Let the weights take effect, or on an error of any rank leave all ranks' weights as they are."""
        problem = error
        if error is None:
            try:
                self._check_whole()
            except ConfigError as incomplete:
                problem = incomplete
        if isinstance(problem, Exception):
            with suppress(RaymoeError):  # the problem is the cause
                self._meet(problem)
        if error is not None:
            return
        if problem is not None:
            raise problem
        self._meet(None)
        self._write()

    def _check_whole(self) -> None:
        """Refuse what would leave old weights beside new ones."""
        if self._began != (epochs := _epochs(self._model)):
            raise ConfigError(
                f"weights {self._began} were loaded anew, now {epochs}, while these were; load them again"
            )
        if {name: target.experts for name, target in targets_of(self._model).items()} != {
            name: target.experts for name, target in self._targets.items()
        }:
            raise ConfigError("experts moved to other slots while weights were loaded; load them again")
        rank, memory = self._world.rank, self._world.shared(SleepingMemory)
        if memory.asleep:
            raise ConfigError(f"weights were to be loaded on rank {rank}, which sleeps; call world.wake before")
        if (operation := memory.in_flight) is not None:
            raise ConfigError(
                f"weights were to be loaded on rank {rank} while {operation} is in flight; let it end first"
            )
        if self._partial:
            return
        missing = []
        for name, target in self._targets.items():
            given, whole = self._given[name].numbers, target.whole
            if given < whole:
                missing.append(f"{name} ({given} of {whole} numbers)" if given else name)
        if missing:
            raise ConfigError(
                f"weights lack {', '.join(missing)}: old numbers would stay beside new ones; partial=True allows it"
            )

    def _meet(self, problem: Exception | None) -> None:
        """Wait for the steps of this rank. Raise on all ranks where one has a problem or weights of another epoch."""
        _synchronise(self._world)
        epoch = max(self._began, default=0) + 1 if self.epoch is None else self.epoch
        own = epoch, None if problem is None else str(problem) or type(problem).__name__
        theirs: list[Any] = self._world.swap(own, "load: weights are checked")
        for rank, (_, other) in enumerate(theirs):
            if other is not None:
                raise ConfigError(f"weights were not loaded, because of rank {rank}: {other}")
        if len(set(theirs)) > 1:
            raise ConfigError(f"ranks load the weights of epochs {[other for other, _ in theirs]}; all load the same")
        self.epoch = epoch

    def _write(self) -> None:
        """Copy. No rank runs a step until all ranks have all numbers."""
        world = self._world
        missing = world.shared(MissingWeights)
        touched = {name: target for name, target in self._targets.items() if self._given[name].numbers}
        whole = [
            target.memory.data_ptr()
            for name, target in touched.items()
            if self._given[name].numbers == target.whole or target.memory.data_ptr() not in missing
        ]
        missing.add({target.memory.data_ptr(): name for name, target in touched.items()}, "a load did not end")
        problem: Exception | None = None
        try:
            self._copy_all()
        except Exception as error:  # noqa: BLE001  raised below, after the other ranks know
            problem = error
        text = None if problem is None else str(problem) or type(problem).__name__
        ended = world.swap(text, "load: weights are there")
        if problem is not None:
            raise problem
        for rank, other in enumerate(ended):
            if other is not None:
                raise WeightsMissing(f"weights are half loaded, because of rank {rank}: {other}")
        missing.remove(whole)
        for module in _experts_of(self._model):
            assert self.epoch is not None
            module.epoch = self.epoch

    def _copy_all(self) -> None:
        with torch.no_grad():
            for each in self._copies:
                each.to.copy_(each.values, non_blocking=True)
        _synchronise(self._world)
        self._copies.clear()


def _runs(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Join neighbours, so that one copy moves them.

    >>> list(_runs([(0, 4), (1, 5), (3, 6), (4, 2)]))
    [(0, 4, 2), (3, 6, 1), (4, 2, 1)]
    """
    run: tuple[int, int, int] | None = None
    for row, place in pairs:
        if run is not None and (row, place) == (run[0] + run[2], run[1] + run[2]):
            run = run[0], run[1], run[2] + 1
            continue
        if run is not None:
            yield run
        run = row, place, 1
    if run is not None:
        yield run


def _experts_of(model: nn.Module) -> list[ExpertsOfRank]:
    return [module for module in model.modules() if isinstance(module, ExpertsOfRank)]


def _epochs(model: nn.Module) -> set[int]:
    return {module.epoch for module in _experts_of(model)}


def _synchronise(world: World) -> None:
    """Wait for all work of this rank's device."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def load_into(
    model: nn.Module,
    world: World,
    weights: Mapping[str, Tensor] | WeightSource,
    *,
    experts: Sequence[int] | None = None,
    partial: bool = False,
    cast: bool = False,
) -> int:
    """Load all pieces at once, straight from where they are, and return their epoch."""
    loading = Loading(world, model, partial=partial, cast=cast, staged=False)
    source = _given(weights, experts) if isinstance(weights, Mapping) else weights.reading()
    with ExitStack() as held, loading:  # the source is held until the load has ended
        loading.epoch, pieces = held.enter_context(source)
        for piece in pieces:
            loading.add(piece)
    assert loading.epoch is not None
    return loading.epoch


def _given(
    weights: Mapping[str, Tensor], experts: Sequence[int] | None
) -> AbstractContextManager[tuple[int | None, Iterable[WeightPiece]]]:
    """Return tensors by name as a source. Nobody changes them."""
    return nullcontext((None, [WeightPiece(name, values, experts) for name, values in weights.items()]))
