"""The 0/1 words of the copy engine's channels, explored over every interleaving of the two ends.

A program is the list of operations that `raymoe/transport/copy_engine.py` enqueues. A store into a peer's word may take
any time, and may land after later operations of its own stream. The fence before it orders the bytes that it announces:
they are there when it lands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

MESSAGES = 4
Operation = tuple[str, str]

SEND = (("wait", "taken"), ("reset", "taken"), ("write", "low"), ("write", "high"), ("set", "sent"))
RECEIVE = (("wait", "sent"), ("reset", "sent"), ("read", "low"), ("read", "high"), ("set", "taken"))


@dataclass(frozen=True)
class State:
    sender: int = 0
    receiver: int = 0
    sent: int = 0
    taken: int = 1  # set by its owner when the channels are made
    low: int = -1
    high: int = -1
    under_way: tuple[str, ...] = ()


class LostError(AssertionError):
    """A signal that was set twice, or bytes of another message."""


def next_states(state: State, send: tuple[Operation, ...], receive: tuple[Operation, ...]) -> Iterator[State]:
    for place, word in enumerate(state.under_way):
        if getattr(state, word) == 1:
            raise LostError(f"{word} set while it is set: {state}")
        rest = state.under_way[:place] + state.under_way[place + 1 :]
        yield replace(state, under_way=rest, **{word: 1})
    for end, program in (("sender", send), ("receiver", receive)):
        at = getattr(state, end)
        message, step = divmod(at, len(program))
        if message == MESSAGES:
            continue
        act, what = program[step]
        after = replace(state, **{end: at + 1})
        if act == "wait" and getattr(state, what) != 1:
            continue
        if act == "reset":
            after = replace(after, **{what: 0})
        if act == "write":
            after = replace(after, **{what: message})
        if act == "read" and getattr(state, what) != message:
            raise LostError(f"message {message} reads {what} of {getattr(state, what)}: {state}")
        if act == "set":
            after = replace(after, under_way=(*state.under_way, what))
        yield after


def explore(send: tuple[Operation, ...], receive: tuple[Operation, ...]) -> int:
    """Return the number of reachable states. Raise if a message is lost or doubled, or if the ends block."""
    waiting, seen = [State()], {State()}
    while waiting:
        state = waiting.pop()
        nexts = list(next_states(state, send, receive))
        done = state.sender == MESSAGES * len(send) and state.receiver == MESSAGES * len(receive)
        if not nexts and not done:
            raise LostError(f"blocked: {state}")
        for following in nexts:
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return len(seen)


def test_no_interleaving_loses_or_doubles_a_signal():
    assert explore(SEND, RECEIVE) > 40


def moved(program: tuple[Operation, ...], operation: Operation, place: int) -> tuple[Operation, ...]:
    rest = [step for step in program if step != operation]
    return (*rest[:place], operation, *rest[place:])


@pytest.mark.parametrize(
    ("send", "receive"),
    [
        (moved(SEND, ("reset", "taken"), 4), RECEIVE),  # reset only after `sent`
        (SEND, moved(RECEIVE, ("reset", "sent"), 4)),  # reset only after `taken`
        (SEND, moved(RECEIVE, ("set", "taken"), 2)),  # taken before it was read
        (moved(SEND, ("set", "sent"), 3), RECEIVE),  # sent before the last bytes
        (tuple(each for each in SEND if each[1] != "taken"), RECEIVE),  # no credit
    ],
)
def test_every_wrong_order_is_detected(send, receive):
    with pytest.raises(LostError):
        explore(send, receive)


def blocked(program: tuple[str, ...], steps: int = 3, ranks: int = 3) -> bool:
    """Return whether ranks in a ring, each with one stream, block; each enqueues `program` in every step."""
    at = [0] * ranks
    sent, received, released = ([0] * ranks for _ in range(3))  # counted at the acting rank
    while True:
        moving = False
        for rank in range(ranks):
            left, right = (rank - 1) % ranks, (rank + 1) % ranks
            while at[rank] < steps * len(program):
                act = program[at[rank] % len(program)]
                if act == "send" and sent[rank] > released[right]:
                    break
                if act == "receive" and received[rank] == sent[left]:
                    break
                counts = {"send": sent, "receive": received, "release": released}[act]
                counts[rank] += 1
                at[rank] += 1
                moving = True
        if not moving:
            return any(place < steps * len(program) for place in at)


def test_a_ring_blocks_only_if_the_receive_precedes_the_send():
    assert not blocked(("send", "receive", "release"))
    assert not blocked(("send", "receive", "release"), ranks=1)
    assert blocked(("receive", "send", "release"))
