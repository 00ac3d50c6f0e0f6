"""What happens in an exploration, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.explorer.steps import EPOCHS, OF, REFUSED, Act

if TYPE_CHECKING:
    from tests.explorer.effects import Effects
    from tests.explorer.state import State

_PLAIN = {
    Act.ENTER: "enters",
    Act.DRAIN: "its stores have landed",
    Act.JOIN: "joins the others",
    Act.DARE: "goes on",
    Act.ABSTAIN: "sends its rows, unless this rank refuses",
    Act.TAKE: "takes a row, unless another lane has it",
    Act.HOLD: "says that the row is there, if it has taken it",
}


def who(effects: Effects, number: int) -> str:
    thread = effects.threads[number]
    return f"rank {thread.rank}, {effects.launches[thread.place]}, {thread.role}"


def landing(effects: Effects, number: int, at: int, value: int) -> str:
    return f"{who(effects, number)}: LANDS {_content(effects, at, value)}"


def step(effects: Effects, state: State, number: int) -> str:
    """The step that the thread is about to do, or cannot do."""
    return f"{who(effects, number)}: {_told(effects, state, number)}"


def _told(effects: Effects, state: State, number: int) -> str:
    now = effects.step(state, number)
    if now.act in (Act.STORE, Act.WORD, Act.LINE, Act.COPY):
        return f"stores {_content(effects, effects.place(state, number, now), effects.stored(state, number, now))}"
    if now.act in (Act.READ, Act.LOOK):
        behind = now.stride * (state.epoch[number] % 2)
        seen = ", ".join(_content(effects, at + behind, state.memory[at + behind]) for at in now.of)
        if now.act is Act.LOOK and not effects.can(state, number, now):
            return f"looks for epoch {state.epoch[number]}, sees {seen}"
        return f"READS {seen}"
    if now.act is Act.USE:
        at = effects.place(state, number, now)
        return f"READS {_content(effects, at, state.memory[at])}" if at >= 0 else "finds counts of 0"
    if now.act is Act.WAIT:
        wanted = now.value + now.scale * state.epoch[number]
        return f"waits for {_content(effects, now.at, wanted)}, sees {_value(effects, now.at, state.memory[now.at])}"
    if now.act is Act.EPOCH:
        return f"stores its epoch {state.epoch[number]}"
    return _PLAIN[now.act]


def _content(effects: Effects, at: int, value: int) -> str:
    return f"{effects.memory.names[at]} = {_value(effects, at, value)}"


def _value(effects: Effects, at: int, value: int) -> str:
    if at < effects.memory.words_from:
        if not value:
            return "never written"
        refused = ", refused" if value & REFUSED else ""
        epoch = f", epoch {value % REFUSED // EPOCHS}" if at >= effects.memory.lines_from else ""
        return f"that of {value & OF}{refused}{epoch}"
    return str(value)
