"""The status that a rank sends with a combine: why it refuses the data, or which dispatch it combines.

Statuses travel with the flags, so that all ranks raise on the same step. A step is refused if a rank refuses it, if two
ranks combine different dispatches or from different call sites, or if only some ranks apply weights or send gradients
of weights.

A backward pass that sends rows to the places of an earlier dispatch says which one (`status_of_backward`). Ranks that
run such passes of different dispatches refuse the rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from raymoe.errors import DataRefused
from raymoe.exchange.spec import ExchangeSpec

_PACKED = struct.Struct("<iiq")
CAUSE_WORD, NUMBER_WORD = 0, 2
"""The places of the cause, and of the lower half of the number, among the int32 words of a packed refusal."""
CARRIES = 2
"""The bit in `other` of a combine that also returns gradients of weights."""
SITE_BITS, SITE_SHIFT = 29, 2
"""The bits of a call site's number, which is 0 where there is none, and their place in `other`."""
DIGEST_SHIFT = 32
"""The place of a placement's digest in the number of a dispatch that a combine sends."""
_DISPATCH = (1 << DIGEST_SHIFT) - 1


class Cause(IntEnum):
    """The reason why a rank refuses a step, and the meaning of the two numbers beside it."""

    # other: whether the combine is weighted, plus CARRIES, plus the site; number: the dispatch it combines, and in the
    # 32 bits above the digest of its placement
    NONE = 0
    ID = 1  # other: the token, number: the id
    CAPACITY = 2  # number: the rows needed
    COUNT = 3  # other: the source, number: the rows that it announced
    EXPERT = 4  # other: the source, number: the local expert that it named
    TOKENS = 5  # other: the rows of x, number: the tokens asked for
    EXPERTS = 6  # on CPU ranks: an exception ended the work between dispatch and combine


@dataclass(frozen=True)
class Refusal:
    """A status. It has 16 bytes, the size of the smallest row, so it fits where a row fits."""

    cause: Cause = Cause.NONE
    other: int = 0
    number: int = 0

    NBYTES = _PACKED.size

    def __bool__(self) -> bool:
        return self.cause is not Cause.NONE

    def pack(self) -> bytes:
        return _PACKED.pack(self.cause, self.other, self.number)

    @classmethod
    def unpack(cls, packed: bytes | memoryview) -> Refusal:
        cause, other, number = _PACKED.unpack(packed)
        return cls(Cause(cause), other, number)

    def sentence(self, rank: int, spec: ExchangeSpec, ranks: int) -> str:
        if self.cause is Cause.ID:
            experts = spec.placed_experts or spec.experts
            # An id without an expert became one without a slot.
            number = self.number - (spec.experts - experts if self.number >= 0 else 0)
            return f"rank {rank} asked for expert {number} for its token {self.other}; ids are -1 to {experts - 1}"
        if self.cause is Cause.CAPACITY:
            return f"{self.number} rows, gaps included, came to rank {rank}; its capacity is {spec.rows(ranks)}"
        if self.cause is Cause.TOKENS:
            can = f"x has {self.other} rows, so 0 to {self.other} can be sent"
            way_out = ": make the exchange with more tokens" if self.other == spec.tokens < self.number else ""
            return f"num_tokens is {self.number} on rank {rank}; {can}{way_out}"
        if self.cause is Cause.EXPERTS:
            return f"an exception, which rank {rank} reports, ended the work of its experts"
        if self.cause is Cause.COUNT:
            return f"rank {self.other} announced {self.number} rows to rank {rank}; 0 to {spec.tokens} can be sent"
        return (
            f"rank {self.other} sent rank {rank} a row for its expert {self.number}; it has {spec.local_experts(ranks)}"
        )

    def error(self, rank: int, spec: ExchangeSpec, ranks: int, most_rows: int = 0) -> DataRefused:
        """Return the error of this refusal, which `rank` raises or reports. `most_rows` is what any rank needed."""
        refused = DataRefused(self.sentence(rank, spec, ranks))
        if self.cause is Cause.CAPACITY:
            refused.rows_needed = needed = max(most_rows, self.number)
            refused.advice = f"skip this step on all ranks, or take ExchangeSpec(capacity={needed}) or more, or 'worst'"
        return refused


NO_REFUSAL = Refusal()


def status_of(refusal: Refusal, dispatch: int, weighted: bool, site: int = 0) -> Refusal:
    """Return the status that a rank sends with a combine. Dispatches are counted from 1."""
    return refusal or Refusal(Cause.NONE, int(weighted) | site << SITE_SHIFT, dispatch)


def marked_number(dispatch: int, digest: int) -> int:
    """Return the number that a combine sends for a dispatch with a placement of this digest.

    >>> marked_number(3, digest=0), hex(marked_number(3, digest=0x7A))
    (3, '0x7a00000003')
    """
    return dispatch | digest << DIGEST_SHIFT


def status_of_backward(dispatch: int, site: int = 0) -> Refusal:
    """Return the status that a rank sends in the backward pass of its dispatch; dispatch 0: in no backward pass."""
    return Refusal(Cause.NONE, site << SITE_SHIFT, dispatch)


