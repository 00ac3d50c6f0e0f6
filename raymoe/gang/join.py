"""`raymoe.join`: make a world out of Ray actors or tasks that are already there.

For whoever has Ray actors of their own (an inference engine, a trainer) and wants the exchange inside them. The ranks
meet in a small named actor, swap descriptors through it once, and never need Ray for an exchange again.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from raymoe.errors import ConfigError, WiringError

if TYPE_CHECKING:
    import torch

    from raymoe.memory.member import Member
    from raymoe.memory.world import World

LOOK_S = 0.02  # Between two looks at who has come.
ANSWER_S = 10.0  # The longest wait for one answer. A meeting that has ended gives none.
GRACE_S = 3.0  # How long a meeting outlives its last rank.
SILENCE_S = 10.0  # A rank that has not looked for so long is taken for dead, and its place is free.
MOST_NAME_BYTES = 200


@dataclass
class Guest:
    """One rank at a meeting: how to reach its memory, or why it has none."""

    token: str
    descriptor: dict[str, Any] | None
    problem: str | None
    seen_at: float = 0.0  # when it last looked, by the meeting's clock
    told: set[int] = field(default_factory=set)  # who has seen the problem

    def is_here(self, now: float) -> bool:
        return self.problem is None and now - self.seen_at < SILENCE_S


@dataclass(frozen=True)
class RefusedEntry:
    """Why a rank cannot enter; `for_good` unless it may as soon as the world that is being wired is."""

    why: str
    for_good: bool


@dataclass(frozen=True)
class Present:
    """Who is at a meeting: those with a descriptor, those with a problem, and all that ever came."""

    descriptors: dict[int, dict[str, Any]]
    problems: dict[int, str]
    came: frozenset[int]


class MeetingPoint:
    """Where the ranks of one world leave their descriptors. It belongs to none of them, and ends by itself."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.guests: dict[int, Guest] = {}
        self.came: set[int] = set()  # also those that have left again: they are not the ones to wait for
        self.told_of_all = False  # to one of those who are here now
        self.ends_at = time.monotonic() + ANSWER_S + GRACE_S

    def enter(self, rank: int, size: int, guest: Guest, patience_s: float) -> RefusedEntry | None:
        """Leave a descriptor or a problem; returns why that is refused, or None."""
        now = time.monotonic()
        if not self.guests:
            self.size, self.came = size, set()  # everybody has left: whoever comes now begins anew
        if size != self.size:
            return RefusedEntry(f"rank {rank} says size {size}, the first to come said {self.size}", for_good=True)
        other = self.guests.get(rank)
        complete = self.is_complete(now)
        if other is not None and other.token != guest.token and (complete or other.is_here(now)):
            pid = "" if other.descriptor is None else f" by pid {other.descriptor['pid']}"
            return RefusedEntry(f"rank {rank} is taken{pid}", for_good=not complete)
        guest.seen_at = now
        self.guests[rank], self.told_of_all = guest, False
        self.came.add(rank)
        self.ends_at = max(self.ends_at, now + patience_s + GRACE_S)
        return None

    def is_complete(self, now: float) -> bool:
        """Whether a world is being wired: then its name is not free yet. All ranks are here, or were when one of them
        was told so. That all have come is not enough: one may have died before the last one came."""
        here = sum(guest.is_here(now) for guest in self.guests.values())
        return self.told_of_all or here == self.size

    def leave(self, rank: int, token: str) -> None:
        """Take a descriptor back."""
        if rank in self.guests and self.guests[rank].token == token:
            del self.guests[rank]
            self.told_of_all = False
        if not self.guests:
            self.ends_at = time.monotonic() + GRACE_S

    def look(self, rank: int, token: str) -> Present:
        """Who is there by now. Looking tells the meeting that this rank is alive."""
        now = time.monotonic()
        if rank in self.guests and self.guests[rank].token == token:
            self.guests[rank].seen_at = now
        here = {peer: guest.descriptor for peer, guest in self.guests.items() if guest.is_here(now)}
        descriptors = {peer: descriptor for peer, descriptor in here.items() if descriptor is not None}
        self.told_of_all = self.told_of_all or len(descriptors) == self.size
        problems = {peer: guest.problem for peer, guest in self.guests.items() if guest.problem is not None}
        for peer in problems:
            self.guests[peer].told.add(rank)
            if len(self.guests[peer].told) == self.size - 1:  # all others know: it must not spoil their next attempt
                del self.guests[peer]
        return Present(descriptors, problems, frozenset(self.came))


