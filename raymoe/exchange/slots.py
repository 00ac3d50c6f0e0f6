"""The heap of an exchange over shared memory: slots, what is told about them, and the words that announce them.

`host.py` says who writes and reads each region and when. Pure, so that bytes can be counted before Ray starts.
"""

from __future__ import annotations

from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.heap import WORD_STRIDE, Layout, Region


def slots_layout(spec: ExchangeSpec, ranks: int) -> Layout:
    """Slots for T rows from each of R sources, twice, for each direction.

    >>> layout = slots_layout(ExchangeSpec(tokens=8, hidden=64, experts=4, topk=2), ranks=2)
    >>> [(placed.region.name, placed.region.shape) for placed in layout.placed][:2]
    [('dispatch_flag', (2, 16)), ('combine_flag', (2, 16))]
    >>> layout.region("dispatch_rows").shape  # 2 halves x 2 sources x 8 tokens, and the row of zeros
    (33, 64)
    >>> layout.region("combine_rows").dtype  # that in which sums cross
    'bfloat16'
    """
    T, H, K = spec.tokens, spec.hidden, spec.topk
    return Layout.of(
        [
            Region.words("dispatch_flag", ranks),
            Region.words("combine_flag", ranks),
            Region("dispatch_head", (2, ranks, WORD_STRIDE), "int64"),
            Region("combine_head", (2, ranks, WORD_STRIDE), "int64"),
            Region("dispatch_ids", (2, ranks, T, K), "int32"),
            Region("dispatch_weights", (2, ranks, T, K), "float32"),
            # One row more than slots: nobody writes it, so it stays zero, and with layout `rank` gaps point to it.
            Region("dispatch_rows", (2 * ranks * T + 1, H), spec.dtype),
            Region("combine_rows", (2, ranks, T, spec.home_width), spec.combine_wire),
        ]
    )
