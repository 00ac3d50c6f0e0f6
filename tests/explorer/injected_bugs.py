"""For each bug that can be injected: a small case that it breaks, and a pattern of the failure's text."""

from __future__ import annotations

from collections.abc import Callable

from tests.explorer.case import Case, Routing, empty, full
from tests.explorer.fault import Fault

InjectedBug = tuple[Case, str]
_NEVER = "never written; it needs operation"
_STALE = "operation 2; it needs operation 1"
_FULL = "operation 3; it needs operation 1"
_STUCK = "no thread can go on; "


def _cases(fault: Fault, ranks: int) -> Callable[..., Case]:
    def case(program: str, **fields: object) -> Case:
        counting_blocks = 1 if ranks == 2 else 0
        usual = {
            "ranks": ranks,
            "program": program,
            "routings": (full(ranks),),
            "counting_blocks": counting_blocks,
            "fault": fault,
        }
        return Case(**usual | fields)

    return case


def _filled(ranks: int) -> tuple[Routing, ...]:
    """In epoch 2 the ranks exchange words only; what epoch 3 overwrites is from epoch 1."""
    return full(ranks), empty(ranks), full(ranks)


def injected_bug(fault: Fault, ranks: int) -> InjectedBug:
    case, filled = _cases(fault, ranks), _filled(ranks)
    one_row: Routing = (((1,),), *empty(ranks)[1:])
    two_rows: Routing = (((1,), (1,)), *empty(ranks)[1:])
    silent: Routing = ((), *full(ranks)[1:])  # rank 0 gets no row of a combine
    own = (full(ranks, own=True),)
    refused = {"refused": ((1, 1),)}
    return {
        Fault.ROWS_AFTER_WORD: (case("D C"), f"row .*{_NEVER}"),
        Fault.HEAD_BEFORE_COUNTS: (case("D", counting_blocks=1, routings=(empty(ranks),)), f"published .*{_NEVER}"),
        Fault.RELAXED_TICKET: (case("D", counting_blocks=2, routings=(empty(ranks),)), f"published 1 .*{_NEVER}"),
        Fault.SINGLE_BUFFER: (case("D D D"), r"parity 0 = operation (\d); it needs operation (?!\1)"),
        Fault.BAKED_EPOCH: (case("D D D", calls=("err",) * ranks), r"operation (\d); it needs operation (?!\1)"),
        Fault.SHARED_EPOCH: (case("D C U1 D C U2", layout="rank"), f"use 1, use: READS .*{_STALE}"),
        Fault.EPOCH_BY_FIRST_OUT: (case("D D"), "it needs operation"),
        Fault.EPOCH_BY_SEND: (case("DS DR"), f"{_STUCK}.*dispatch receive 1"),
        Fault.EQUAL: (case("D D"), _STUCK),
        Fault.SILENT: (case("D D D", routings=filled), f"{_STUCK}.*dispatch 2"),
        Fault.SILENT_UNAWAITED: (case("D D D", routings=filled), _FULL),
        Fault.EARLY_END: (case("D D D", routings=filled), _FULL),
        Fault.NO_LAST_WORDS: (case("D U1", layout="rank"), f"use 1, use: READS .*{_NEVER}"),
        Fault.WARPS_APART: (
            case("D U1", warps=2, routings=(two_rows,), layout="rank"),
            f"use 1, use: READS dispatch row 1 .*{_NEVER}",
        ),
        Fault.SENDERS_UNHEARD: (
            case("D U1", senders=2, routings=(two_rows,), layout="rank"),
            f"use 1, use: READS dispatch row . .*{_NEVER}",
        ),
        Fault.TAKEN_KEPT: (
            case("D D", warps=2, routings=(two_rows,)),
            f"{_STUCK}.*dispatch 2, placement block of 0: waits",
        ),
        Fault.PACKED_EARLY: (case("BT BP BC BA BR BT BP BC BA BR"), _STALE),
        Fault.COPIED_FROM_X: (case("BT BP BC BA BR BT BP BC BA BR", routings=(one_row,), timeouts=True), _STALE),
        Fault.UNPOISONED: (case("D D D", routings=(one_row,), timeouts=True), _FULL),
        Fault.POISON_UNREAD: (
            case("D D", routings=(one_row,), timeouts=True),
            "stores in an operation that began poisoned",
        ),
        Fault.LATE_READ: (case("D U1 D U2 D", layout="rank"), f"use 1, use: READS .*{_FULL}"),
        Fault.NO_DEPENDENT_WAIT: (case("D D"), "it needs operation"),
        Fault.NEIGHBOUR_WITHOUT_WAIT: (case("D N D"), "it needs operation"),
        Fault.USER_WITHOUT_WAIT: (case("D U1", layout="rank"), "before it has ended"),
        Fault.OWN_UNHEARD: (case("D", routings=own, own="slots"), rf"row 0 of rank (\d) at rank \1.*{_NEVER}"),
        Fault.OWN_UNAWAITED: (
            case("D U1", routings=own, own="copied", layout="rank"),
            rf"use 1, use: READS dispatch row 0 of rank (\d) at rank \1.*{_NEVER}",
        ),
        Fault.STATUS_BEFORE_COUNTS: (case("D C", **refused), "combine 1, .* accepts data that a rank refuses"),
        Fault.STATUS_UNHEARD: (
            case("D C", routings=(silent,), **refused),
            "rank 0, combine 1, .* accepts data that a rank refuses",
        ),
        Fault.STATUS_UNNUMBERED: (
            case("D D C", mixed=((1, 1, 1),)),
            "combine 1, .* accepts data that a rank refuses",
        ),
        Fault.REFUSAL_SILENT: (case("D C", **refused), f"{_STUCK}.*waits for combine head of rank 1"),
        Fault.REFUSAL_UNCOUNTED: (
            case("D C D C", routings=(one_row,), **refused),
            "combine 2, .*operation 1.*; it needs operation 2",
        ),
        Fault.REFUSAL_POISONS: (
            case("D C D C", routings=(one_row,), **refused),
            "dispatch 2, .* does nothing, and no wait has failed",
        ),
        **_injected_in_chunks(fault, ranks),
        Fault.LINE_UNCHECKED: (case("FD"), f"line 0 .*{_NEVER}"),
        Fault.LINE_IN_GRANULES: (case("FD"), f"granule 0 .*{_NEVER}"),
        Fault.ARRIVES_FIRST: (case("FD", one_block=True), f"{_STUCK}.*sees dispatch count 0 .*never written"),
        # Dispatch 1 does not fit on rank 1, so no thread polls its line there.
        Fault.UNORDERED_LINES: (
            case("FD FD FD", routings=(two_rows,), counting_blocks=0, **refused),
            f"{_STUCK}.*rank 1, dispatch in lines 3.*sees dispatch line . .*epoch 1",
        ),
    }[fault]


