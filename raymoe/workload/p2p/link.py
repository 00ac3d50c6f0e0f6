"""Measure what the links between the ranks give for the bytes of an exchange: the limit beside its numbers.

The limit is a plain copy of as many bytes, by the same clock, in the same run: every rank puts one message to every
other rank, all at once. Each message has its share of the bytes that cross the exchange's busiest port. So all ports
carry what that port carries, and nothing is routed, counted, placed or summed.
"""

from __future__ import annotations

from contextlib import closing
from statistics import median

from raymoe.config import Case
from raymoe.errors import Aborted
from raymoe.memory.world import World
from raymoe.workload.measure import Samples, Steps, measure
from raymoe.workload.memory_needed import MOST_MESSAGE
from raymoe.workload.p2p.copies import Copy
from raymoe.workload.p2p.run_p2p import opening
from raymoe.workload.progress import Block
from raymoe.workload.traffic import ExchangeTraffic

STEPS = Steps(warmup=2, count=15, verify=False, bound=0.0)
_PIECE = 128
"""A message has a multiple of so many bytes, as the kernels of transports copy them."""


def link_gbps(case: Case, world: World, traffic: ExchangeTraffic) -> dict[str, float]:
    """Return the GB/s of the busiest port, by operation of an exchange. All ranks call this together.

    Empty where nothing crosses a link, and after a rank was told to stop. Ranks that share a GPU have no link between
    them. Those of several domains have two kinds of links.
    """
    unlinked = world.size == 1 or world.domains > 1 or case.job.world.share_gpu
    if unlinked or world.waiter.interrupted is not None:
        return {}
    ways = (traffic.dispatch, traffic.combine)
    sizes = {way.busiest: message_bytes(way.busiest, world.size) for way in ways if way.busiest}
    try:
        times = {size: _median_us(case, world, size) for size in sorted(set(sizes.values()))}
    except Aborted as error:  # the lines of the case are whole without it
        world.waiter.interrupted = error
        return {}
    rates = {nbytes: size * (world.size - 1) / times[size] / 1e3 for nbytes, size in sizes.items() if times[size]}
    limits = {op: rates[way.busiest] for op, way in traffic.by_op.items() if way.busiest in rates}
    both = traffic.both.busiest, sum(way.busiest / rates[way.busiest] for way in ways if way.busiest in rates)
    return limits | ({"exchange": both[0] / both[1]} if both[1] else {})


def message_bytes(busiest: float, ranks: int) -> int:
    """Return the bytes of each message, if `busiest` bytes cross the busiest port: at most MOST_MESSAGE.

    >>> message_bytes(3e6, ranks=4), message_bytes(1.0, ranks=4), message_bytes(1e12, ranks=4) >> 20
    (1000064, 128, 64)
    """
    share = -(-int(busiest) // (ranks - 1))
    return min(MOST_MESSAGE, -(-share // _PIECE) * _PIECE)


def _unreported(block: Block) -> None:
    """Hear of a block of steps that is no progress of the case."""


def _median_us(case: Case, world: World, nbytes: int) -> float:
    pairs = tuple((source, to) for source in range(world.size) for to in range(world.size) if source != to)
    with opening(case, world) as open_step, closing(open_step(Copy("auto", nbytes, pairs))) as step:
        samples: Samples = measure(world, STEPS, step, _unreported, f"{case.name}: limit of the links")
    return median(samples.us[0])
