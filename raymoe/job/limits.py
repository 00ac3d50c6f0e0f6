"""The largest values of an exchange, the same in a job and in the library."""

MOST_TOKENS = 2**24
"""Of a rank."""
MOST_HIDDEN = 2**20
MOST_EXPERTS = 2**16
"""Of all ranks together."""
MOST_TOPK = 256
MOST_ALIGNMENT = 2**16
MOST_ROWS = 2**31 - 1
"""Of a rank, gaps included: offsets of rows are int32."""