def _injected_in_chunks(fault: Fault, ranks: int) -> dict[Fault, InjectedBug]:
    """Bugs of the words of chunks, which a sender finds: its row of x is not the one that it needs."""
    case = _cases(fault, ranks)
    one_row: Routing = (((1,),), *empty(ranks)[1:])
    two_rows: Routing = (((1,), (1,)), *empty(ranks)[1:])
    first_row: Routing = (((1,), ()), *empty(ranks)[1:])
    alone: Routing = tuple(((rank,),) * ranks for rank in range(ranks))
    never = rf"dispatch 1, sender warp 0: READS x row \d of rank \d = {_NEVER}"
    old = r"dispatch 2, sender warp 0: READS x row \d of rank \d = operation 1; it needs operation 2"
    new = rf"dispatch 1, sender warp 0: READS x row \d of rank \d = {_STALE}"
    return {
        Fault.CHUNK_BEFORE_ROWS: (case("X D", routings=(one_row,)), never),
        Fault.CHUNK_UNFENCED: (case("X D", routings=(one_row,)), never),
        Fault.CHUNK_UNHEARD: (case("X D", routings=(one_row,)), never),
        Fault.PIECE_BEFORE_ROWS: (case("D PC"), f"piece .*{_NEVER}"),
        Fault.PIECE_UNHEARD: (case("D PC"), f"piece .*{_NEVER}"),
        Fault.FIRST_PIECE_ONLY: (case("D PC", routings=(two_rows,), counting_blocks=0), f"piece 1 .*{_NEVER}"),
        Fault.PIECE_OF_ANY_STEP: (case("D PC D PC"), r"operation 1; it needs operation 2"),
        Fault.PRODUCT_AWAITS_COMBINE: (case("D PC", without_sms=("sender",)), f"{_STUCK}.*product"),
        Fault.FIRST_CHUNK_ONLY: (case("X D", routings=(two_rows,)), never),
        Fault.COUNTED_BESIDE: (case("X D", routings=(one_row,)), never),
        Fault.BAKED_CROSSING: (
            case("X D X D", routings=(one_row,), calls=("eerr",) * ranks),
            old,
        ),
        # No thread waits for the second chunk of dispatch 1, so its word may come after the reset.
        Fault.CHUNK_RESET: (case("X D X D", routings=(first_row, two_rows)), old),
        Fault.CROSSING_EARLY: (case("X D X D", routings=(one_row,)), new),
        # The second chunk of dispatch 1 is announced with the number of crossing 2.
        Fault.RAIL_UNJOINED: (case("X D X D", routings=(first_row, two_rows)), old),
        Fault.CROSSING_AFTER: (
            case("X D", routings=(one_row,)),
            f"{_STUCK}.*dispatch 1, sender warp 0: waits for word of",
        ),
        # A domain for each rank: a placement block reads its own row, and only the rail keeps the ranks together.
        Fault.RAIL_UNASKED: (
            case("X D X D", routings=(alone,), domains=ranks, chunk=ranks, own="copied"),
            rf"dispatch 1, placement block of own rows: READS x row \d of rank \d = {_STALE}",
        ),
        Fault.ABORT_ANNOUNCED: (case("X D", routings=(one_row,), timeouts=True), never),
        Fault.ABORT_BEFORE_WORD: (case("X D", routings=(one_row,), timeouts=True), never),
    }


