"""Weights of one world's ranks, such as a trainer's, in memory that the ranks of another world on the host read.

Each rank of the trainer offers its experts, and rank 0 the other parameters too. Ranks of the engine map the offers of
all of them, whatever the two numbers of ranks, and take their own experts. Weights are in shared memory on CPUs, and in
device memory that CUDA IPC maps on GPUs. Words beside them, in shared memory, keep both sides apart:

- **epoch**, of the owner: twice the number of publications, and odd while one is written.
- **reading[r]**, of reader r: 1 while it reads. It sets the word, then looks at the epoch; the owner makes the epoch
  odd, then looks at the words. So at least one of them sees the other, and steps back.
- **mapped[r]**, of reader r: 1 while it maps the memory. The owner frees it after that.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from raymoe.errors import ConfigError, WiringError
from raymoe.memory import host_shm
from raymoe.memory.cuda_ipc import DeviceMemory, DeviceSegment, GpuMemory
from raymoe.memory.heap import DeviceBytes, Heap
from raymoe.memory.layout import Layout, Region
from raymoe.memory.world import World
from raymoe.moe.experts import ExpertsOfRank
from raymoe.moe.live_weights import WeightPiece, WeightTarget, targets_of
from raymoe.moe.model_loads import world_of

_LOOK_S = 0.0005
_CLOSING_S = 2.0
"""How long an owner waits at its close for readers that map its memory."""


class OfferedWeights:
    """A copy of a rank's weights, for the ranks of another world. `offer_weights` makes it.

    The memory is as large as the weights. One thread at a time uses this.
    """

    def __init__(self, model: nn.Module, readers: int) -> None:
        if type(readers) is not int or readers < 1:
            raise ConfigError(f"readers is {readers!r}; it is the number of the ranks that load the weights")
        world = world_of(model)
        expert_names = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            if isinstance(module, ExpertsOfRank)
            for name in module._parameters
        }
        targets = targets_of(model)
        self._targets = [each for name, each in targets.items() if world.rank == 0 or name in expert_names]
        self._model, self._world, self._readers = model, world, readers
        weights = Layout.of([_region(target) for target in self._targets])
        self._memory = _OfferMemory.own(world, weights, readers)
        self.epoch = 0
        """The number of publications."""

    def descriptor(self) -> dict[str, Any]:
        """Return what the readers need to map the memory, as plain values that may travel through Ray."""
        tables = [
            {
                "name": target.name,
                "shape": list(target.memory.shape),
                "dtype": str(target.memory.dtype).removeprefix("torch."),
                "experts": None if target.experts is None else list(target.experts),
            }
            for target in self._targets
        ]
        place = {"rank": self._world.rank, "size": self._world.size, "readers": self._readers}
        return place | {"weights": tables} | self._memory.descriptor()

    def publish(self, timeout_s: float | None = None) -> int:
        """Copy the weights as they are now, when no reader reads the last ones. Returns their epoch.

        All ranks of the trainer publish before the engine loads.
        """
        now = targets_of(self._model)
        if any(now[target.name].experts != target.experts for target in self._targets):
            raise ConfigError("experts moved to other slots since their weights were offered; offer them again")
        limit = self._world.timeout_s if timeout_s is None else timeout_s
        words, epochs = self._memory.words, self._memory.words.words("epoch")
        reading = words.words("reading")

        def begin() -> bool:
            epochs[0] = 2 * self.epoch + 1
            self._world.waiter.fence()
            if any(reading[reader] for reader in range(self._readers)):
                epochs[0] = 2 * self.epoch
                return False
            return True

        if not _within(limit, begin, self._world):
            who = [reader for reader in range(self._readers) if reading[reader]]
            raise WiringError(f"publish waited {limit:.1f} s for readers {who}, which load the weights before these")
        with torch.no_grad():
            for target in self._targets:
                self._memory.tensor(target.name).copy_(target.memory)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        self._world.waiter.fence()
        self.epoch += 1
        epochs[0] = 2 * self.epoch
        return self.epoch

    def close(self) -> None:
        """Free the memory when no reader maps it: after 2 s at most, else with the process."""
        mapped = self._memory.words.words("mapped")
        free = _within(_CLOSING_S, lambda: not any(mapped[r] for r in range(self._readers)), None)
        self._memory.close(free)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OpenedWeights:
    """The offers of all ranks of another world, mapped by this rank. `open_weights` makes it; `load` takes it."""

    def __init__(self, world: World, descriptors: Sequence[dict[str, Any]]) -> None:
        self._world, self._rank = world, world.rank
        self._offers: list[tuple[dict[str, Any], _OfferMemory]] = []
        _check_offers(descriptors, world)
        with ExitStack() as undo:
            for descriptor in descriptors:
                weights = Layout.of([Region(w["name"], tuple(w["shape"]), w["dtype"]) for w in descriptor["weights"]])
                memory = _OfferMemory.map(world, weights, descriptor)
                undo.callback(memory.close, True)
                self._offers.append((descriptor, memory))
            undo.pop_all()
        for _, memory in self._offers:
            memory.words.words("mapped")[self._rank] = 1

    @contextmanager
    def reading(self) -> Iterator[tuple[int, Iterable[WeightPiece]]]:
        """Hold the weights of all offers, which must be of one epoch. Their owners publish no others meanwhile."""
        held = [memory.words for _, memory in self._offers]
        try:
            epochs = [self._hold(words, rank) for rank, words in enumerate(held)]
            if len(set(epochs)) > 1 or not epochs[0]:
                raise ConfigError(
                    f"the ranks that offer weights have published {epochs} times; all publish before a load"
                )
            yield epochs[0], self._pieces()
        finally:
            self._world.waiter.fence()
            for words in held:
                words.words("reading")[self._rank] = 0

    def close(self) -> None:
        """Unmap the memory. Its owners free it then."""
        for _, memory in self._offers:
            mapped = memory.words.words("mapped")
            memory.close(True)
            mapped[self._rank] = 0
        self._offers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hold(self, words: Heap, owner: int) -> int:
        """Hold the weights of one owner, and return their epoch."""
        epoch, reading = words.words("epoch"), words.words("reading")

        def hold() -> bool:
            reading[self._rank] = 1
            self._world.waiter.fence()
            if epoch[0] % 2:
                reading[self._rank] = 0
                return False
            return True

        if not _within(self._world.timeout_s, hold, self._world):
            raise WiringError(
                f"rank {self._rank} waited {self._world.timeout_s:.1f} s for weights that rank {owner} of their owners "
                "writes; did it end in the middle?"
            )
        return epoch[0] // 2

    def _pieces(self) -> Iterator[WeightPiece]:
        """Give each expert once, though several ranks may hold copies of it."""
        taken: defaultdict[str, set[int]] = defaultdict(set)
        for descriptor, memory in self._offers:
            for entry in descriptor["weights"]:
                name, experts = entry["name"], entry["experts"]
                if experts is not None:
                    first = [expert not in taken[name] | set(experts[:place]) for place, expert in enumerate(experts)]
                    taken[name].update(experts)
                    experts = [expert if new else -1 for expert, new in zip(experts, first, strict=True)]
                yield WeightPiece(name, memory.tensor(name), experts)


def offer_weights(model: nn.Module, *, readers: int) -> OfferedWeights:
    """Offer the weights of a model of raymoe's layers to `readers` ranks of another world on this host.

    with raymoe.moe.offer_weights(trainer, readers=2) as offered:
        descriptor = offered.descriptor()  # from each rank of the trainer to each rank of the engine, once
        ...
        offered.publish()  # after each step
    """
    return OfferedWeights(model, readers)


def open_weights(world: World, descriptors: Sequence[dict[str, Any]]) -> OpenedWeights:
    """Map the weights that all ranks of another world offer to the ranks of this one.

    with raymoe.moe.open_weights(world, descriptors) as opened:
        raymoe.moe.load_weights(engine, opened)  # after each publication
    """
    return OpenedWeights(world, descriptors)


class _OfferMemory:
    """The memory of one offer, own or mapped: weights, and the words beside them, which are in host memory."""

    def __init__(self, words: Heap, layout: Layout, weights: Heap | DeviceSegment, device: torch.device) -> None:
        self.words, self._layout, self._weights, self._device = words, layout, weights, device
        self._segments: list[host_shm.HostSegment] = []

    @classmethod
    def own(cls, world: World, layout: Layout, readers: int) -> _OfferMemory:
        words = _words(readers)
        shared = host_shm.own(f"raymoe-{world.name}-offer", words.nbytes)
        try:
            if world.device.type == "cpu":
                own = host_shm.own(f"raymoe-{world.name}-weights", layout.nbytes)
                memory = cls(Heap(words, 0, [shared]), layout, Heap(layout, 0, [own]), world.device)
                memory._segments = [shared, own]
                return memory
            segment = DeviceMemory(GpuMemory(world.gpu)).own(f"raymoe-{world.name}-weights", layout.nbytes)
        except BaseException:
            shared.close()
            raise
        memory = cls(Heap(words, 0, [shared]), layout, segment, world.device)
        memory._segments = [shared]
        return memory

    @classmethod
    def map(cls, world: World, layout: Layout, descriptor: dict[str, Any]) -> _OfferMemory:
        shared = host_shm.map_peer(descriptor["words"])
        words = Heap(_words(descriptor["readers"]), 0, [shared])
        if world.device.type == "cpu":
            weights = host_shm.map_peer(descriptor["memory"])
            return cls(words, layout, Heap(layout, 0, [weights]), world.device)
        return cls(words, layout, DeviceMemory(GpuMemory(world.gpu)).map_peer(descriptor["memory"]), world.device)

    def descriptor(self) -> dict[str, Any]:
        memory = self._weights if isinstance(self._weights, DeviceSegment) else self._segments[1]
        return {"words": self._segments[0].descriptor(), "memory": memory.descriptor()}

    def tensor(self, name: str) -> Tensor:
        """Return the memory of a parameter."""
        if isinstance(self._weights, Heap):
            return self._weights.tensor(name)
        placed = self._layout.find(name)
        memory = DeviceBytes(self._weights.address + placed.offset, placed.region.nbytes, self._weights.owner)
        dtype: torch.dtype = getattr(torch, placed.region.dtype)
        return torch.as_tensor(memory, device=self._device).view(dtype).view(placed.region.shape)

    def close(self, free: bool) -> None:
        """Close it. Own memory that a reader may still map stays until the process ends, unless `free`."""
        if free or isinstance(self._weights, Heap):
            self._weights.close()
        for segment in self._segments:
            segment.close()


def _words(readers: int) -> Layout:
    return Layout.of([Region.words("epoch", 1), Region.words("reading", readers), Region.words("mapped", readers)])


def _region(target: WeightTarget) -> Region:
    if target.memory.dtype == torch.float8_e4m3fn:
        raise ConfigError(f"{target.name} has 8-bit values, which cannot be offered; layer.load takes them")
    return Region(target.name, tuple(target.memory.shape), str(target.memory.dtype).removeprefix("torch."))


def _check_offers(descriptors: Sequence[dict[str, Any]], world: World) -> None:
    """Refuse descriptors that are not those of all ranks of one world, made for the ranks of this one."""
    if not descriptors:
        raise ConfigError("no offers were given; give the descriptor of each rank that offers weights")
    for place, descriptor in enumerate(descriptors):
        host_shm.check_fields(descriptor, {"rank": int, "size": int, "readers": int, "weights": list, "words": dict})
        if descriptor["size"] != len(descriptors) or descriptor["rank"] != place:
            raise ConfigError(
                f"the offer at place {place} of {len(descriptors)} is of rank {descriptor['rank']} of "
                f"{descriptor['size']}; give those of all ranks, in their order"
            )
        if descriptor["readers"] != world.size:
            raise ConfigError(
                f"weights were offered to {descriptor['readers']} readers; this world has {world.size} ranks"
            )


def _within(limit_s: float, attempt: Callable[[], bool], world: World | None) -> bool:
    """Try until it succeeds, `limit_s` at most, or until the world is told to stop."""
    deadline = time.monotonic() + limit_s
    while not attempt():
        if time.monotonic() > deadline:
            return False
        if world is not None:
            world.waiter.check()
        time.sleep(_LOOK_S)
    return True
