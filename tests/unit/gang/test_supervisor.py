"""The supervisor's policy, without a cluster: its decision on every kind of event, in every phase and any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raymoe.gang import supervisor as sv
from raymoe.gang.supervisor import Action, Failure, Phase, State, decide

RUNNING = State(ranks=3, restarts_left=1, phase=Phase.RUNNING)


def timeout(rank: int, peer: int) -> sv.Failed:
    return sv.Failed(rank, Failure("PeerTimeout", 5, f"rank {rank} waited 2.0 s for rank {peer}", peer=peer))


def aborted(rank: int, peer: int | None = None) -> sv.Failed:
    return sv.Failed(rank, Failure("Aborted", 1, "told to stop", peer=peer))


def play(state: State, *events: sv.Event, now: float = 0.0) -> tuple[State, list[Action]]:
    actions: list[Action] = []
    for event in events:
        state, more = decide(state, event, now)
        actions += more
    return state, actions


def test_a_run_without_failures_starts_wires_runs_and_closes() -> None:
    state, actions = play(State(ranks=2, restarts_left=1), sv.Placed(), sv.Started(), sv.Wired(), sv.Finished(1))
    assert state.phase is Phase.RUNNING and actions == [Action.START, Action.WIRE, Action.RUN]
    state, actions = play(state, sv.Finished(0), sv.Cleared())
    assert state.phase is Phase.OVER and actions == [Action.CLOSE, Action.KILL]
    assert state.verdict is not None and state.verdict.exit_code == 0


def test_a_lost_rank_restarts_the_gang_as_a_new_generation() -> None:
    state, actions = play(RUNNING, sv.Lost(2, "rank 2 died"), aborted(0, 2), aborted(1, 2))
    assert actions == [Action.ABORT, Action.KILL] and state.verdict is not None and state.verdict.culprit == 2
    state, actions = play(state, sv.Cleared())
    assert (state.phase, state.generation, state.restarts_left, actions) == (Phase.STARTING, 1, 0, [Action.START])
    assert not state.failures and not state.gone and state.verdict is None


def test_a_lost_node_explains_the_waits_of_ranks_on_other_nodes() -> None:
    """These fail first. Their failures alone would name a rank and allow no restart."""
    lost = sv.NodeLost(2, "rank 2 was lost with node n")
    state, actions = play(RUNNING, timeout(0, 1), lost)
    assert state.phase is Phase.CLEARING and actions == [Action.ABORT, Action.KILL]
    assert state.verdict == sv.Verdict(4, lost.message, "NodeLost", 2, restartable=True)
    state, actions = play(state, sv.Cleared())
    assert (state.phase, state.generation, actions) == (Phase.STARTING, 1, [Action.START])


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.WIRING, Phase.RUNNING])
def test_a_lost_rank_ends_the_generation_in_any_phase(phase: Phase) -> None:
    state, actions = play(replace(RUNNING, phase=phase), sv.Lost(0, "rank 0 died"))
    assert state.phase is Phase.ENDING and actions == [Action.ABORT]
    state, actions = play(state, sv.Tick(), now=sv.ABORT_ANSWER_S + 0.1)
    assert state.phase is Phase.CLEARING and actions == [Action.KILL]


def test_a_lost_rank_without_restarts_left_is_named_and_exits_4() -> None:
    spent = replace(RUNNING, restarts_left=0)
    state, _ = play(spent, sv.Lost(1, "rank 1 died"), aborted(0), aborted(2), sv.Cleared())
    assert state.phase is Phase.OVER and state.verdict is not None
    assert (state.verdict.exit_code, state.verdict.culprit) == (4, 1)


@pytest.mark.parametrize(
    ("kind", "code"), [("WrongResult", 6), ("DataRefused", 7), ("RuntimeError", 1), ("PeerTimeout", 5)]
)
def test_an_error_of_a_rank_does_not_restart_the_gang(kind: str, code: int) -> None:
    bad = sv.Failed(0, Failure(kind, code, "bad", peer=1 if code == 5 else None))
    state, _ = play(RUNNING, bad, aborted(1), aborted(2), sv.Cleared())
    assert state.phase is Phase.OVER and state.verdict is not None and state.verdict.exit_code == code


def test_the_culprit_of_a_timeout_is_the_silent_peer() -> None:
    state, actions = play(RUNNING, timeout(0, 1), aborted(1, 2))
    assert actions == [Action.ABORT] and state.phase is Phase.ENDING
    state, actions = play(state, sv.Tick(), now=sv.ABORT_ANSWER_S + 0.1)
    assert actions == [Action.KILL] and state.verdict is not None
    assert (state.verdict.exit_code, state.verdict.culprit) == (5, 2)
    assert state.verdict.message.endswith("the culprit is rank 2")


def test_a_late_cause_replaces_the_timeout_it_led_to() -> None:
    state, _ = play(RUNNING, timeout(0, 2), sv.Failed(2, Failure("ValueError", 1, "rank 2 raised")), aborted(1, 2))
    assert state.verdict is not None and (state.verdict.exit_code, state.verdict.culprit) == (1, 2)
    state, _ = play(RUNNING, timeout(0, 2), sv.Lost(2, "rank 2 died"), aborted(1, 2))
    assert state.verdict is not None and state.verdict.restartable and state.verdict.culprit == 2


def test_a_wiring_error_is_the_cause_unless_a_rank_died() -> None:
    wiring = replace(RUNNING, phase=Phase.WIRING)
    unmapped = [sv.Failed(rank, Failure("WiringError", 1, "process 7 is gone")) for rank in (0, 1)]
    state, _ = play(wiring, *unmapped, sv.Lost(2, "rank 2 died"), sv.Cleared())
    assert state.phase is Phase.STARTING and state.generation == 1
    state, _ = play(wiring, *unmapped, aborted(2), sv.Cleared())
    assert state.phase is Phase.OVER and state.verdict is not None
    assert (state.verdict.exit_code, state.verdict.message) == (1, "process 7 is gone")


def test_a_mute_rank_is_named_and_exits_5() -> None:
    state, _ = play(RUNNING, sv.NotAnswering(1, "rank 1 answers nothing", 5), aborted(0), aborted(2), sv.Cleared())
    assert state.phase is Phase.OVER and state.verdict is not None
    assert (state.verdict.exit_code, state.verdict.culprit) == (5, 1)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.OVER])
def test_a_stop_ends_any_phase_without_a_restart(phase: Phase) -> None:
    state, _ = play(replace(RUNNING, phase=phase, verdict=None), sv.StopAsked(15, "SIGTERM"))
    state, _ = play(state, sv.Tick(), sv.Cleared(), now=1e9)
    assert state.phase is Phase.OVER and state.verdict is not None and state.verdict.exit_code == 143


def test_a_stop_while_a_dead_generation_is_cleared_prevents_a_restart() -> None:
    state, _ = play(RUNNING, sv.Lost(0, "died"), aborted(1), aborted(2), sv.StopAsked(2, "SIGINT"), sv.Cleared())
    assert state.phase is Phase.OVER and state.verdict is not None and state.verdict.exit_code == 130


def test_unplaceable_ranks_end_the_run_at_once() -> None:
    state, actions = play(State(ranks=2, restarts_left=1), sv.Unplaceable("asked for 2, found 1"))
    assert state.phase is Phase.OVER and not actions and state.verdict is not None and state.verdict.exit_code == 3


def test_a_lost_node_clears_at_once_and_the_next_generation_may_start_elsewhere() -> None:
    state, actions = play(RUNNING, sv.NodeLost(1, "rank 1 died with node n1"))
    assert state.phase is Phase.CLEARING and actions == [Action.KILL], "no rank is left to report"
    assert not state.final
    state, actions = play(state, sv.Cleared())
    assert (state.phase, state.generation, actions) == (Phase.STARTING, 1, [Action.START])
    state, _ = play(replace(RUNNING, restarts_left=0), sv.NodeLost(1, "rank 1 died with node n1"), sv.Cleared())
    assert state.phase is Phase.OVER and state.verdict is not None
    assert (state.verdict.exit_code, state.verdict.cause, state.verdict.culprit) == (4, "NodeLost", 1)


@pytest.mark.parametrize(("event", "code"), [(sv.NodeLost(1, "with its node"), 4), (sv.RayLost("the raylet ended"), 3)])
def test_the_loss_of_a_node_or_of_ray_explains_the_loss_of_a_rank_but_no_other_verdict(
    event: sv.Event, code: int
) -> None:
    spent = replace(RUNNING, restarts_left=0)
    state, _ = play(spent, sv.Lost(0, "rank 0 died"), event)
    assert state.verdict is not None and (state.verdict.exit_code, state.verdict.message) == (code, event.message)  # type: ignore[union-attr]
    state, _ = play(spent, sv.Failed(0, Failure("WrongResult", 6, "wrong")), event)
    assert state.verdict is not None and state.verdict.exit_code == 6
    state, _ = play(spent, sv.StopAsked(15, "SIGTERM"), event)
    assert state.verdict is not None and state.verdict.exit_code == 143


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.OVER])
def test_the_loss_of_ray_ends_any_phase_without_an_action(phase: Phase) -> None:
    state, actions = play(replace(RUNNING, phase=phase), sv.RayLost("the raylet ended"))
    assert state.phase is Phase.OVER and not actions
    assert state.verdict is not None and (state.verdict.exit_code, state.verdict.cause) == (3, "RayLost")


def test_a_stop_after_the_last_case_takes_no_success_back() -> None:
    state, _ = play(RUNNING, sv.Finished(0), sv.Finished(1), sv.Finished(2), sv.StopAsked(15, "SIGTERM"))
    assert state.phase is Phase.CLEARING and state.final
    assert state.verdict is not None and state.verdict.exit_code == 0


RANKS = st.integers(0, 2)
EVENTS = st.one_of(
    st.sampled_from([sv.Placed(), sv.Started(), sv.Wired(), sv.Tick(), sv.Cleared(), sv.StopAsked(15, "SIGTERM")]),
    st.builds(sv.Finished, RANKS),
    st.builds(timeout, RANKS, RANKS),
    st.builds(aborted, RANKS, RANKS | st.none()),
    st.builds(sv.Failed, RANKS, st.just(Failure("ValueError", 1, "bug"))),
    st.builds(sv.Lost, RANKS, st.just("died")),
    st.builds(sv.NodeLost, RANKS, st.just("died with its node")),
    st.just(sv.RayLost("the raylet ended")),
    st.builds(sv.NotAnswering, RANKS, st.just("mute"), st.sampled_from([3, 5])),
)


@example([sv.Placed(), sv.Lost(0, "killed"), sv.Tick(), sv.Cleared()], 1)
@given(st.lists(EVENTS, max_size=40), st.integers(0, 2))
def test_any_sequence_of_events_has_bounded_starts_and_ends_with_a_verdict(
    events: list[sv.Event], restarts: int
) -> None:
    """Starts are bounded, each follows a clean-up, and further ticks end with a verdict."""
    state, starts, dirty = State(ranks=3, restarts_left=restarts), 0, False
    endless = [sv.Tick(), sv.Cleared()] * 4
    for now, event in enumerate([*events, sv.StopAsked(15, "SIGTERM"), *endless]):
        before = state
        state, actions = decide(state, event, now=10.0 * now)
        if before.phase is Phase.CLEARING and state.phase is not Phase.CLEARING:
            dirty = False  # every process is gone, so the same decision may start the next generation
        if Action.START in actions:
            assert not dirty, "a generation was started before the last one was cleared"
            starts, dirty = starts + 1, True
        if Action.KILL in actions:
            assert state.phase is Phase.CLEARING and dirty
        if state.phase is Phase.OVER:
            dirty = False
        assert state.generation <= restarts
    assert starts <= restarts + 1
    assert state.phase is Phase.OVER and state.verdict is not None
