"""Models are often built and run under a default device of torch; tensors that ranks make must not be on it."""

from __future__ import annotations

import pytest
import torch

from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.transport.channel import Channel
from tests.unit.worlds import close, each, wired


@pytest.mark.parametrize("backend", ["host", "collective", "allgather"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_exchange_of_cpu_ranks_ignores_the_default_device(backend: str, dtype: str) -> None:
    [world] = wired(1)
    spec = ExchangeSpec(tokens=4, hidden=16, experts=4, topk=2, dtype=dtype)
    x, weights = torch.ones(3, 16, dtype=getattr(torch, dtype)), torch.full((3, 2), 0.5)
    ids = torch.tensor([[0, 1], [2, 3], [0, -1]])
    with torch.device("meta"), Exchange(world, spec, backend) as exchange:
        for value in (1.0, float("nan")):  # sums of bfloat16 that are NaN are computed a second time
            got = exchange.dispatch(x * value, ids, weights)
            y = exchange.combine(got.x, got)
            places = (y, got.x, got.expert_counts, got.expert_offsets)
            assert {str(place.device) for place in places} == {"cpu"}
            assert torch.equal(y[:, 0], torch.tensor([1.0, 1.0, 0.5], dtype=y.dtype, device="cpu")) == (value == 1.0)
    close([world])


@pytest.mark.parametrize("protocol", ["put", "get"])
def test_a_channel_of_cpu_ranks_ignores_the_default_device(protocol: str) -> None:
    def receive(world: World) -> list[int]:
        with torch.device("meta"):  # each thread has its own default device
            channel = Channel(world, 1 - world.rank, 4, protocol)
            channel.send(torch.full((4,), world.rank, dtype=torch.uint8, device="cpu"))
            return channel.receive().tolist()

    worlds = wired(2)
    assert each(worlds, receive) == [[1] * 4, [0] * 4]
    close(worlds)
