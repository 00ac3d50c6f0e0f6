"""Actors that give and take tensors by raymoe's tensor transport of Ray, on CPUs or on GPUs."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray.experimental import set_target_for_ref

from raymoe.errors import ConfigError
from raymoe.integrations import ray_tensors

SMALL = "raymoe_small"
SMALL_BYTES = 16 * 2**20
DTYPES = [
    *(torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def register() -> None:
    """Register the transports of these actors: one with the usual pool, one with a small pool that waits for 1 s."""
    ray_tensors.register_ray_tensors()
    ray_tensors.register_ray_tensors(SMALL, pool_bytes=SMALL_BYTES, segment_bytes=SMALL_BYTES // 4, wait_s=1.0)


register()  # Ray looks names of transports up when it sees them in a class


def random_tensor(draw: random.Random, device: str) -> torch.Tensor:
    """Make a tensor of random bytes: of any dtype, contiguous or not, sometimes without elements."""
    dtype = draw.choice(DTYPES)
    shape = [draw.choice([0, 1, 3, 8, 50, 300]) for _ in range(draw.randint(0, 3))]
    numbers = torch.Generator().manual_seed(draw.getrandbits(40))
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=numbers)
    tensor = values.view(dtype).view(shape).to(device)
    if draw.random() < 0.4 and tensor.dim() > 1:
        return tensor.transpose(0, 1)
    return tensor[::2] if draw.random() < 0.3 and tensor.dim() else tensor


def random_object(seed: int, device: str) -> dict[str, Any]:
    """Make an object with some tensors and other values in it; the same for the same seed on every device."""
    draw = random.Random(seed)
    tensors = [random_tensor(draw, device) for _ in range(draw.randint(0, 5))]
    return {"seed": seed, "list": tensors, "one": random_tensor(draw, device), "nested": {"text": "x", 1: tensors[:1]}}


def digest(value: Any) -> str:
    """Return a hash of all bytes of an object, with dtypes and shapes."""
    total = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            total.update(f"{part.dtype} {tuple(part.shape)}".encode())
            total.update(
                bytes(part.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).cpu().numpy())
            )
        elif isinstance(part, dict):
            for key, inner in part.items():
                add(key)
                add(inner)
        elif isinstance(part, list | tuple):
            for inner in part:
                add(inner)
        else:
            total.update(repr(part).encode())

    add(value)
    return total.hexdigest()


def eventually(seconds: float, condition: Any) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class TensorActor:
    """A source and a receiver."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.held: Any = None

    @ray.method(tensor_transport="raymoe")
    def random(self, seed: int) -> dict[str, Any]:
        return random_object(seed, self.device)

    @ray.method(tensor_transport="raymoe")
    def value(self, number: float, count: int) -> torch.Tensor:
        return torch.full((count,), number, device=self.device)

    @ray.method(tensor_transport="raymoe")
    def late(self, number: float, count: int, seconds: float) -> torch.Tensor:
        """Return a tensor that the GPU writes after so many seconds."""
        tensor = torch.zeros(count, device=self.device)
        torch.cuda._sleep(int(seconds * 1.7e9))
        return tensor.fill_(number)

    @ray.method(tensor_transport=SMALL)
    def late_and_small(self, number: float, count: int, seconds: float) -> torch.Tensor:
        return TensorActor.late(self, number, count, seconds)

    @ray.method(tensor_transport="raymoe")
    def on_cpu(self, number: float, count: int) -> torch.Tensor:
        return torch.full((count,), number)

    @ray.method(tensor_transport="raymoe")
    def on_both(self) -> list[torch.Tensor]:
        return [torch.ones(3, device=self.device), torch.ones(3)]

    @ray.method(tensor_transport="raymoe")
    def in_pool(self, number: float, count: int) -> torch.Tensor:
        return ray_tensors.empty(count, device=self.device).fill_(number)

    @ray.method(tensor_transport=SMALL)
    def small(self, number: float, count: int) -> torch.Tensor:
        return torch.full((count,), number, device=self.device)

    @ray.method(tensor_transport="raymoe")
    def with_gradients(self) -> list[torch.Tensor]:
        own = torch.nn.Parameter(torch.ones(1000, device=self.device))
        return [own, own * 2]

    @ray.method(tensor_transport="raymoe")
    def sparse(self) -> torch.Tensor:
        return torch.ones(3, device=self.device).to_sparse()

    def put(self, seed: int) -> list[ray.ObjectRef]:
        return [ray.put(random_object(seed, self.device), _tensor_transport="raymoe")]

    def put_value(self, number: float, count: int) -> list[ray.ObjectRef]:
        return [ray.put(torch.full((count,), number, device=self.device), _tensor_transport="raymoe")]

    def digest(self, value: Any) -> tuple[str, set[str]]:
        """Return the hash of an object that came, and the devices of its tensors."""
        return digest(value), {tensor.device.type for tensor in (*value["list"], value["one"])}

    def forms(self, values: list[torch.Tensor]) -> list[tuple[str, bool, float]]:
        return [(type(value).__name__, value.requires_grad, float(value.detach().sum())) for value in values]

    def sums(self, *values: torch.Tensor) -> list[float]:
        return [float(value.double().sum()) for value in values]

    def sums_beside(self, *values: torch.Tensor) -> list[float]:
        """Add up on a stream of this actor's own, without waiting for another one."""
        with torch.cuda.stream(torch.cuda.Stream()):
            return self.sums(*values)

    def capture(self, seconds: float) -> float:
        """Capture a graph for so long, and return the result of its replay."""
        before = torch.ones(4, device=self.device)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            after = before + 1
            time.sleep(seconds)
        graph.replay()
        return float(after.sum())

    def put_sparse(self) -> tuple[str, set[str]]:
        """Put what is refused. Return the refusal, and what Ray's frees of objects answered: `None` is right."""
        manager, refusal, frees = ray._private.worker.global_worker.rdt_manager, "", []
        free = manager.queue_or_free_object_primary_copy

        def watched_free(obj_id: str) -> None:
            """Raise nothing: the caller is C++, and an error there ends this process in Python 3.12."""
            try:
                frees.append(str(free(obj_id)))
            except Exception as error:  # noqa: BLE001
                frees.append(repr(error))

        manager.queue_or_free_object_primary_copy = watched_free
        try:
            ray.put(torch.ones(3, device=self.device).to_sparse(), _tensor_transport="raymoe")
        except ConfigError as error:
            refusal = str(error)
        try:
            gc.collect()  # the error's frames have the reference
            eventually(10, lambda: bool(frees))
        finally:
            del manager.queue_or_free_object_primary_copy
        return refusal, set(frees)

    def put_in_capture(self) -> None:
        value = torch.ones(4, device=self.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ray.put(value, _tensor_transport="raymoe")

    def gpu(self) -> int:
        return int(ray.get_gpu_ids()[0])

    def get(self, refs: list[ray.ObjectRef]) -> list[str]:
        return [digest(value) for value in ray.get(refs)]

    def into(self, refs: list[ray.ObjectRef], count: int, device: str) -> tuple[bool, float]:
        """Get a tensor into memory of this actor's own."""
        target = torch.zeros(count, device=device)
        set_target_for_ref(refs[0], [target])
        found = ray.get(refs[0])
        return found.data_ptr() == target.data_ptr(), float(found.double().sum())

    def hold(self, refs: list[ray.ObjectRef] | None) -> None:
        self.held = refs

    def usage(self, transport: str = "raymoe") -> dict[str, int]:
        """Return the usage of the pool on this actor's device; an empty one has none yet."""
        pools = ray_tensors.usage(transport)
        return next((usage for device, usage in pools.items() if device.startswith(self.device)), {"objects": 0})

    def stored(self) -> int:
        """Return the number of objects that Ray keeps here."""
        return int(ray._private.worker.global_worker.rdt_manager.rdt_store.get_num_objects())

    def pools_mapped(self) -> list[str]:
        """Return the pools, by the pid in their names, that this process has mapped."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sorted({line.rpartition("raymoe-tensors-")[2].split()[0] for line in lines if "raymoe-tensors-" in line})

    def pid(self) -> int:
        return os.getpid()