def injected_in_placement_blocks() -> dict[Fault, InjectedBug]:
    """Return such bugs for a placement block, which also reads rows of x: those of its own rank. One rank is enough."""
    one_row: Routing = (((0,),),)
    two_rows: Routing = (((0,), (0,)),)
    first_row: Routing = (((0,), ()),)
    made = {
        Fault.CHUNK_BEFORE_ROWS: ("X D", {}, _NEVER),
        Fault.CHUNK_UNFENCED: ("X D", {}, _NEVER),
        Fault.CHUNK_UNHEARD: ("X D", {}, _NEVER),
        Fault.FIRST_CHUNK_ONLY: ("X D", {"routings": (two_rows,)}, _NEVER),
        Fault.COUNTED_BESIDE: ("X D", {}, _NEVER),
        Fault.BAKED_CROSSING: ("X D X D", {"calls": ("eerr",)}, "operation 1; it needs operation 2"),
        Fault.CHUNK_RESET: ("X D X D", {"routings": (first_row, two_rows)}, "operation 1; it needs operation 2"),
        Fault.CROSSING_EARLY: ("X D X D", {}, _STALE),
        Fault.RAIL_UNJOINED: ("X D X D", {"routings": (first_row, two_rows)}, "operation 1; it needs operation 2"),
        Fault.CROSSING_AFTER: ("X D", {}, f"{_STUCK}.*placement block of own rows: waits for word of chunk 0"),
        Fault.ABORT_ANNOUNCED: ("X D", {"timeouts": True}, _NEVER),
        Fault.ABORT_BEFORE_WORD: ("X D", {"timeouts": True}, _NEVER),
    }
    return {
        fault: (Case(1, program, **{"routings": (one_row,), "fault": fault, "own": "copied"} | fields), pattern)
        for fault, (program, fields, pattern) in made.items()
    }


