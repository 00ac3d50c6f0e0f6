"""Explore one case, such as python -m tests.explorer "D D D" --ranks 3 --fault SINGLE_BUFFER"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.explorer.case import Case, empty, full
from tests.explorer.fault import Fault
from tests.explorer.search import explore


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.explorer", description=Case.__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("program")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1, help="of each rank; each goes to all other ranks")
    parser.add_argument("--empty", type=int, nargs="*", default=[], help="numbers of dispatches that send no row")
    parser.add_argument("--senders", type=int, default=1)
    parser.add_argument("--warps", type=int, default=1, help="of each sender")
    parser.add_argument("--one-block", action="store_true", help="of the LL path, which sends and then places")
    parser.add_argument("--counting-blocks", type=int, default=1)
    parser.add_argument("--domains", type=int, default=1, help="of as many ranks each, whose rails are modelled")
    parser.add_argument("--chunk", type=int, default=1, help="rows of a chunk of a crossing")
    parser.add_argument("--layout", choices=("expert", "rank"), default="expert")
    parser.add_argument("--own", choices=("", "slots", "copied"), default="", help="how a rank's own rows go")
    parser.add_argument(
        "--refused", nargs="*", default=[], metavar="RANK:DISPATCH", help="dispatches whose rows do not fit on a rank"
    )
    parser.add_argument("--timeouts", action="store_true", help="waits may fail")
    parser.add_argument(
        "--late", action="store_true", help="with --timeouts: blocks may begin late enough to find a failure"
    )
    parser.add_argument(
        "--without-sms", nargs="*", default=[], metavar="ROLE", help="of a PC: roles that begin after the product"
    )
    parser.add_argument(
        "--calls", nargs="*", default=[], help="of each rank a word: e (eager) or r (replay) for each launch"
    )
    parser.add_argument("--fault", choices=[fault.name for fault in Fault], help="a bug to inject")
    parser.add_argument("--deep", action="store_true", help="depth first: finds a fault sooner, with a longer trace")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    dispatches = sum(word in ("D", "DS", "DT", "FD") for word in given.program.split())
    routings = [full(given.ranks, given.tokens, bool(given.own), given.domains) for _ in range(max(dispatches, 1))]
    for dispatch in given.empty:
        routings[dispatch - 1] = empty(given.ranks)
    case = Case(
        given.ranks,
        given.program,
        tuple(routings),
        Fault[given.fault] if given.fault else None,
        senders=given.senders,
        warps=given.warps,
        one_block=given.one_block,
        counting_blocks=given.counting_blocks,
        domains=given.domains,
        chunk=given.chunk,
        layout=given.layout,
        own=given.own,
        refused=tuple((int(rank), int(dispatch)) for rank, dispatch in (each.split(":") for each in given.refused)),
        timeouts=given.timeouts,
        late=given.late,
        without_sms=tuple(given.without_sms),
        calls=tuple(given.calls),
    )
    found = explore(case, deep=given.deep)
    print(found)
    return 1 if found.broken else 0


if __name__ == "__main__":
    sys.exit(main())
