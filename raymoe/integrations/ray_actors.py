"""`raymoe.join`: make a world of Ray actors or tasks that exist already.

It is for programs with Ray actors of their own (an inference engine, a trainer) that want the exchange inside them. The
ranks meet in a small named actor and swap descriptors through it once. No exchange uses Ray.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from raymoe.errors import ConfigError, WiringError

if TYPE_CHECKING:
    import torch

    from raymoe.memory.member import Member
    from raymoe.memory.world import World

LOOK_S = 0.02  # between two calls of `look`, and of `enter` while it is refused
ANSWER_S = 10.0  # longest wait for one answer of the meeting, which may have ended
GRACE_S = 3.0  # a meeting outlives its last rank by this
SILENCE_S = 10.0  # after its last `look`, until a rank counts as dead and its place is free
MAX_NAME_BYTES = 200


@dataclass
class JoinEntry:
    """The entry of one rank at a meeting: how to reach its memory, or why it has none."""

    token: str  # distinguishes two ranks with the same number
    descriptor: dict[str, Any] | None
    problem: str | None
    seen_at: float = 0.0  # its last `look`, by the meeting's clock
    seen_by: set[int] = field(default_factory=set)  # ranks that have seen the problem
    departures: dict[int, str] = field(default_factory=dict)  # why other ranks left after all had come

    def is_present(self, now: float) -> bool:
        return self.problem is None and now - self.seen_at < SILENCE_S


@dataclass(frozen=True)
class RefusedEntry:
    """The reason that a rank cannot enter. `for_good` is False while a world is being wired: then it may try again."""

    why: str
    for_good: bool


@dataclass(frozen=True)
class Attendance:
    """The ranks at a meeting: those with a descriptor, those with a problem, and all that ever came."""

    descriptors: dict[int, dict[str, Any]]
    problems: dict[int, str]
    came: frozenset[int]


class MeetingPoint:
    """The place where the ranks of one world leave their descriptors. No rank owns it, and it ends by itself."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.entries: dict[int, JoinEntry] = {}
        self.came: set[int] = set()  # also ranks that have left again: others than these are missing
        self.seen_complete = False  # a rank that is present has seen the descriptors of all
        self.ends_at = time.monotonic() + ANSWER_S + GRACE_S

    def enter(self, rank: int, size: int, entry: JoinEntry, timeout_s: float) -> RefusedEntry | None:
        """Leave a descriptor or a problem; return the refusal, or None."""
        now = time.monotonic()
        if not self.entries:
            self.size, self.came = size, set()  # all have left: this rank begins a new meeting
        if size != self.size:
            return RefusedEntry(f"rank {rank} gives size {size}, the first rank gave {self.size}", for_good=True)
        other = self.entries.get(rank)
        complete = self.is_complete(now)
        if other is not None and other.token != entry.token and (complete or other.is_present(now)):
            pid = "" if other.descriptor is None else f" by pid {other.descriptor['pid']}"
            return RefusedEntry(f"rank {rank} is taken{pid}", for_good=not complete)
        entry.seen_at = now
        self.entries[rank], self.seen_complete = entry, False
        self.came.add(rank)
        self.ends_at = max(self.ends_at, now + timeout_s + GRACE_S)
        return None

    def is_complete(self, now: float) -> bool:
        """Return whether a world is being wired, so that its name is not free yet.

        Either all ranks are present now, or they were when one of them looked. That all have come is not enough: one
        may have died before the last one came.
        """
        present = sum(entry.is_present(now) for entry in self.entries.values())
        return self.seen_complete or present == self.size

    def leave(self, rank: int, token: str, why: str) -> None:
        """Remove the entry of a rank. If all had come, ranks that look later learn why it left."""
        if rank in self.entries and self.entries[rank].token == token:
            del self.entries[rank]
            if self.seen_complete:
                for other in self.entries.values():
                    other.departures[rank] = why
            self.seen_complete = False
        if not self.entries:
            self.ends_at = time.monotonic() + GRACE_S

    def look(self, rank: int, token: str) -> Attendance:
        """Return the ranks that are present. The call also shows the meeting that this rank is alive."""
        now = time.monotonic()
        reasons: dict[int, str] = {}
        if rank in self.entries and self.entries[rank].token == token:
            self.entries[rank].seen_at = now
            reasons = self.entries[rank].departures
        present = {peer: entry.descriptor for peer, entry in self.entries.items() if entry.is_present(now)}
        descriptors = {peer: descriptor for peer, descriptor in present.items() if descriptor is not None}
        self.seen_complete = self.seen_complete or len(descriptors) == self.size
        problems = {peer: entry.problem for peer, entry in self.entries.items() if entry.problem is not None}
        for peer in problems:
            self.entries[peer].seen_by.add(rank)
            if len(self.entries[peer].seen_by) == self.size - 1:  # all others know; their next attempt may succeed
                del self.entries[peer]
        return Attendance(descriptors, reasons | problems, frozenset(self.came))


