"""The text of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.explorer.steps import EPOCH_FACTOR, OPERATION_MASK, REFUSED_BIT, Act

if TYPE_CHECKING:
    from tests.explorer.effects import Effects
    from tests.explorer.state import State

_TEXTS = {
    Act.ENTER: "enters",
    Act.COUNT: "counts a crossing",
    Act.DRAIN: "its stores have landed",
    Act.JOIN: "joins the other threads",
    Act.MAY_FAIL: "goes on",
    Act.SKIP_IF_REFUSED: "sends its rows, unless this rank refuses",
    Act.TAKE_ROW: "takes a row, unless another warp has taken it",
    Act.SKIP_UNLESS_TAKEN: "announces the row, if it has taken it",
    Act.SKIP_IF_ABORTED: "announces the chunk, unless the rail is aborted",
}


def thread_name(effects: Effects, number: int) -> str:
    thread = effects.threads[number]
    return f"rank {thread.rank}, {effects.launches[thread.launch]}, {thread.role}"


def landing(effects: Effects, number: int, at: int, value: int) -> str:
    return f"{thread_name(effects, number)}: LANDS {_content(effects, at, value)}"


def step(effects: Effects, state: State, number: int) -> str:
    """The step that the thread runs next, or that it waits in."""
    return f"{thread_name(effects, number)}: {_step_text(effects, state, number)}"


def _step_text(effects: Effects, state: State, number: int) -> str:
    now = effects.step(state, number)
    if now.act in (Act.STORE, Act.STORE_WORD, Act.STORE_LINE, Act.COPY):
        return f"stores {_content(effects, effects.address(state, number, now), effects.stored(state, number, now))}"
    if now.act in (Act.READ, Act.POLL_LINES):
        offset = now.stride * (state.epoch[number] % 2)
        seen = ", ".join(_content(effects, at + offset, state.memory[at + offset]) for at in now.operands)
        if now.act is Act.POLL_LINES and not effects.can_run(state, number, now):
            return f"polls for epoch {state.epoch[number]}, sees {seen}"
        return f"READS {seen}"
    if now.act is Act.USE:
        at = effects.address(state, number, now)
        return f"READS {_content(effects, at, state.memory[at])}" if at >= 0 else "finds counts of 0"
    if now.act is Act.WAIT:
        wanted = effects.wanted(state, number, now)
        return f"waits for {_content(effects, now.at, wanted)}, sees {_value(effects, now.at, state.memory[now.at])}"
    if now.act is Act.STORE_EPOCH:
        return f"stores its epoch {state.epoch[number]}"
    return _TEXTS[now.act]


def _content(effects: Effects, at: int, value: int) -> str:
    return f"{effects.memory.names[at]} = {_value(effects, at, value)}"


def _value(effects: Effects, at: int, value: int) -> str:
    if at < effects.memory.words_from:
        if not value:
            return "never written"
        refused = ", refused" if value & REFUSED_BIT else ""
        epoch = f", epoch {value % REFUSED_BIT // EPOCH_FACTOR}" if at >= effects.memory.lines_from else ""
        return f"operation {value & OPERATION_MASK}{refused}{epoch}"
    return str(value)
