"""Bugs that can be planted in the model. docs/protocol.md names the rule that each of them breaks."""

from enum import Enum


class Fault(Enum):
    """A planted bug. Each value says what is done wrong."""

    ROWS_AFTER_WORD = "a lane announces rows that have not landed"
    HEAD_BEFORE_COUNTS = "the head word leaves before the counts, or the status, have landed"
    RELAXED_TICKET = "the last router releases its own counts only, not those of the other routers"
    SINGLE_BUFFER = "both halves are one"
    BAKED_EPOCH = "a launch gets its epoch from the host, so a graph repeats that of its capture"
    SHARED_EPOCH = "dispatch and combine count in one word"
    EPOCH_BY_FIRST_OUT = "the first block out stores the next epoch"
    EPOCH_BY_SEND = "in the split form the sending kernel stores the epoch"
    EQUAL = "words are compared by equality"
    SILENT = "no word goes to a rank that gets no row"
    SILENT_UNAWAITED = "no word goes to a rank that gets no row, and none is waited for"
    EARLY_END = "a kernel hears and ends without the ranks that send it no row"
    NO_LAST_WORDS = "a dispatch ends without the last words of the lanes"
    LANES_APART = "a sender says that it is done when one of its lanes is"
    SENDERS_UNHEARD = "a kernel ends when the first sender of each peer is done"
    TAKEN_KEPT = "rows that lanes have taken stay taken in the next run"
    UNPOISONED = "a wait that fails poisons nothing"
    POISON_UNREAD = "a poisoned operation begins all the same"
    LATE_READ = "rows in a slot are read after this rank's next dispatch"
    NO_DEPENDENT_WAIT = "kernels launched as dependents do not wait for the kernel before"
    USER_WITHOUT_WAIT = "a kernel that reads what a dispatch gives does not wait for it"
    NEIGHBOUR_WITHOUT_WAIT = "a kernel of the user's in the chain does not wait for the one before it"

    # Rows of a rank itself.
    OWN_UNHEARD = "what comes through slots from the rank itself is taken for there"
    OWN_UNAWAITED = "a dispatch ends while its placers' copies into its own slots are under way"

    # Data that is refused.
    STATUS_BEFORE_COUNTS = "a rank says whether it refuses before it has the counts"
    STATUS_UNHEARD = "only the statuses of ranks that rows come from are heard"
    STATUS_UNNUMBERED = "a status does not say which dispatch its rank combines"
    REFUSAL_SILENT = "a rank that refuses says nothing in that combine"
    REFUSAL_UNCOUNTED = "a combine that is refused is not counted"
    REFUSAL_POISONS = "a combine that is refused poisons"

    # Rows by the copy engine.
    PACKED_EARLY = "rows are packed before the peers have begun the dispatch"
    COPIED_FROM_X = "rows are copied right out of x"

    # The way of few tokens.
    LINE_UNCHECKED = "a line is read without a look at its epoch"
    LINE_IN_GRANULES = "a line arrives in pieces, that of its epoch at any time"
    UNORDERED_LINES = "a line that nobody reads lands behind that of a later kernel"
