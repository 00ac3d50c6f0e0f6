"""What happens in an exploration, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.explorer.threads import ALL_DONE, SCALE, Act

if TYPE_CHECKING:
    from tests.explorer.machine import Machine
    from tests.explorer.state import State

_PLAIN = {Act.ENTER: "enters", Act.DRAIN: "its stores have landed", Act.JOIN: "joins the others", Act.DARE: "goes on"}


def who(machine: Machine, number: int) -> str:
    thread = machine.threads[number]
    return f"rank {thread.rank}, {machine.launches[thread.place]}, {thread.role}"


def landing(machine: Machine, number: int, at: int, value: int) -> str:
    return f"{who(machine, number)}: LANDS {_content(machine, at, value)}"


def step(machine: Machine, state: State, number: int) -> str:
    """The step that the thread is about to do, or cannot do."""
    return f"{who(machine, number)}: {_told(machine, state, number)}"


def _told(machine: Machine, state: State, number: int) -> str:
    now = machine.step(state, number)
    value = now.value + now.scale * state.epoch[number]
    if now.act in (Act.STORE, Act.WORD):
        return f"stores {_content(machine, machine.place(state, number, now), value)}"
    if now.act in (Act.READ, Act.USE):
        at = machine.place(state, number, now)
        return f"READS {_content(machine, at, state.memory[at])}" if at >= 0 else "finds counts of 0"
    if now.act is Act.WAIT:
        return f"waits for {_content(machine, now.at, value)}, sees {_value(machine, now.at, state.memory[now.at])}"
    if now.act is Act.EPOCH:
        return f"stores its epoch {state.epoch[number]}"
    return _PLAIN[now.act]


def _content(machine: Machine, at: int, value: int) -> str:
    return f"{machine.memory.names[at]} = {_value(machine, at, value)}"


def _value(machine: Machine, at: int, value: int) -> str:
    if at < machine.memory.words_from:
        return f"that of {value}" if value else "never written"
    if "lane" in machine.memory.names[at]:
        done = value % SCALE
        return f"{{{value // SCALE}, {'all done' if done == ALL_DONE else f'{done} done'}}}"
    return str(value)
