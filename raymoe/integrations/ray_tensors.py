"""A tensor transport of Ray between actors of one host, on GPUs over NVLink and on CPUs through shared memory.

    from raymoe.integrations.ray_tensors import register_ray_tensors

    register_ray_tensors()  # before the classes of actors that name it

    @ray.remote(num_gpus=1, enable_tensor_transport=True)
    class Trainer:
        @ray.method(tensor_transport="raymoe")
        def weights(self):
            return dict(self.model.state_dict())

    engine.load.remote(trainer.weights.remote())

The source copies an object's tensors into a pool of memory that other processes can map (`raymoe.memory.tensor_pool`).
A receiver maps a segment of the pool once, and copies from it without the source (`raymoe.memory.tensor_reader`). Ray
carries the description of an object, which is small. Ray says when an object is freed; its memory is then used again.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import ray
import torch
from ray._private.ray_constants import RDT_FETCH_FAIL_TIMEOUT_SECONDS
from ray.experimental import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
)
from ray.experimental.rdt.rdt_manager import RDTSource
from ray.experimental.rdt.tensor_transport_manager import FetchRequest
from ray.experimental.rdt.util import get_tensor_transport_manager, transport_manager_info
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.integrations.ray_actors import device_here
from raymoe.memory.pool_devices import GpuPoolDevice, HostPoolDevice, PoolDevice
from raymoe.memory.tensor_pool import ExportedTensors, PoolLimits, TensorPool
from raymoe.memory.tensor_reader import Reading, TensorReader

NAME = "raymoe"
DEVICES = ["cpu", "cuda"]


def register_ray_tensors(
    name: str = NAME,
    *,
    pool_bytes: int = PoolLimits.pool_bytes,
    segment_bytes: int = PoolLimits.segment_bytes,
    wait_s: float = PoolLimits.wait_s,
) -> None:
    """Register the transport with Ray under a name, before a class of actors names it and before actors are made.

    Ray registers it in the actors too. A second call with the same values does nothing.

    - `pool_bytes` is the most memory of a source's pool on one device. The pool grows as it is needed and does not
      shrink.
    - `segment_bytes` is how much it grows by; more for an object that is larger.
    - `wait_s` is how long a source waits for Ray to free objects where its pool is full, before it raises.
    """
    limits = PoolLimits(pool_bytes, segment_bytes, wait_s)
    known = transport_manager_info.get(name.upper())
    if known is not None:
        kind: Any = known.transport_manager_class
        if issubclass(kind, RayTensors) and kind.limits == limits:
            return
        raise ConfigError(f"a tensor transport {name!r} is registered with other values; give this one another name")
    # Ray makes the transport of an actor without arguments, so a class of its own carries the limits there.
    register_tensor_transport(name, DEVICES, _named_class(name.upper(), limits), torch.Tensor)


def empty(
    *shape: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", transport: str = NAME
) -> Tensor:
    """Return a tensor without values in this process's pool.

    The transport takes such a tensor, and contiguous parts of it, without a copy at the source. So do not change it
    while an ObjectRef to it lives.
    """
    return _transport(transport).pool_on(torch.device(device)).empty(shape, dtype)


def usage(transport: str = NAME) -> dict[str, dict[str, int]]:
    """Return bytes and objects of this process's pools, by device."""
    return {str(device): asdict(pool.usage()) for device, pool in _transport(transport).pools.items()}


@dataclass
class RayTensorsMetadata(TensorTransportMetadata):
    """The part of an object that Ray carries from the source to a receiver."""

    exported: ExportedTensors | None = None


@dataclass
class _PendingRead(FetchRequest):
    """A read that `ray.get` has begun."""

    reading: Reading | None = None


