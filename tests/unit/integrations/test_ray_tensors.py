"""The tensor transport of Ray in one process, without a Ray: aborts, refusals, and what its class carries."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace

import pytest
import torch
from ray import cloudpickle
from ray.experimental import CommunicatorMetadata

from raymoe.errors import Aborted, ConfigError
from raymoe.integrations import ray_tensors
from raymoe.integrations.ray_tensors import RayTensors, RayTensorsMetadata
from raymoe.memory.tensor_pool import PoolLimits, TensorPool
from raymoe.memory.tensor_reader import TensorReader
from tests.unit.memory.pool_streams import SlowDevice

CPU = torch.device("cpu")


class Both:
    """A transport whose device writes and copies when a test says so, as a source and as a receiver."""

    def __init__(self) -> None:
        self.device, self.transport = SlowDevice(), RayTensors()
        self.transport.pools[CPU] = TensorPool(self.device, PoolLimits(), "Actor(Trainer, 1234)")
        self.transport._readers[CPU] = TensorReader(self.device)

    def export(self, name: str) -> RayTensorsMetadata:
        return self.transport.extract_tensor_transport_metadata(name, [torch.ones(4)])

    def finish(self) -> None:
        for work in (*self.device.writes, *self.device.copies):
            self.device.finish(work)

    def close(self) -> None:
        self.finish()
        self.transport._readers[CPU].close()
        self.transport.pools[CPU].close()


@pytest.fixture
def both():
    made = Both()
    yield made
    made.close()


def test_an_abort_ends_a_read_and_nothing_else(both: Both) -> None:
    """The next read of the same object, from another task, works."""
    metadata, nobody = both.export("a"), CommunicatorMetadata()
    both.transport.abort_transport("a", nobody)  # no read is under way
    late = threading.Timer(0.2, both.transport.abort_transport, ("a", nobody))
    late.start()
    with pytest.raises(Aborted, match=r"of tensors of Actor\(Trainer, 1234\) was aborted"):
        both.transport.recv_multiple_tensors("a", metadata, nobody)
    late.join()
    fetch = both.transport.fetch_multiple_tensors("a", metadata, nobody)
    both.finish()
    threading.Timer(0.1, both.finish).start()
    assert torch.equal(both.transport.wait_fetch_complete(fetch, 60)[0], torch.ones(4))
    both.transport.garbage_collect("a", metadata, [])
    assert both.transport.pools[CPU].usage().used_bytes == 0
    assert not both.transport._aborted and not both.transport._reading and not both.transport._pool_of


def test_many_gets_are_begun_before_the_first_is_waited_for(both: Both) -> None:
    nobody = CommunicatorMetadata()
    described = [both.export(name) for name in "abc"]
    both.finish()
    fetches = [both.transport.fetch_multiple_tensors("x", metadata, nobody) for metadata in described]
    assert len(both.device.copies) == 3
    with pytest.raises(TimeoutError):
        both.transport.wait_fetch_complete(fetches[0], 0)
    both.finish()
    assert torch.equal(both.transport.wait_fetch_complete(fetches[1])[0], torch.ones(4))


def test_an_object_without_tensors_needs_no_pool() -> None:
    transport = RayTensors()
    metadata = transport.extract_tensor_transport_metadata("a", [])
    assert transport.recv_multiple_tensors("a", metadata, CommunicatorMetadata()) == []
    transport.garbage_collect("a", metadata, [])
    assert transport.pools == {}


def test_other_devices_are_refused(both: Both) -> None:
    with pytest.raises(ConfigError, match="tensors on meta cannot go by the tensor transport RAYMOE"):
        both.transport.extract_tensor_transport_metadata("a", [torch.empty(3, device="meta")])
    if torch.version.cuda is None:
        metadata = both.export("a")
        assert metadata.exported is not None
        on_gpu = replace(metadata, exported=replace(metadata.exported, kind="cuda"))
        with pytest.raises(ConfigError, match=r"of Actor\(Trainer, 1234\) are on a GPU, and this process sees none"):
            both.transport.recv_multiple_tensors("a", on_gpu, CommunicatorMetadata())


def test_the_class_carries_its_name_and_limits_to_actors() -> None:
    kind = ray_tensors._named_class("OTHER", PoolLimits(2**21, 2**22, 3.0))
    carried = pickle.loads(cloudpickle.dumps(kind))()
    assert (carried.tensor_transport_backend(), carried.limits) == ("OTHER", PoolLimits(2**21, 2**22, 3.0))
    assert isinstance(carried, RayTensors) and carried.is_one_sided() and carried.can_abort_transport()
