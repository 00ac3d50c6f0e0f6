"""Actors that give tensors by each way that Ray has, for the times of test_ray_tensors.py."""

from __future__ import annotations

from typing import Any

import ray
import torch
import torch.distributed as dist

from raymoe.integrations import ray_tensors

POOL_BYTES = 6 * 2**30

ray_tensors.register_ray_tensors(pool_bytes=POOL_BYTES)  # before a class names it


class TensorPath:
    """A source or a receiver. The source makes its tensors before a clock starts."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.tensors: dict[tuple[str, int], torch.Tensor] = {}

    def prepare(self, nbytes: int) -> int:
        """Make tensors of one size; return what a receiver finds at their end."""
        self.tensors.clear()
        self.tensors["plain", nbytes] = torch.arange(nbytes // 4, dtype=torch.int32, device=self.device)
        own = ray_tensors.empty(nbytes // 4, dtype=torch.int32, device=self.device)
        self.tensors["pool", nbytes] = own.copy_(self.tensors["plain", nbytes])
        self.wait()
        return nbytes // 4 - 1

    @ray.method(tensor_transport="raymoe")
    def raymoe(self, nbytes: int) -> torch.Tensor:
        return self.tensors["plain", nbytes]

    @ray.method(tensor_transport="raymoe")
    def raymoe_in_pool(self, nbytes: int) -> torch.Tensor:
        return self.tensors["pool", nbytes]

    @ray.method(tensor_transport="nccl")
    def ray_nccl(self, nbytes: int) -> torch.Tensor:
        return self.tensors["plain", nbytes]

    def object_store(self, nbytes: int) -> torch.Tensor:
        return self.tensors["plain", nbytes]

    def no_tensor(self, nbytes: int) -> int:
        """Take Ray's part of the time alone."""
        return nbytes // 4 - 1

    def take(self, value: Any) -> int:
        """Receive as an argument, and return the last element."""
        if isinstance(value, torch.Tensor):
            assert value.device.type == self.device
            last = int(value[-1])
            self.wait()
            return last
        return int(value)

    def meet(self, rank: int, address: str) -> None:
        """Join a group of torch's own, for sends by NCCL or Gloo that Ray does not carry."""
        backend = "nccl" if self.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=2)

    def send(self, nbytes: int) -> int:
        dist.send(self.tensors["plain", nbytes], 1)
        self.wait()
        return nbytes // 4 - 1

    def receive(self, nbytes: int) -> int:
        value = torch.empty(nbytes // 4, dtype=torch.int32, device=self.device)
        dist.recv(value, 0)
        return self.take(value)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
