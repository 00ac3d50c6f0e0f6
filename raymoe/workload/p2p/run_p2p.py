"""Time copies between ranks, one pair after the other or all at once, to measure the links of a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from time import perf_counter_ns

from raymoe.config import Case
from raymoe.errors import ConfigError
from raymoe.memory.world import World
from raymoe.transport.channels import Channels, ChannelSpec
from raymoe.workload.measure import Line, Step, Steps, WorkloadStep, measure, result_line
from raymoe.workload.p2p.copies import POISON, Copy, copies_of, drawn, share_wrong
from raymoe.workload.progress import OpWork, Progress, StepWork, step_listener

EXACT = 0.0
"""A copy has no rounding: not one byte may differ."""


def run_p2p(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """Return a line for each transport and size; with pattern `pairs`, one for each pair too."""
    steps = Steps(case.job.steps.warmup, case.job.steps.count, case.job.steps.verify, EXACT)
    copies = list(copies_of(case))
    lines = []
    with opening(case, world) as open_step:
        for index, copy in enumerate(copies):
            label = f"{case.name}: {copy.nbytes} bytes by {copy.transport}"
            received = copy.nbytes * sum(destination == world.rank for _, destination in copy.pairs)
            with closing(open_step(copy)) as step:
                # The clock of a copy ends at its receiver.
                how = {"transport": str(step.keys["transport"])}
                work = StepWork((OpWork("copy", received, how),) if received else ())
                report = step_listener(progress, len(copies) * steps.total, index * steps.total, work)
                samples = measure(world, steps, step, report, label)
                keys = step.keys
            source, destination = copy.pairs[0] if case.job.p2p.pattern == "pairs" else (None, None)
            line = result_line(case, "copy", copy.traffic, samples, 0) | keys
            lines.append(
                line | {"src": source, "dst": destination, "bytes": copy.nbytes, "pattern": case.job.p2p.pattern}
            )
    return lines


@contextmanager
def opening(case: Case, world: World) -> Iterator[Callable[[Copy], WorkloadStep]]:
    """Open all that the copies of a case share; yields a function that makes the step of a copy."""
    if world.device.type == "cpu":
        if case.job.p2p.sms != "auto":
            raise ConfigError(f"p2p.sms is {case.job.p2p.sms} and these are CPU ranks, which have no SMs; leave it out")
        yield lambda copy: CopyStep(world, copy)
        return
    from raymoe.workload.p2p.gpu_copies import Bench, GpuCopyStep

    bench = Bench(world)
    yield lambda copy: GpuCopyStep(bench, copy, case.job.steps.graph)
    bench.close()  # only without an error: after one, the process is about to end and peers may be gone


class CopyStep:
    """Times one message through each channel of a copy.

    With `put`, the sender writes into the receiver's memory, and the time ends when the receiver notices. With `get`,
    the data are ready at the sender before the clock starts, and the receiver fetches them.
    """

    ops = (("copy", None),)

    def __init__(self, world: World, copy: Copy) -> None:
        self.world, self.put, self.nbytes = world, copy.protocol == "put", copy.nbytes
        spec = ChannelSpec(copy.pairs, (copy.nbytes,), protocol=copy.protocol, transport=copy.transport)
        self.channels = Channels(world, spec)
        # Each rank begins with the next one, so that not all begin with the same peer.
        peers = [(world.rank + step) % world.size for step in range(1, world.size)]
        sources = [peer for peer in peers if (peer, world.rank) in copy.pairs]
        self.data = {peer: drawn(copy.nbytes, world.rank, peer) for peer in peers if (world.rank, peer) in copy.pairs}
        # A first message shows where messages land, and touches every page once.
        self._send()
        self.landed = {peer: self.channels.receive(peer) for peer in sources}
        self._release()

    @property
    def keys(self) -> Line:
        return {"transport": self.channels.transport}

    def __call__(self, index: int, *, verify: bool) -> Step:
        if verify:
            for peer in self.data:
                self.data[peer] = drawn(self.nbytes, self.world.rank, peer, index)
            for landed in self.landed.values():
                landed.fill_(POISON)
        if not self.put:
            self._send()
        self.world.barrier("copy: start")
        started = perf_counter_ns()
        if self.put:
            self._send()
        for peer in self.landed:
            self.landed[peer] = self.channels.receive(peer)
        us = (perf_counter_ns() - started) / 1e3 if self.data or self.landed else 0.0
        wrong = [share_wrong(landed, peer, self.world.rank, index) for peer, landed in self.landed.items() if verify]
        self._release()
        return Step((us,), max(wrong, default=0.0) if verify else None)

    def close(self) -> None:
        """Free the memory of the channels."""
        self.channels.close()

    def _send(self) -> None:
        for peer, message in self.data.items():
            self.channels.send(peer, message)

    def _release(self) -> None:
        """Release the slot for the next message; otherwise its sender would wait for that on the clock."""
        for peer in self.landed:
            self.channels.release(peer)
