"""The meeting of ranks that join a world: which may enter, which count as dead, and how the next attempt starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ray
from ray.exceptions import GetTimeoutError

import raymoe
from raymoe.errors import ConfigError, WiringError
from raymoe.integrations import ray_actors as joining
from raymoe.integrations.ray_actors import GRACE_S, SILENCE_S, JoinEntry, MeetingPoint, RefusedEntry
from raymoe.memory.member import Member
from raymoe.memory.world import World


@dataclass
class Clock:
    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(joining, "time", clock)
    return clock


def guest(token: str, problem: str | None = None) -> JoinEntry:
    return JoinEntry(token, {"pid": token} if problem is None else None, problem)


def test_a_duplicate_rank_is_refused_and_the_first_ranks_meet(clock: Clock) -> None:
    meeting = MeetingPoint(2)
    assert meeting.enter(1, 2, guest("b"), 60) is None
    assert meeting.enter(1, 2, guest("c"), 60) == RefusedEntry("rank 1 is taken by pid b", for_good=True)
    assert meeting.enter(0, 2, guest("a"), 60) is None
    meeting.leave(1, "c", "")  # it never entered
    assert meeting.look(0, "a").descriptors == meeting.look(1, "b").descriptors == {0: {"pid": "a"}, 1: {"pid": "b"}}
    late = meeting.enter(1, 2, guest("d"), 60)
    assert late is not None and not late.for_good, "a rank that joins the next world of this name may ask again"


def test_an_entry_that_is_made_twice_counts_once(clock: Clock) -> None:
    """Ray may report a timeout of a call that was executed."""
    meeting = MeetingPoint(2)
    assert meeting.enter(1, 2, guest("b"), 60) is None
    assert meeting.enter(1, 2, guest("b"), 60) is None
    assert meeting.came == {1}


def test_a_rank_that_stops_looking_loses_its_place(clock: Clock) -> None:
    meeting = MeetingPoint(2)
    meeting.enter(0, 2, guest("a"), 60)
    clock.now += SILENCE_S - 1
    meeting.look(0, "a")
    clock.now += SILENCE_S - 1
    assert meeting.enter(0, 2, guest("new"), 60) is not None
    clock.now += 2
    assert meeting.look(1, "b").descriptors == {}
    assert meeting.enter(0, 2, guest("new"), 60) is None
    assert meeting.look(0, "new").descriptors == {0: {"pid": "new"}}


def test_a_rank_that_died_before_the_last_one_came_loses_its_place(clock: Clock) -> None:
    meeting = MeetingPoint(3)
    meeting.enter(0, 3, guest("dead"), 60)
    clock.now += SILENCE_S + 1
    meeting.enter(1, 3, guest("b"), 60)
    meeting.enter(2, 3, guest("c"), 60)
    assert meeting.look(1, "b").descriptors == {1: {"pid": "b"}, 2: {"pid": "c"}}
    assert meeting.enter(0, 3, guest("a"), 60) is None
    assert len(meeting.look(1, "b").descriptors) == 3


def test_a_rank_keeps_its_place_while_a_world_is_wired(clock: Clock) -> None:
    """Ranks that have seen all descriptors stop looking."""
    meeting = MeetingPoint(2)
    meeting.enter(0, 2, guest("a"), 60)
    meeting.enter(1, 2, guest("b"), 60)
    next_world = meeting.enter(0, 2, guest("c"), 60)
    assert next_world is not None and not next_world.for_good, "all ranks have entered, though none has looked"
    meeting.look(0, "a")
    clock.now += SILENCE_S + 1
    later = meeting.enter(0, 2, guest("c"), 60)
    assert later is not None and not later.for_good
    meeting.leave(1, "b", "")  # the wiring has failed
    assert meeting.enter(0, 2, guest("c"), 60) is None


def test_a_problem_is_shown_to_all_ranks_and_then_forgotten(clock: Clock) -> None:
    meeting = MeetingPoint(3)
    meeting.enter(1, 3, guest("b", "no GPU"), 60)
    meeting.enter(0, 3, guest("a"), 60)
    assert meeting.look(0, "a").problems == {1: "no GPU"}
    meeting.leave(0, "a", "")
    meeting.enter(2, 3, guest("c"), 60)
    assert meeting.look(2, "c").problems == {1: "no GPU"}
    assert meeting.look(2, "c").problems == {}
    assert meeting.enter(1, 3, guest("again"), 60) is None


def test_a_rank_that_looks_late_learns_why_another_left(clock: Clock) -> None:
    """Rank 0 sees all, fails and leaves before rank 1 looks."""
    meeting = MeetingPoint(2)
    meeting.enter(0, 2, guest("a"), 60)
    meeting.enter(1, 2, guest("b"), 60)
    assert len(meeting.look(0, "a").descriptors) == 2
    meeting.leave(0, "a", "not enough memory")
    assert meeting.look(1, "b").problems == {0: "not enough memory"}
    meeting.leave(1, "b", "rank 0 could not take part")
    for rank, token in enumerate("cd"):
        assert meeting.enter(rank, 2, guest(token), 60) is None
        assert meeting.look(rank, token).problems == {}, "the next attempt knows nothing of it"


def test_a_rank_that_gave_up_waiting_is_not_a_cause(clock: Clock) -> None:
    meeting = MeetingPoint(3)
    meeting.enter(0, 3, guest("a"), 1)
    meeting.enter(1, 3, guest("b"), 60)
    meeting.look(0, "a")
    meeting.leave(0, "a", "rank 2 did not join within 1 s")
    assert meeting.look(1, "b").problems == {}


def test_a_rank_that_enters_after_all_have_left_starts_a_new_meeting(clock: Clock) -> None:
    meeting = MeetingPoint(3)
    meeting.enter(1, 3, guest("b"), 60)
    assert meeting.enter(0, 2, guest("x"), 60) == RefusedEntry(
        "rank 0 gives size 2, the first rank gave 3", for_good=True
    )
    meeting.leave(1, "b", "")
    assert meeting.look(0, "x").came == {1}, "a rank that left has come"
    assert meeting.enter(0, 2, guest("x"), 60) is None
    assert meeting.look(0, "x").came == {0}


def test_a_meeting_ends_after_the_longest_timeout(clock: Clock) -> None:
    meeting = MeetingPoint(2)
    meeting.enter(0, 2, guest("a"), 60)
    meeting.enter(1, 2, guest("b"), 5)
    assert meeting.ends_at == clock.now + 60 + GRACE_S


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rank": 2}, "rank 2 in a world of 2"),
        ({"rank": "0"}, "rank '0' in a world of 2; rank and size are whole numbers"),
        ({"size": 2.0}, "rank 0 in a world of 2.0"),
        ({"timeout_s": math.nan}, "timeout_s is nan; waits need"),
        ({"timeout_s": -1}, "timeout_s is -1; waits need"),
        ({"name": "n" * 300}, "name has 300 bytes; the name of a world to join has at most 200"),
        ({"name": "a\0b"}, "holds no NUL"),
        ({"name": None}, "name is None"),
        ({"name": "a\ud800"}, "which cannot be encoded in UTF-8, as Ray needs"),
        ({}, "asked to join 'x' outside Ray; call it"),
    ],
)
def test_wrong_arguments_of_join_are_refused_before_ray_is_used(wrong: dict[str, Any], says: str) -> None:
    assert not ray.is_initialized()
    with pytest.raises(ConfigError, match=says):
        raymoe.join(**({"name": "x", "rank": 0, "size": 2} | wrong))


class SlowMeeting:
    """A meeting that starts after the rank has given up. It queues its calls, as Ray does."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def options(self, **_: object) -> SlowMeeting:
        return self

    def remote(self, _size: int) -> SlowMeeting:
        return self

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self.calls.append((name, *arguments)))


def test_a_rank_that_gives_up_leaves_no_descriptor_in_a_late_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, meeting = SlowMeeting(), MeetingPoint(2)
    monkeypatch.setattr(joining, "_meeting_actor", slow)
    monkeypatch.setattr(joining._JoiningRank, "_ask", mock.Mock(side_effect=GetTimeoutError))
    visit = joining._JoiningRank(Member(0, 2, timeout_s=0.05))
    with World.open(0, 2) as world, pytest.raises(WiringError, match=r"no meeting actor answered within 0\.05 s"):
        visit.enter(world.descriptor(), None)
    for name, *arguments in slow.calls:
        getattr(meeting, name)(*arguments)
    assert meeting.entries == {}
