"""What an exchange carries, fixed when it is made. Pure: the driver checks specs and counts bytes with it."""

from __future__ import annotations

from dataclasses import dataclass

from raymoe.job.errors import ConfigError
from raymoe.memory.heap import ITEM_BYTES, round_up

DTYPES = ("bfloat16", "float16", "float32")
LAYOUTS = ("expert", "rank")
PADDINGS = ("any", "zero")
_ROW_BYTES = 16  # rows move in pieces of 16 bytes
_MAX_ROWS = 2**31 - 1  # offsets are int32


@dataclass(frozen=True)
class ExchangeSpec:
    """The shape of an exchange: T `tokens` a rank at most, H `hidden`, E `experts` in all, K `topk` a token.

    `capacity` bounds the rows that a rank receives: `worst`, which cannot overflow, or a number of rows.

    >>> ExchangeSpec(tokens=512, hidden=1024, experts=32, topk=4).rows(ranks=4)
    8320
    >>> ExchangeSpec(tokens=512, hidden=1000, experts=32, topk=40)
    Traceback (most recent call last):
    raymoe.job.errors.ConfigError: topk is 40 with 32 experts; a token names at most as many experts as there are
    """

    tokens: int
    hidden: int
    experts: int
    topk: int
    dtype: str = "bfloat16"
    wire: str | None = None
    layout: str = "expert"
    alignment: int = 16
    padding: str = "any"
    capacity: int | str = "worst"

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden", "experts", "topk", "alignment"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}; a whole number of at least 1 is needed")
        for name, choices in (("dtype", DTYPES), ("layout", LAYOUTS), ("padding", PADDINGS)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(choices)}")
        if self.wire not in (None, self.dtype):
            raise ConfigError(f"wire is {self.wire!r} with dtype {self.dtype}; rows cross in their own dtype so far")
        if self.topk > self.experts:
            raise ConfigError(
                f"topk is {self.topk} with {self.experts} experts; a token names at most as many experts as there are"
            )
        if self.row_bytes % _ROW_BYTES:
            raise ConfigError(
                f"a row of {self.hidden} {self.dtype} is {self.row_bytes} bytes; a multiple of {_ROW_BYTES} is needed"
            )
        if self.capacity != "worst" and (type(self.capacity) is not int or self.capacity < 1):
            raise ConfigError(f"capacity is {self.capacity!r}; it is 'worst' or a number of rows, at least 1")

    @property
    def row_bytes(self) -> int:
        return self.hidden * ITEM_BYTES[self.dtype]

    def check(self, ranks: int) -> None:
        """Refuse a world that this spec cannot be spread over."""
        if self.experts % ranks:
            raise ConfigError(f"{self.experts} experts on {ranks} ranks; every rank holds the same number of them")
        if self.rows(ranks) > _MAX_ROWS:
            raise ConfigError(f"{self.rows(ranks)} rows on a rank; {_MAX_ROWS} is the most that int32 offsets can name")

    def local_experts(self, ranks: int) -> int:
        return self.experts // ranks

    def rows(self, ranks: int) -> int:
        """C, the rows of `x`. At worst all experts of all tokens are here (a token may name one expert several times),
        and every expert begins just behind a multiple of `alignment`."""
        if isinstance(self.capacity, int):
            return self.capacity
        gaps = self.local_experts(ranks) * (self.alignment - 1)
        return round_up(ranks * self.tokens * self.topk + gaps, self.alignment)