class MeetingActor(MeetingPoint):
    """A meeting that ends its own process when all patience is over, whatever has become of the ranks."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._myself = ray.get_runtime_context().current_actor
        threading.Thread(target=self._end_in_time, name="raymoe meeting ends", daemon=True).start()

    def _end_in_time(self) -> None:
        while (left := self.ends_at - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))
        ray.kill(self._myself)


def join(
    name: str,
    rank: int,
    size: int,
    timeout_s: float = 60.0,
    *,
    device: str | torch.device = "auto",
    share_gpu: bool = False,
) -> World:
    """Join the world `name` as `rank` of `size`, from inside a Ray actor or task; every rank calls this once.

    Returns when every peer is mapped and proved; where one rank cannot take part, all raise. Ranks are on one host.
    Worlds that live at the same time have different names; when a world is wired, its name is free.

    `device`: `auto` is the GPU that Ray assigned to this actor or task, else torch's current device if CUDA is
    initialised here, else the CPU. `cuda` is the same and never the CPU. `cuda:1` is any GPU that this process sees.
    `timeout_s` bounds every wait for a peer, here and later. `share_gpu`, on every rank: ranks may be on one GPU, for
    tests of right and wrong.

        world = raymoe.join("experts", rank, size)
        with raymoe.Exchange(world, raymoe.ExchangeSpec(tokens=512, hidden=1024, experts=32, topk=4)) as ex:
            got = ex.dispatch(x, topk_idx, topk_weights)
            y = ex.combine(rows, got)
        world.close()

    `examples/ray_actors.py` is a whole program.
    """
    from raymoe.memory.member import Member

    member = Member(rank, size, name=name, timeout_s=timeout_s, share_gpu=share_gpu)
    nbytes = len(name.encode(errors="replace"))
    if nbytes > MOST_NAME_BYTES:
        raise ConfigError(f"a name of {nbytes} bytes; a world to join is named by {MOST_NAME_BYTES} at most")
    if name.encode(errors="replace").decode() != name:
        raise ConfigError(f"name is {name!r}, which has no bytes in UTF-8; Ray finds a world to join by such bytes")
    if not ray.is_initialized():
        raise ConfigError(
            f"asked to join {name!r} outside Ray; call it inside a Ray actor or task, or ray.init() first"
        )
    return _Visit(member).join(str(device))


class _Visit:
    """One rank's way through a meeting."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.asked = f"asked to join {member.name!r} as rank {member.rank} of {member.size}"
        self.token = uuid.uuid4().hex
        self.deadline = time.monotonic() + member.timeout_s

    def join(self, device: str) -> World:
        """Open, meet, wire."""
        world: World | None = None
        problem: Exception | None = None
        try:
            world = self._open(device)
        except Exception as error:  # noqa: BLE001  raised below, once the other ranks can know of it
            problem = error
        try:
            meeting = self._enter(world, problem)
            if problem is not None:
                raise problem
            assert world is not None
            self._wire(world, meeting)
        except BaseException:
            if world is not None:
                world.close(together=False)
            raise
        # Every rank has what it came for, since `wire` ends with a barrier; the name is free again.
        ray.kill(meeting)
        return world

    def _open(self, device: str) -> World:
        from raymoe.memory.auto_device import VisibleGpus, device_in_ray
        from raymoe.memory.world import World

        me, visible = self.member, os.environ.get("CUDA_VISIBLE_DEVICES")
        where = device_in_ray(device, _assigned_gpus(), visible, VisibleGpus.now())
        return World.open(me.rank, me.size, name=me.name, timeout_s=me.timeout_s, device=where, share_gpu=me.share_gpu)

    def _enter(self, world: World | None, problem: Exception | None) -> Any:
        """The meeting of this name, with our descriptor or problem in it. One that is being ended is waited out."""
        me = self.member
        text = None if problem is None else next(iter(str(problem).splitlines()), "") or type(problem).__name__
        guest = Guest(self.token, None if world is None else dict(world.descriptor()), text)
        # Detached: it must not die with the rank that happened to come first, whose actor would own it.
        options = _meeting_actor.options(
            name=f"raymoe/join/{me.name}",
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
                refusal = self._ask(meeting.enter.remote(me.rank, me.size, guest, self._left()))
            except (RayActorError, GetTimeoutError, ValueError) as error:  # ValueError: it ended while we asked for it
                if self._left() <= 0:
                    if meeting is not None and problem is None:  # our descriptor may reach it yet, and be taken for us
                        meeting.leave.remote(me.rank, self.token)
                    said = f"{self.asked}, and Ray had no place to meet in time: {type(error).__name__}"
                    raise problem or WiringError(said) from error
            else:
                if refusal is None or problem is not None:
                    return meeting
                if refusal.for_good or self._left() <= 0:
                    raise WiringError(f"{self.asked}, refused: {refusal.why}; use another name or rank")
            time.sleep(LOOK_S)

    def _wire(self, world: World, meeting: Any) -> None:
        try:
            world.wire(self._everyone(meeting))
        except BaseException:
            meeting.leave.remote(self.member.rank, self.token)
            raise

    def _everyone(self, meeting: Any) -> list[dict[str, Any]]:
        """The descriptors of all ranks, in their order."""
        me, present = self.member, Present({}, {}, frozenset())
        try:
            while True:
                present = self._ask(meeting.look.remote(me.rank, self.token))
                if len(present.descriptors) == me.size:
                    return [present.descriptors[peer] for peer in range(me.size)]
                for peer, problem in sorted(present.problems.items()):
                    raise WiringError(f"{self.asked}, and rank {peer} could not take part: {problem}")
                if self._left() <= 0:
                    absent = [peer for peer in range(me.size) if peer not in present.descriptors]
                    # Those that came and lost patience are not the ones to blame, where others never came.
                    missing = [peer for peer in absent if peer not in present.came] or absent
                    found = ", ".join(map(str, missing))
                    raise WiringError(f"{self.asked}, and waited in vain for rank {found}")
                time.sleep(LOOK_S)
        except (RayActorError, GetTimeoutError) as error:
            gone = f"the place to meet is gone: {type(error).__name__}"
            raise WiringError(f"{self.asked}, and {gone}; join again") from error

    def _ask(self, ref: Any) -> Any:
        return ray.get(ref, timeout=min(ANSWER_S, max(1.0, self._left())))

    def _left(self) -> float:
        return self.deadline - time.monotonic()


def _assigned_gpus() -> list[str]:
    """What Ray assigned to this actor or task; a driver has nothing assigned."""
    return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


# `Any`: Ray's own annotations know neither the options of an actor nor its methods.
_remote: Any = ray.remote
_meeting_actor: Any = _remote(num_cpus=0)(MeetingActor)