class RayTensors(TensorTransportManager):
    """The transport in one process, as a source and as a receiver. Ray makes it."""

    name = NAME.upper()
    limits = PoolLimits()

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._devices: dict[torch.device, PoolDevice] = {}
        self._readers: dict[torch.device, TensorReader] = {}
        self.pools: dict[torch.device, TensorPool] = {}
        self._pool_of: dict[str, TensorPool] = {}
        self._reading: dict[str, int] = {}
        self._aborted: set[str] = set()

    # What Ray asks of every transport

    def tensor_transport_backend(self) -> str:
        return self.name

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        del actor  # Ray registers the transport in every actor that it uses it for
        return True

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        del src_actor, dst_actor, backend
        return CommunicatorMetadata()

    def send_multiple_tensors(
        self,
        tensors: list[Tensor],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        del tensors, tensor_transport_metadata, communicator_metadata
        raise NotImplementedError("receivers of this transport read by themselves; nothing is sent")

    # The source

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Tensor]) -> RayTensorsMetadata:
        """Export the tensors of an object. Ray calls this in the thread that made them, also again for the same one."""
        if not rdt_object:
            return RayTensorsMetadata([], None, None)
        try:
            pool = self.pool_on(rdt_object[0].device)
            exported = pool.export(obj_id, rdt_object)
        except BaseException:
            _forget(obj_id, self.name)
            raise
        with self._lock:
            self._pool_of[obj_id] = pool
        shapes: list[Any] = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        return RayTensorsMetadata(shapes, exported.kind, exported)

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: list[Tensor]
    ) -> None:
        """Free an object: nobody has an ObjectRef of it any more. Memory that is being read is freed after that."""
        del tensor_transport_meta, tensors
        with self._lock:
            pool = self._pool_of.pop(obj_id, None)
        if pool is not None:
            pool.release(obj_id)

    def pool_on(self, device: torch.device) -> TensorPool:
        """Return this process's pool on a device."""
        if device.type not in DEVICES:
            raise ConfigError(f"tensors on {device} cannot go by the tensor transport {self.name}: it has cpu and cuda")
        with self._lock:
            device = self._numbered(device)
            if device not in self.pools:
                self.pools[device] = TensorPool(self._device(device), self.limits, _own_name())
            return self.pools[device]

    # The receiver

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Read an object that is an argument of a task. Ray calls this in a thread of its own, beside the actor's."""
        del communicator_metadata
        with self._abortable(obj_id):
            reading = self._start(tensor_transport_metadata, target_buffers)
            if reading is None:
                return []
            with reading:
                return reading.wait(RDT_FETCH_FAIL_TIMEOUT_SECONDS, lambda: obj_id in self._aborted)

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Tensor] | None = None,
    ) -> FetchRequest:
        """Begin to read an object for `ray.get`, which begins all its reads before it waits for the first."""
        del communicator_metadata
        reading = self._start(tensor_transport_metadata, target_buffers)
        if reading is not None:
            reading.poll()
        return _PendingRead(obj_id, [], reading)

    def wait_fetch_complete(self, fetch_request: FetchRequest, timeout: float = -1) -> list[Tensor]:
        assert isinstance(fetch_request, _PendingRead)
        if fetch_request.reading is None:
            return []
        with fetch_request.reading as reading:
            return reading.wait(None if timeout < 0 else timeout)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """End the read of an object that is under way."""
        del communicator_metadata
        with self._lock:
            if obj_id in self._reading:
                self._aborted.add(obj_id)

    def _start(self, metadata: TensorTransportMetadata, targets: Sequence[Tensor] | None) -> Reading | None:
        assert isinstance(metadata, RayTensorsMetadata)
        exported = metadata.exported
        return None if exported is None else self._reader(exported).start(exported, targets)

    def _reader(self, exported: ExportedTensors) -> TensorReader:
        """Return the reader on this process's device of the same kind."""
        if exported.kind == "cuda" and not _sees_gpus():
            raise ConfigError(
                f"the tensors of {exported.owner} are on a GPU, and this process sees none: give it a GPU, or move the "
                "tensors to the CPU before they are returned"
            )
        device = torch.device("cpu" if exported.kind == "cpu" else device_here("cuda"))
        with self._lock:
            if device not in self._readers:
                self._readers[device] = TensorReader(self._device(device))
            return self._readers[device]

    @contextmanager
    def _abortable(self, obj_id: str) -> Iterator[None]:
        with self._lock:
            self._reading[obj_id] = self._reading.get(obj_id, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._reading[obj_id] -= 1
                if not self._reading[obj_id]:
                    del self._reading[obj_id]
                    self._aborted.discard(obj_id)

    def _device(self, device: torch.device) -> PoolDevice:
        """Return the one pool device, for the pool and for the reader."""
        if device not in self._devices:
            self._devices[device] = HostPoolDevice() if device.type == "cpu" else GpuPoolDevice.open(device.index)
        return self._devices[device]

    def _numbered(self, device: torch.device) -> torch.device:
        """Give `cuda` its number."""
        return torch.device(device_here("cuda")) if str(device) == "cuda" else device


def _named_class(name: str, limits: PoolLimits) -> type[RayTensors]:
    """Make a class that pickle carries by value, because no module has it."""
    return type(f"RayTensorsOf{name}", (RayTensors,), {"name": name, "limits": limits})


def _transport(name: str) -> RayTensors:
    if name.upper() not in transport_manager_info:
        raise ConfigError(f"no tensor transport {name!r} is registered here; call register_ray_tensors({name!r})")
    transport = get_tensor_transport_manager(name.upper())
    if not isinstance(transport, RayTensors):
        raise ConfigError(f"the tensor transport {name!r} is {type(transport).__name__}, not one of raymoe")
    return transport


def _forget(obj_id: str, transport: str) -> None:
    """Undo what Ray 2.60 did for an object that was not made.

    - Ray has stored the tensors, and would keep them.
    - An object that was put has a reference here. Ray will free it, and takes for granted that it has a description by
      then. Where it has none, Ray's callback raises an error that ends a process of Python 3.12 by a SIGSEGV.
    """
    worker: Any = ray._private.worker.global_worker
    manager = worker.rdt_manager
    if manager.rdt_store.has_object(obj_id):
        manager.rdt_store.pop_object(obj_id)
    was_put = ray.is_initialized() and obj_id.encode() in worker.core_worker.get_all_reference_counts()
    if was_put and not manager.is_managed_object(obj_id):
        nothing = RayTensorsMetadata([], None, None)
        manager.add_rdt_ref(ray.ObjectRef(bytes.fromhex(obj_id)), RDTSource.DRIVER, transport, nothing)


def _own_name() -> str:
    """Name this process for the messages of receivers."""
    where = f"pid {os.getpid()} on {socket.gethostname()}"
    try:
        actor: Any = ray.get_runtime_context().current_actor
    except RuntimeError:  # Ray has none for a driver
        return f"the driver ({where})"
    return f"the driver ({where})" if actor is None else f"{actor} ({where})"


def _sees_gpus() -> bool:
    return torch.version.cuda is not None and torch.cuda.device_count() > 0


__all__ = ["RayTensors", "RayTensorsMetadata", "empty", "register_ray_tensors", "usage"]
