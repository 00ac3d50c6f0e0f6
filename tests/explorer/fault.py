"""Bugs that can be injected into the model. docs/internals/protocol.md names the rule that each breaks."""

from enum import Enum


class Fault(Enum):
    """An injected bug. Each value describes the wrong behaviour."""

    ROWS_AFTER_WORD = "a warp announces rows that have not landed"
    HEAD_BEFORE_COUNTS = "the head word leaves before the counts, or the status, have landed"
    RELAXED_TICKET = "the last counting block releases its own counts only, not those of the other counting blocks"
    SINGLE_BUFFER = "both parities use one buffer"
    BAKED_EPOCH = "the host passes the epoch, so a graph repeats the epoch of its capture"
    SHARED_EPOCH = "dispatch and combine share one epoch"
    EPOCH_BY_FIRST_OUT = "the first block out stores the next epoch"
    EPOCH_BY_SEND = "in the split form the kernel that sends stores the epoch"
    EQUAL = "words are compared by equality"
    SILENT = "no word goes to a rank that gets no row"
    SILENT_UNAWAITED = "no word goes to a rank that gets no row, and no rank waits for such a word"
    EARLY_END = "a kernel ends without words from the ranks that send it no row"
    NO_LAST_WORDS = "a dispatch ends without the done words of the senders"
    WARPS_APART = "a sender stores its done words when one of its warps is done"
    SENDERS_UNHEARD = "a kernel ends when the first sender of each peer is done"
    TAKEN_KEPT = "rows that warps have taken stay taken in the next run"
    UNPOISONED = "a wait that fails poisons nothing"
    POISON_UNREAD = "a poisoned operation runs"
    LATE_READ = "rows in a slot are read after this rank's next dispatch"
    NO_DEPENDENT_WAIT = "kernels launched as dependents do not wait for the kernel before"
    USER_WITHOUT_WAIT = "a kernel that reads the result of a dispatch does not wait for it"
    NEIGHBOUR_WITHOUT_WAIT = "a user's kernel in the chain does not wait for the kernel before it"

    # A rank's own rows.
    OWN_UNHEARD = "a rank does not wait for its own rows that come through slots"
    OWN_UNAWAITED = "a dispatch ends before its placement blocks' copies into its own slots have landed"

    # Data that is refused.
    STATUS_BEFORE_COUNTS = "a rank sends its status before it has the counts"
    STATUS_UNHEARD = "a rank reads only the statuses of ranks that send it rows"
    STATUS_UNNUMBERED = "a status does not name the dispatch that its rank combines"
    REFUSAL_SILENT = "a rank that refuses sends no status and no words in that combine"
    REFUSAL_UNCOUNTED = "a combine that is refused does not store its epoch"
    REFUSAL_POISONS = "a combine that is refused poisons"

    # Rows by the copy engine.
    PACKED_EARLY = "rows are packed before the peers have begun the dispatch"
    COPIED_FROM_X = "rows are copied directly from x"

    # Rows that come in chunks.
    CHUNK_BEFORE_ROWS = "a chunk is announced before its rows have landed"
    CHUNK_UNFENCED = "a row of x is loaded before its chunk's word has been seen"
    CHUNK_UNHEARD = "rows of x are loaded without a wait"
    FIRST_CHUNK_ONLY = "rows of every chunk are loaded after the first chunk's word"
    COUNTED_BESIDE = "the rail counts the crossing, beside the dispatch that reads its number"
    BAKED_CROSSING = "the host passes the number of the crossing, so a graph repeats that of its capture"
    CHUNK_RESET = "a chunk's word is a flag, and the last block out of the dispatch resets it"
    CROSSING_EARLY = "a crossing begins before the dispatch before it has ended"
    RAIL_UNJOINED = "the stream of the dispatch goes on before all chunks have come"
    CROSSING_AFTER = "a crossing begins after the dispatch that waits for its rows"
    RAIL_UNASKED = "a rail stores rows at a rank that has not begun the crossing"
    ABORT_ANNOUNCED = "a chunk is announced whose gather was ended by an abort"
    ABORT_BEFORE_WORD = "the host ends a rail before it sets the word of the abort"

    # A combine beside the product of its rows.
    PIECE_BEFORE_ROWS = "a piece is announced before its rows are stored"
    PIECE_UNHEARD = "the experts' rows are read without a wait"
    FIRST_PIECE_ONLY = "every piece is read after the first piece's word"
    PIECE_OF_ANY_STEP = "a piece is read after any dispatch's word"
    PRODUCT_AWAITS_COMBINE = "the product ends after the warps that send its rows"

    # The LL path.
    LINE_UNCHECKED = "a line is read without a check of its epoch"
    LINE_IN_GRANULES = "a line arrives in pieces, and the piece with its epoch at any time"
    ARRIVES_FIRST = "a block of the LL path works on what arrives before it has sent what leaves"
    UNORDERED_LINES = "a line that no thread reads lands after a later kernel's line in its place"