def injected_in_lines(ranks: int) -> dict[Fault, InjectedBug]:
    """The same for bugs that the LL path could have too. A line that is overwritten is missed there, not misread, since
    it holds its epoch."""
    filled = _filled(ranks)
    missed = f"{_STUCK}.*polls for epoch 1, sees .*epoch"
    silent: Routing = ((), *full(ranks)[1:])
    own: Routing = (((0,),), *empty(ranks)[1:])
    refused = {"refused": ((1, 1),)}

    made = {
        Fault.SINGLE_BUFFER: ("FD FD FD", {}, missed),
        Fault.BAKED_EPOCH: ("FD FD FD", {"calls": ("err",) * ranks}, "operation 1, epoch 1; it needs operation 2"),
        Fault.SHARED_EPOCH: ("FD DS FC1 DR", {}, f"{_STUCK}.*dispatch receive 2"),
        Fault.EPOCH_BY_FIRST_OUT: ("FD FD", {}, f"{_STUCK}.*dispatch in lines 2"),
        Fault.SILENT: ("FD FD FD", {"routings": filled}, f"{_STUCK}.*polls for epoch 2"),
        Fault.SILENT_UNAWAITED: ("FD FD FD", {"routings": filled}, missed),
        Fault.EARLY_END: ("FD FD FD", {"routings": filled}, missed),
        Fault.POISON_UNREAD: ("FD FD", {"timeouts": True}, "stores in an operation that began poisoned"),
        Fault.NO_DEPENDENT_WAIT: ("FD FD", {}, "it needs operation"),
        Fault.NEIGHBOUR_WITHOUT_WAIT: ("FD N FD", {}, "it needs operation"),
        Fault.OWN_UNHEARD: ("FD", {"routings": (own,), "own": "slots"}, f"line 0 .*{_NEVER}"),
        Fault.STATUS_BEFORE_COUNTS: ("FD FC", refused, "combine in lines 1, .* accepts data that a rank refuses"),
        Fault.STATUS_UNHEARD: (
            "FD FC",
            {"routings": (silent,), **refused},
            "rank 0, .* accepts data that a rank refuses",
        ),
        Fault.STATUS_UNNUMBERED: (
            "FD FD FC",
            {"mixed": ((1, 1, 1),)},
            "combine in lines 1, .* accepts data that a rank refuses",
        ),
        Fault.REFUSAL_SILENT: ("FD FC", refused, f"{_STUCK}.*sees combine status 0 of rank 1 .*never written"),
        Fault.REFUSAL_POISONS: ("FD FC FD FC", refused, "does nothing, and no wait has failed"),
        Fault.LINE_UNCHECKED: ("FD FC", {}, f"line 0 .*{_NEVER}"),
        Fault.LINE_IN_GRANULES: ("D FC", {}, f"combine granule 0 .*{_NEVER}"),
        Fault.ARRIVES_FIRST: ("D FC", {"one_block": True}, f"{_STUCK}.*sees combine status 0 .*never written"),
        Fault.UNORDERED_LINES: (
            "D D FC1 FC2 FC2",
            {"routings": (((), ((0,),), *empty(ranks)[2:]),), "counting_blocks": 0, "refused": ((1, 1),)},
            f"{_STUCK}.*rank 1, combine in lines 3.*sees combine line . .*epoch 1",
        ),
    }
    return {
        fault: (_cases(fault, ranks)(program, **fields), pattern) for fault, (program, fields, pattern) in made.items()
    }


def injected_in_known(ranks: int) -> dict[Fault, InjectedBug]:
    """The same for bugs that a dispatch of known routing could have too."""
    one_row: Routing = (((1,),), *empty(ranks)[1:])
    overwritten = r"operation (\d); it needs operation (?!\1)"
    made = {
        Fault.ROWS_AFTER_WORD: ("D K", {"routings": (one_row,)}, _NEVER),
        Fault.HEAD_BEFORE_COUNTS: ("D K", {"routings": (empty(ranks),), "counting_blocks": 1}, f"published .*{_NEVER}"),
        Fault.SINGLE_BUFFER: ("D K K", {}, f"parity 0 = {overwritten}"),
        Fault.BAKED_EPOCH: (
            "D K K",
            {"calls": ("err",) * ranks},
            overwritten,
        ),
        Fault.EQUAL: ("D K", {}, _STUCK),
        Fault.EARLY_END: ("D K K K", {"routings": (one_row,)}, overwritten),
        Fault.SILENT: ("D K", {"routings": (one_row,)}, f"{_STUCK}.*dispatch 1"),
        Fault.SILENT_UNAWAITED: ("D K K K", {"routings": (one_row,)}, overwritten),
        Fault.UNPOISONED: (
            "D K K K",
            {"routings": (one_row,), "timeouts": True},
            f"{overwritten}|published .*{_NEVER}",
        ),
        Fault.POISON_UNREAD: (
            "D K",
            {"routings": (one_row,), "timeouts": True},
            "stores in an operation that began poisoned",
        ),
    }
    return {
        fault: (_cases(fault, ranks)(program, **fields), pattern) for fault, (program, fields, pattern) in made.items()
    }