def judge_statuses(statuses: Sequence[Refusal], spec: ExchangeSpec) -> DataRefused | None:
    """Return the error of a refused step, the same on every rank; None where the step is good.

    It names the lowest rank that refuses, else the first whose status differs from rank 0's.

    Numbers are those of a rank's own dispatches. They may be equal although the ranks dispatched for different layers,
    so a difference of sites is named first.

    >>> spec = ExchangeSpec(tokens=4, hidden=8, experts=4, topk=1, slots=2)
    >>> second, third = (status_of(NO_REFUSAL, number, weighted=True) for number in (2, 3))
    >>> judge_statuses([third, third], spec)
    >>> print(judge_statuses([third, third, second], spec))
    rank 0 combines its dispatch 3 and rank 2 its dispatch 2; all ranks combine the same dispatch
    >>> print(judge_statuses([third, status_of(NO_REFUSAL, 3, weighted=False)], spec))
    rank 0 combines dispatch 3 with weighted=True and rank 1 with weighted=False; all ranks give the same weighted
    >>> print(judge_statuses([third, Refusal(Cause.NONE, CARRIES, 3)], spec))
    rank 0 combines dispatch 3 with weighted=True and rank 1 with gradients; all ranks run the same backward passes
    >>> print(judge_statuses([status_of(NO_REFUSAL, 3, True, site) for site in (1, 1, 2)], spec))
    rank 0 combines rows of call site 1 and rank 2 rows of call site 2; all ranks call the same layers in one order
    >>> judge_statuses([Refusal(Cause.CAPACITY, 0, rows) for rows in (40, 56)], spec).rows_needed
    56
    >>> stale = status_of(NO_REFUSAL, marked_number(3, digest=9), weighted=True)
    >>> print(judge_statuses([stale, stale, third], spec.over_slots(2)))  # doctest: +NORMALIZE_WHITESPACE
    rank 0 dispatched by placement 00000009 and rank 2 by placement 00000000; all ranks place the same experts before
    the same dispatch
    """
    for rank, refusal in enumerate(statuses):
        if refusal:
            most_rows = max((status.number for status in statuses if status.cause is Cause.CAPACITY), default=0)
            return refusal.error(rank, spec, len(statuses), most_rows)
    first = statuses[0]
    for rank, status in enumerate(statuses):
        if status.other >> SITE_SHIFT != first.other >> SITE_SHIFT:
            return DataRefused(
                f"rank 0 combines rows of {_site(first)} and rank {rank} rows of {_site(status)}; all ranks call the "
                "same layers in one order"
            )
    for rank, status in enumerate(statuses):
        if (digest := status.number >> DIGEST_SHIFT) != first.number >> DIGEST_SHIFT:
            return DataRefused(
                f"rank 0 dispatched by placement {first.number >> DIGEST_SHIFT:08x} and rank {rank} by placement "
                f"{digest:08x}; all ranks place the same experts before the same dispatch"
            )
    if spec.placed_experts:
        statuses = [replace(status, number=_dispatch(status)) for status in statuses]
        first = statuses[0]
    for rank, status in enumerate(statuses):
        if status.number != first.number:
            return DataRefused(
                f"rank 0 combines its dispatch {first.number} and rank {rank} its dispatch {status.number}; all ranks "
                "combine the same dispatch"
            )
    for rank, status in enumerate(statuses):
        if status.other != first.other:
            backward = (first.other | status.other) & CARRIES
            rule = "all ranks run the same backward passes" if backward else "all ranks give the same weighted"
            forms = f"with {_form(first)} and rank {rank} with {_form(status)}"
            return DataRefused(f"rank 0 combines dispatch {first.number} {forms}; {rule}")
    return None


def _form(status: Refusal) -> str:
    return "gradients" if status.other & CARRIES else f"weighted={bool(status.other & 1)}"


def _site(status: Refusal) -> str:
    site = status.other >> SITE_SHIFT
    return f"call site {site}" if site else "no call site"


def judge_backward(statuses: Sequence[Refusal]) -> DataRefused | None:
    """Return the error of a dispatch in a backward pass, the same on every rank; None where all ranks agree.

    >>> judge_backward([status_of_backward(3), status_of_backward(3)])
    >>> print(judge_backward([status_of_backward(3), status_of_backward(2)]))  # doctest: +NORMALIZE_WHITESPACE
    rank 0 runs the backward pass of its dispatch 3 and rank 1 of its dispatch 2; all ranks run backward passes in one
    order
    >>> print(judge_backward([status_of_backward(3, site=1), status_of_backward(3, site=2)]))
    rank 0 runs the backward pass of call site 1 and rank 1 of call site 2; all ranks run backward passes in one order
    >>> print(judge_backward([status_of_backward(0), status_of_backward(2)]))
    rank 0 runs no backward pass and rank 1 the backward pass of its dispatch 2; all ranks run the same backward passes
    """
    first, rule = statuses[0], "all ranks run backward passes in one order"
    for rank, status in enumerate(statuses):
        if bool(status.number) is not bool(first.number):
            return DataRefused(
                f"rank 0 runs {_backward(first)} and rank {rank} {_backward(status)}; all ranks run the same backward "
                "passes"
            )
    for rank, status in enumerate(statuses):
        if status.other != first.other:
            sites = f"{_site(first)} and rank {rank} of {_site(status)}"
            return DataRefused(f"rank 0 runs the backward pass of {sites}; {rule}")
    for rank, status in enumerate(statuses):
        if status.number != first.number:
            numbers = f"its dispatch {_dispatch(first)} and rank {rank} of its dispatch {_dispatch(status)}"
            return DataRefused(f"rank 0 runs the backward pass of {numbers}; {rule}")
    return None


def _dispatch(status: Refusal) -> int:
    return status.number & _DISPATCH


def _backward(status: Refusal) -> str:
    return f"the backward pass of its dispatch {_dispatch(status)}" if status.number else "no backward pass"


def raise_first(statuses: Sequence[Refusal], spec: ExchangeSpec) -> None:
    """Raise if the statuses of all ranks say that a step is refused."""
    if (refused := judge_statuses(statuses, spec)) is not None:
        raise refused


def raise_backward(statuses: Sequence[Refusal]) -> None:
    """Raise if the ranks run backward passes of different dispatches; `statuses` is empty if no rank refused one."""
    if statuses and (refused := judge_backward(statuses)) is not None:
        raise refused
