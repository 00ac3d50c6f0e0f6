"""The spec of an exchange, fixed when it is made. No torch here: the driver checks specs and counts bytes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from raymoe.errors import ConfigError
from raymoe.fp8 import FP8, FP8_BLOCK
from raymoe.memory.layout import ITEM_BYTES, WORD_STRIDE, Layout, Region, round_up

if TYPE_CHECKING:
    import torch

# Limits of a spec, the same in a job and in the library.

MOST_TOKENS = 2**24
"""Tokens of a rank."""
MOST_HIDDEN = 2**20
MOST_EXPERTS = 2**16
"""Experts of all ranks together."""
MOST_TOPK = 256
MOST_ALIGNMENT = 2**16
MOST_ROWS = 2**31 - 1
"""Rows of a rank, gaps included, because offsets of rows are int32."""
MOST_FACTOR = 2**16
"""A capacity as a factor."""

DTYPES = ("bfloat16", "float16", "float32")
LAYOUTS = ("expert", "rank", "token")
PADDINGS = ("any", "zero")
OUTPUTS = ("dequantised", "raw")
TRANSPORTS = ("auto", "copy_engine")
COPY_ENGINE = "copy_engine"

ROW_BYTES = 16
"""Bytes of a piece of a row. Rows move in whole pieces."""
_MOST = {
    "tokens": MOST_TOKENS,
    "hidden": MOST_HIDDEN,
    "experts": MOST_EXPERTS,
    "topk": MOST_TOPK,
    "alignment": MOST_ALIGNMENT,
    "expert_group": MOST_EXPERTS,
    "slots": MOST_EXPERTS,
}


class DtypeName:
    """A field that takes a dtype, as a name or as torch's object, and holds its name.

    >>> class Torch32:  # prints as torch.float32 does
    ...     def __repr__(self):
    ...         return "torch.float32"
    >>> ExchangeSpec(tokens=4, hidden=8, experts=2, topk=1, dtype=Torch32()).dtype
    'float32'
    """

    def __init__(self, default: str) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, spec: object, owner: type | None = None) -> str:
        return self._default if spec is None else str(spec.__dict__[self._name])

    def __set__(self, spec: object, dtype: str | torch.dtype) -> None:
        spec.__dict__[self._name] = dtype_name(dtype)


def dtype_name(dtype: str | torch.dtype) -> str:
    """Return the name of a dtype that is given by its name or as torch's object."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ExchangeSpec:
    """The shape of an exchange: at most T `tokens` a rank, H `hidden`, E `experts` in all, K `topk` a token.

    - `capacity` limits the rows that a rank receives: `worst`, which cannot overflow, or a number of rows. A float is a
      factor of the mean, T·K rows: what each rank receives if all ranks send T tokens and experts are chosen equally
      often. To the factor's rows come the gaps that experts may have, and there are never more than with `worst`.
    - `wire` is the dtype in which rows cross: a name for dispatch, or a mapping for both directions. A combine's sums
      are rounded once, to their wire dtype.
    - `float8_e4m3` as the wire of dispatch adds a float32 scale for each 128 elements. A finite element arrives finite,
      an infinity as the largest magnitude of its 128, NaN as NaN. Neither changes other elements.
    - `output` says what the caller gets of fp8 rows: rows of `dtype`, or values and scales.
    - `layout` is the order of the rows that a rank receives: by expert, or as they arrive (`Dispatched`). `token` gives
      one row for each token and rank, and takes one sum for it. It has no gaps, so `alignment` and `padding` mean
      nothing there. A factor as `capacity` counts T·min(K, R) rows.
    - `depth` is the number of row blocks that the exchange owns; its dispatches use them in turn. With 0, the caller
      gives memory to each dispatch.
    - `transport` says what moves the rows of a dispatch: the backend's own kernel (`auto`), or with `staged` the copy
      engine. It sends all of a rank's rows to every other rank, and takes no SM.
    - `slots` is the number of expert slots of a rank. `Exchange.place` says which expert each slot holds, so E is any
      number, and an expert may have copies. Offsets and counts are per slot. None: expert e is on rank e // (E / R).

    >>> ExchangeSpec(tokens=512, hidden=1024, experts=32, topk=4).rows(ranks=4)
    8320
    >>> ExchangeSpec(tokens=512, hidden=1024, experts=32, topk=4, capacity=1.25, alignment=1).rows(ranks=4)
    2560
    >>> ExchangeSpec(tokens=512, hidden=1000, experts=32, topk=40)
    Traceback (most recent call last):
    raymoe.errors.ConfigError: topk is 40 with 32 experts; a token names at most as many experts as there are
    """

    tokens: int
    hidden: int
    experts: int
    topk: int
    dtype: DtypeName = DtypeName("bfloat16")
    """Of rows: a name, or torch's object for it. It is held as a name."""
    wire: str | Mapping[str, str] | tuple[tuple[str, str], ...] | None = None
    """Stored in its shortest form: None, a name for dispatch, or (direction, dtype) pairs where combine differs."""
    layout: str = "expert"
    alignment: int = 16
    padding: str = "any"
    capacity: int | float | str = "worst"
    output: str = "dequantised"
    depth: int = 1
    transport: str = "auto"
    slots: int | None = None
    expert_group: int = 1
    """Only for the exchange inside a domain (`inside`): a rank's experts form groups of `expert_group` neighbours. The
    first of a group begins at a multiple of `alignment`, and the others follow without gaps."""
    placed_experts: int = 0
    """Only for the exchange whose experts are slots (`over_slots`): the experts that callers name. 0: there are no
    slots."""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if name == "slots" and value is None:
                continue
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}; a whole number of at least 1 is needed")
            if value > most:
                raise ConfigError(f"{name} is {value}; at most {most} is supported")
        choices = {"dtype": DTYPES, "layout": LAYOUTS, "padding": PADDINGS, "output": OUTPUTS}
        choices["transport"] = TRANSPORTS
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(known)}")
        object.__setattr__(self, "wire", _shortest_wire(self.wire, self.dtype))
        if self.output == "raw" and self.dispatch_wire != FP8:
            raise ConfigError(f"output is 'raw' with rows that cross as {self.dispatch_wire}; it needs wire {FP8}")
        if type(self.depth) is not int or self.depth < 0:
            raise ConfigError(f"depth is {self.depth!r}; a whole number of at least 0 is needed")
        if self.topk > self.experts:
            raise ConfigError(
                f"topk is {self.topk} with {self.experts} experts; a token names at most as many experts as there are"
            )
        if self.row_bytes % ROW_BYTES:
            raise ConfigError(
                f"a row of {self.hidden} {self.dtype} is {self.row_bytes} bytes; a multiple of {ROW_BYTES} is needed"
            )
        if self.capacity != "worst" and not is_capacity(self.capacity):
            raise ConfigError(
                f"capacity is {self.capacity!r}; it is 'worst' or a number of rows, 1 to {MOST_ROWS}, or a factor of "
                f"the mean: a float above 0, at most {MOST_FACTOR}"
            )

    @property
    def row_bytes(self) -> int:
        return self.hidden * ITEM_BYTES[self.dtype]

    @property
    def dispatch_wire(self) -> str:
        return self._wire_of("dispatch")

    @property
    def combine_wire(self) -> str:
        return self._wire_of("combine")

    def _wire_of(self, way: str) -> str:
        ways = dict(self.wire) if isinstance(self.wire, tuple) else {"dispatch": self.wire}
        return str(ways.get(way) or self.dtype)

    @property
    def wire_row_bytes(self) -> int:
        """Bytes of a row of dispatch on the wire, scales included.

        >>> ExchangeSpec(tokens=1, hidden=7168, experts=8, topk=1, wire="float8_e4m3").wire_row_bytes
        7392
        """
        if self.dispatch_wire != FP8:
            return self.row_bytes
        return round_up(self.hidden + 4 * self.scales, ROW_BYTES)

    @property
    def combine_row_bytes(self) -> int:
        """Bytes of a row of combine on the wire.

        >>> spec = ExchangeSpec(1, hidden=12, experts=8, topk=1, dtype="float32", wire={"combine": "float16"})
        >>> spec.combine_row_bytes
        32
        """
        return round_up(self.hidden * ITEM_BYTES[self.combine_wire], ROW_BYTES)

    @property
    def combine_width(self) -> int:
        """Elements of a row of combine on the wire, padding included. So the 16 bytes of a status fit into a row."""
        return self.combine_row_bytes // ITEM_BYTES[self.combine_wire]

    @property
    def scales(self) -> int:
        """The number of float32 scales of a row that crosses as fp8."""
        return -(-self.hidden // FP8_BLOCK)

    @property
    def by_copy_engine(self) -> bool:
        return self.transport == COPY_ENGINE

    @property
    def output_dtype(self) -> str:
        """Torch's name for the dtype of the rows that dispatch returns."""
        return "float8_e4m3fn" if self.output == "raw" else self.dtype

    def check(self, ranks: int) -> None:
        """Raise if a world of this many ranks cannot use this spec."""
        if self.slots is not None:
            self._check_slots(ranks)
            self.over_slots(ranks).check(ranks)
            return
        if self.experts % ranks:
            raise ConfigError(
                f"{self.experts} experts on {ranks} ranks; every rank holds the same number of them: change one, or "
                f"give slots, at least {-(-self.experts // ranks)}"
            )
        if self.local_experts(ranks) % self.expert_group:
            raise ConfigError(
                f"{self.local_experts(ranks)} experts a rank in groups of {self.expert_group}; all groups are whole"
            )
        if self.by_token:
            for part in self.parts(ranks):
                part.check(ranks)
        # The limit also holds where the capacity is a number: offsets are computed before they are compared with it.
        if (worst := self._worst(ranks)) > MOST_ROWS:
            raise ConfigError(
                f"up to {worst} rows on a rank, gaps included; {MOST_ROWS} is the most for int32 offsets: "
                "take fewer tokens, ranks or topk, or a smaller alignment"
            )

    def _check_slots(self, ranks: int) -> None:
        assert self.slots is not None
        if (every := ranks * self.slots) < self.experts:
            raise ConfigError(
                f"{self.experts} experts in {self.slots} slots on each of {ranks} ranks; every expert needs a slot: "
                f"{-(-self.experts // ranks)} slots do"
            )
        if every > MOST_EXPERTS:
            raise ConfigError(f"slots is {self.slots} on {ranks} ranks, {every} in all; at most {MOST_EXPERTS} are")

    def local_experts(self, ranks: int) -> int:
        """Return L, the experts of a rank, or its slots."""
        return self.experts // ranks if self.slots is None else self.slots

    def over_slots(self, ranks: int) -> ExchangeSpec:
        """Return the spec of the exchange whose experts are the slots of all ranks; itself without slots.

        >>> spec = ExchangeSpec(tokens=8, hidden=64, experts=5, topk=2, slots=3).over_slots(ranks=2)
        >>> spec.experts, spec.slots, spec.placed_experts
        (6, None, 5)
        """
        if self.slots is None:
            return self
        return replace(self, experts=ranks * self.slots, slots=None, placed_experts=self.experts)

    def rows(self, ranks: int) -> int:
        """Return C, the rows of `x`.

        In the worst case all experts of all tokens are here, since a token may name one expert several times. Each
        expert, or group of experts, then has a gap of `alignment` - 1 rows. Layout `token` has a row for each token.
        """
        worst = self._worst(ranks)
        if isinstance(self.capacity, float) and self.by_token:
            return min(worst, ceil(self.capacity * self.tokens * min(self.topk, ranks)))
        if isinstance(self.capacity, float):
            return min(
                worst, rows_of_factor(self.capacity, self.tokens * self.topk, self.groups(ranks), self.alignment)
            )
        return self.capacity if isinstance(self.capacity, int) else worst

    def counted(self, ranks: int) -> ExchangeSpec:
        """Return the spec with a number of rows in the place of a factor; itself where the capacity is none.

        >>> ExchangeSpec(tokens=8, hidden=64, experts=4, topk=2, capacity=1.5, alignment=4).counted(ranks=2).capacity
        32
        """
        return replace(self, capacity=self.rows(ranks)) if isinstance(self.capacity, float) else self

    @property
    def by_token(self) -> bool:
        return self.layout == "token"

    def parts(self, ranks: int) -> tuple[ExchangeSpec, ...]:
        """Return the specs of the exchanges that one of this spec is made of: itself, except with layout `token`.

        There the first brings each token's row to the ranks of its experts, as if a rank had one expert. The second
        brings the ids and weights of the token and its source, as a row of float32 (`token_rows.py`).

        >>> rows, choices = ExchangeSpec(tokens=8, hidden=64, experts=4, topk=3, layout="token").parts(ranks=2)
        >>> rows.layout, rows.rows(ranks=2), choices.hidden, choices.dtype
        ('expert', 16, 8, 'float32')
        """
        if not self.by_token:
            return (self,)
        rows = replace(self, layout="expert", alignment=1, padding="any", depth=0, capacity=self.rows(ranks))
        hidden = round_up(2 * self.topk + 2, ROW_BYTES // ITEM_BYTES["float32"])
        choices = ExchangeSpec(self.tokens, hidden, self.experts, self.topk, "float32", alignment=1, depth=0)
        return rows, replace(choices, capacity=self._worst(ranks), placed_experts=self.placed_experts)

    def inside(self, domains: int) -> ExchangeSpec:
        """Return the spec of the exchange inside a domain of GPU ranks: the tokens of a whole rail.

        An expert of a rank is a group of experts there, one for each source domain. So rows and gaps are those of this
        spec.

        >>> spec = ExchangeSpec(tokens=8, hidden=64, experts=8, topk=2)
        >>> inside = spec.inside(domains=2)
        >>> inside.tokens, inside.experts, inside.alignment, inside.expert_group
        (16, 8, 16, 2)
        >>> inside.rows(ranks=2), spec.rows(ranks=4)
        (96, 96)
        """
        if isinstance(self.capacity, float):  # a factor of the rows of this spec, not of those of a whole rail
            raise ConfigError(f"capacity is the factor {self.capacity} inside a domain; count its rows first")
        return replace(self, tokens=domains * self.tokens, depth=0, expert_group=domains)

    def groups(self, ranks: int) -> int:
        """Return the groups of experts on a rank. After each there is a gap of at most `alignment` - 1 rows."""
        return self.local_experts(ranks) // self.expert_group

    def _worst(self, ranks: int) -> int:
        if self.by_token:
            return ranks * self.tokens
        return worst_rows(ranks * self.tokens * self.topk, self.groups(ranks), self.alignment)


def is_capacity(value: object) -> bool:
    """Whether a value is a number of rows or a factor of their mean, within the limits.

    >>> [is_capacity(value) for value in (1, 1.25, 0, 0.0, float("nan"), True, "worst")]
    [True, True, False, False, False, False, False]
    """
    if type(value) is float:
        return 0 < value <= MOST_FACTOR
    return type(value) is int and 1 <= value <= MOST_ROWS


def rows_of_factor(factor: float, mean: int, groups: int, alignment: int) -> int:
    """Count the rows of a capacity that is a factor of `mean` rows, with a gap after each group of experts.

    >>> rows_of_factor(1.25, mean=100, groups=2, alignment=1), rows_of_factor(1.25, mean=100, groups=2, alignment=16)
    (125, 160)
    """
    return worst_rows(ceil(factor * mean), groups, alignment)


def worst_rows(entries: int, groups: int, alignment: int) -> int:
    """Count the rows of a rank that receives all `entries` (token, k), with a gap after each of its groups of experts.

    >>> worst_rows(entries=8192, groups=8, alignment=16)
    8320
    """
    return round_up(entries + groups * (alignment - 1), alignment)


def _shortest_wire(
    wire: str | Mapping[str, str] | tuple[tuple[str, str], ...] | None, dtype: str
) -> str | tuple[tuple[str, str], ...] | None:
    """Check `wire`, and drop the directions whose dtype is `dtype`.

    >>> _shortest_wire({"dispatch": "float8_e4m3", "combine": "float16"}, "float16")
    'float8_e4m3'
    >>> _shortest_wire("float16", "float16")
    >>> _shortest_wire({"combine": "float32"}, "float16")
    (('combine', 'float32'),)
    """
    try:
        ways = dict(wire) if isinstance(wire, Mapping | tuple) else {"dispatch": wire or dtype}
    except (TypeError, ValueError):
        raise ConfigError(f"wire is {wire!r}; give a dtype, or a mapping with dispatch and combine") from None
    if unknown := sorted(map(str, ways.keys() - {"dispatch", "combine"})):
        raise ConfigError(f"wire names {', '.join(unknown)}; its directions are dispatch and combine")
    dispatch, combine = (ways.get(way) or dtype for way in ("dispatch", "combine"))
    if dispatch not in (dtype, FP8):
        raise ConfigError(f"wire is {dispatch!r} with dtype {dtype}; dispatch sends rows as {dtype} or {FP8}")
    if combine not in DTYPES:
        raise ConfigError(f"wire of combine is {combine!r}; sums are returned as one of {', '.join(DTYPES)}")
    if combine == dtype:
        return FP8 if dispatch == FP8 else None
    return tuple((way, name) for way, name in (("dispatch", dispatch), ("combine", combine)) if name != dtype)


# The heap of an exchange over shared memory: slots, their metadata, and flags. `host.py` names each region's writer,
# reader and order.


def slots_layout(spec: ExchangeSpec, ranks: int) -> Layout:
    """Return the layout of slots for T rows from each of R sources, for each parity and direction.

    >>> layout = slots_layout(ExchangeSpec(tokens=8, hidden=64, experts=4, topk=2), ranks=2)
    >>> [(placed.region.name, placed.region.shape) for placed in layout.placed][:2]
    [('dispatch_flag', (2, 16)), ('combine_flag', (2, 16))]
    >>> layout.region("dispatch_rows").shape  # 2 parities x 2 sources x 8 tokens, and the row of zeros
    (33, 64)
    >>> layout.region("combine_rows").dtype  # the combine wire dtype
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
            # The last row is no slot: no rank writes it, so it stays zero. With layout `rank`, gaps point to it.
            Region("dispatch_rows", (2 * ranks * T + 1, H), spec.dtype),
            Region("combine_rows", (2, ranks, T, spec.combine_width), spec.combine_wire),
            Region("combine_weights", (2, ranks, T, K), "float32"),  # gradients of weights, beside those of rows
        ]
    )