class MeetingActor(MeetingPoint):
    """A meeting that ends its own process when the timeouts of all ranks are over, even if the ranks died."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._myself = ray.get_runtime_context().current_actor
        threading.Thread(target=self._end_in_time, name="raymoe meeting ends", daemon=True).start()

    def _end_in_time(self) -> None:
        while (left := self.ends_at - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))
        ray.kill(self._myself)


class JoinOptions(TypedDict, total=False):
    """Options of `join`."""

    device: str | torch.device
    share_gpu: bool
    domain: int


@dataclass(frozen=True)
class _Options:
    """The options with their defaults."""

    device: str | torch.device = "auto"
    share_gpu: bool = False
    domain: int | None = None


def join(name: str, rank: int, size: int, timeout_s: float = 60.0, **options: Unpack[JoinOptions]) -> World:
    """Join the world `name` as `rank` of `size`, from inside a Ray actor or task; every rank calls this once.

    The call returns when every peer is mapped and proved. If one rank cannot take part, all raise. Worlds that live at
    the same time have different names; when a world is wired, its name is free.

    - `timeout_s` bounds every wait for a peer, also after this call.
    - `device` (default `auto`) is the GPU that Ray assigned to this actor or task, else torch's current device if CUDA
      is initialised here, else the CPU. `cuda` is the same, but never the CPU. `cuda:1` is any GPU that this process
      sees.
    - `share_gpu` (same on all ranks) lets ranks share one GPU, to test correctness.
    - `domain` (same on all ranks) is the number of ranks in a domain. The ranks of a domain must be on one host. By
      default all ranks are in one.

        world = raymoe.join("experts", rank, size)
        with raymoe.Exchange(world, raymoe.ExchangeSpec(tokens=512, hidden=1024, experts=32, topk=4)) as ex:
            got = ex.dispatch(x, topk_idx, topk_weights)
            y = ex.combine(rows, got)
        world.close()

    `examples/ray_actors.py` is a whole program.
    """
    chosen = _Options(**options)
    from raymoe.memory.member import Member

    member = Member(rank, size, name=name, timeout_s=timeout_s, share_gpu=chosen.share_gpu)
    nbytes = len(name.encode(errors="replace"))
    if nbytes > MAX_NAME_BYTES:
        raise ConfigError(f"name has {nbytes} bytes; the name of a world to join has at most {MAX_NAME_BYTES}")
    if name.encode(errors="replace").decode() != name:
        raise ConfigError(f"name is {name!r}, which cannot be encoded in UTF-8, as Ray needs; use another name")
    if not ray.is_initialized():
        raise ConfigError(
            f"asked to join {name!r} outside Ray; call it inside a Ray actor or task, or ray.init() first"
        )
    if chosen.domain is None or chosen.domain == size:
        return _JoiningRank(member).join(str(chosen.device))
    from raymoe.memory.world import SpanningWorld

    meetings = _Meetings(member)
    try:
        world = SpanningWorld.of_ranks(meetings, chosen.domain, str(chosen.device), timeout_s, chosen.share_gpu)
    except BaseException as error:
        meetings.leave(error)
        raise
    meetings.end()
    return world


class _Meetings:
    """Gathers of the ranks of one world, each in a meeting of its own. They end together: some rank may still look."""

    def __init__(self, member: Member) -> None:
        self.rank, self.size, self._member = member.rank, member.size, member
        self.known_address: str | None = ray.util.get_node_ip_address()
        self._held: list[tuple[_JoiningRank, Any]] = []

    def device(self, device: str) -> str:
        return device_here(device)

    def gather(
        self,
        device: torch.device | None,  # noqa: ARG002
        descriptor: dict[str, object] | None,
        problem: Exception | None,
    ) -> tuple[str, list[dict[str, Any]]]:
        """Gather what all ranks give. Where one has a problem, all ranks raise."""
        guest = _JoiningRank(self._member, f"join-{len(self._held)}" if self._held else "join")
        own = None if descriptor is None or problem is not None else descriptor | {"pid": os.getpid()}
        meeting = guest.enter(own, problem)
        self._held.append((guest, meeting))
        if problem is not None:
            raise problem
        return self._member.name, guest.descriptors(meeting)

    def leave(self, why: BaseException) -> None:
        for guest, meeting in self._held:
            meeting.leave.remote(guest.member.rank, guest.token, _first_line(why))

    def end(self) -> None:
        """End the meetings. All ranks are wired and need them no more."""
        for _, meeting in self._held:
            ray.kill(meeting)


class _JoiningRank:
    """A rank on its way through a meeting into a world."""

    def __init__(self, member: Member, folder: str = "join") -> None:
        self.member = member
        self._meeting_name = f"raymoe/{folder}/{member.name}"
        self.request = f"asked to join {member.name!r} as rank {member.rank} of {member.size}"
        self.token = uuid.uuid4().hex
        self.deadline = time.monotonic() + member.timeout_s

    def join(self, device: str) -> World:
        """Open this rank's memory, meet the other ranks, wire."""
        world: World | None = None
        problem: Exception | None = None
        try:
            world = self._open(device)
        except Exception as error:  # noqa: BLE001  raised below, after the other ranks can see it
            problem = error
        try:
            meeting = self.enter(None if world is None else dict(world.descriptor()), problem)
            if problem is not None:
                raise problem
            assert world is not None
            self._wire(world, meeting)
        except BaseException:
            if world is not None:
                world.close(together=False)
            raise
        # `wire` ends with a barrier, so no rank needs the meeting any more. This frees the name.
        ray.kill(meeting)
        return world

    def _open(self, device: str) -> World:
        from raymoe.memory.world import World

        return World.of_member(replace(self.member, device=device_here(device)))

    def enter(self, descriptor: dict[str, Any] | None, problem: Exception | None) -> Any:
        """Enter the meeting of this name with a descriptor or a problem. If it is just ending, wait for a new one."""
        me = self.member
        text = None if problem is None else _first_line(problem)
        entry = JoinEntry(self.token, descriptor, text)
        # Detached: otherwise the rank that came first would own the actor, and the actor would die with it.
        options = _meeting_actor.options(
            name=self._meeting_name,
            namespace="raymoe",
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            scheduling_strategy="DEFAULT",
        )
        meeting: Any = None
        while True:
            try:
                meeting = options.remote(me.size)
                refusal = self._ask(meeting.enter.remote(me.rank, me.size, entry, self._remaining_s()))
            except (RayActorError, GetTimeoutError, ValueError) as error:  # ValueError: it ended just now
                if self._remaining_s() <= 0:
                    if meeting is not None and problem is None:  # the descriptor may still arrive: take it back
                        meeting.leave.remote(me.rank, self.token, _first_line(error))
                    trouble = f"no meeting actor answered within {me.timeout_s:g} s: {type(error).__name__}"
                    raise problem or WiringError(f"{self.request}, and {trouble}") from error
            else:
                if refusal is None or problem is not None:
                    return meeting
                if refusal.for_good or self._remaining_s() <= 0:
                    raise WiringError(f"{self.request}, refused: {refusal.why}; use another name or rank")
            time.sleep(LOOK_S)

    def _wire(self, world: World, meeting: Any) -> None:
        try:
            world.wire(self.descriptors(meeting))
        except BaseException as error:
            meeting.leave.remote(self.member.rank, self.token, _first_line(error))
            raise

    def descriptors(self, meeting: Any) -> list[dict[str, Any]]:
        """Wait for the descriptors of all ranks; return them in rank order."""
        me = self.member
        try:
            while True:
                attendance: Attendance = self._ask(self._look(meeting))
                if len(attendance.descriptors) == me.size:
                    return [attendance.descriptors[peer] for peer in range(me.size)]
                for peer, problem in sorted(attendance.problems.items()):
                    raise WiringError(f"{self.request}, and rank {peer} could not take part: {problem}")
                if self._remaining_s() <= 0:
                    absent = [peer for peer in range(me.size) if peer not in attendance.descriptors]
                    # A rank that came and gave up is not the cause if others never came.
                    missing = ", ".join(str(peer) for peer in absent if peer not in attendance.came)
                    missing = missing or ", ".join(map(str, absent))
                    raise WiringError(f"{self.request}, and rank {missing} did not join within {me.timeout_s:g} s")
                time.sleep(LOOK_S)
        except (RayActorError, GetTimeoutError) as error:
            reason = f"the meeting actor does not answer any more ({type(error).__name__})"
            raise WiringError(f"{self.request}, and {reason}; join again") from error

    def _look(self, meeting: Any) -> Any:
        # Without task events: 50 looks a second of each rank would fill the task table of Ray's dashboard.
        return meeting.look.options(enable_task_events=False).remote(self.member.rank, self.token)

    def _ask(self, ref: Any) -> Any:
        return ray.get(ref, timeout=min(ANSWER_S, max(1.0, self._remaining_s())))

    def _remaining_s(self) -> float:
        return self.deadline - time.monotonic()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def device_here(device: str) -> str:
    """Choose the device of this actor or task."""
    from raymoe.memory.auto_device import VisibleGpus, device_in_ray

    assigned = [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]  # none to a driver
    return device_in_ray(device, assigned, os.environ.get("CUDA_VISIBLE_DEVICES"), VisibleGpus.now())


# `Any`: Ray's annotations cover neither the options of an actor nor its methods.
_remote: Any = ray.remote
_meeting_actor: Any = _remote(num_cpus=0)(MeetingActor)
