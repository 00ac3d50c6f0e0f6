"""The sections of a job. Every key has its one home, type, bounds and default here."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from raymoe.exchange.spec import MOST_ALIGNMENT, MOST_EXPERTS, MOST_HIDDEN, MOST_ROWS, MOST_TOKENS, MOST_TOPK

# Sizes as people write them, and the bytes of an element.

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([A-Za-z]*)")
SIZE_PATTERN = rf"^[0-9]+(\.[0-9]+)? ?({'|'.join(_UNITS)})$"


def parse_size(text: str) -> int:
    """Bytes in a size with a unit; raises ValueError with the reason.

    >>> parse_size("4KiB"), parse_size("1.5 MiB"), parse_size("2GB")
    (4096, 1572864, 2000000000)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("is not a size such as 4096 or 4KiB")
    number, unit = match.groups()
    if unit not in _UNITS:
        near = [name for name in _UNITS if name.lower() == unit.lower() or name.lower() == f"{unit.lower()}ib"]
        meant = f", did you mean {number}{near[0]}?" if near else f", the units are {', '.join(_UNITS)}"
        raise ValueError(f"has {'the unknown unit ' + repr(unit) if unit else 'no unit'}{meant}")
    size = Fraction(number) * _UNITS[unit]  # exact, where a float would lose the last bytes of a large size
    if size.denominator != 1:
        raise ValueError("is not a whole number of bytes")
    return size.numerator


def format_size(size: int) -> str:
    """The shortest exact way to write a size in powers of 1024.

    >>> format_size(4096), format_size(1500), format_size(3 * 2**30)
    ('4KiB', '1500B', '3GiB')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return f"{size}B"


Dtype = Literal["bfloat16", "float16", "float32"]
DispatchWire = Literal["bfloat16", "float16", "float32", "float8_e4m3"]
OtherSystem = Literal["nvshmem"]


class Section(BaseModel):
    """Strict, frozen, and without unknown keys: a setting that is not understood is never passed over."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def _auto_or_boolean(value: Any) -> Any:
    if value == "auto" or value is True or value is False:
        return value
    raise PydanticCustomError("graph", "not one of auto, true or false")


def _rows_or_worst(value: Any) -> Any:
    if value == "worst" or (type(value) is int and 1 <= value <= MOST_ROWS):
        return value
    raise PydanticCustomError("capacity", "not worst, nor a number of rows from 1 to 2147483647")


def _auto_or_count(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= 1024):
        return value
    raise PydanticCustomError("sms", "not auto, nor a number from 1 to 1024")


def _all_or_pairs(value: Any) -> Any:
    listed = value if isinstance(value, list | tuple) else ()
    pairs = tuple(tuple(pair) for pair in listed if isinstance(pair, list | tuple))
    whole = len(pairs) == len(listed) > 0 and all(
        len(pair) == 2 and pair[0] != pair[1] and all(type(rank) is int and rank >= 0 for rank in pair)
        for pair in pairs
    )
    if whole and len(set(pairs)) == len(pairs):
        return pairs
    if value == "all":
        return value
    raise PydanticCustomError("pairs", "not all, nor pairs of two ranks such as [[0, 1], [1, 0]], each once")


def _bytes(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return parse_size(value)
        except ValueError as error:
            raise PydanticCustomError("size", "{why}", {"why": str(error)}) from None
    if type(value) is not int:
        raise PydanticCustomError("size", "not a size such as 4096 or 4KiB")
    return value


def _both_ways(value: Any) -> Any:
    return {"dispatch": value} if isinstance(value, str) else value


Size = Annotated[
    int,
    BeforeValidator(_bytes),
    Field(ge=1, le=2**40),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": SIZE_PATTERN}]}),
]


class WorldSection(Section):
    ranks: int = Field(default=4, ge=1, le=1024)
    """Ranks, each an actor with a process of its own."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where ranks run; auto is cuda where the cluster has GPUs and the workload can use them, else cpu."""
    cpus: float = Field(default=0.5, ge=0.001, le=1024)
    """Ray CPUs that a rank asks for."""
    share_gpu: bool = False
    """Whether all ranks share one GPU: to test what is right on it, never to time anything."""
    restarts: int = Field(default=1, ge=0, le=100)
    """How many times the gang starts again after a rank was lost."""
    placement_timeout_s: float = Field(default=60.0, gt=0, le=86400)
    """How long to wait for room in the cluster, in seconds."""
    wait_timeout_s: float = Field(default=30.0, gt=0, le=86400)
    """How long a rank waits for a peer, in seconds."""


class ShapeSection(Section):
    tokens: int = Field(default=512, ge=1, le=MOST_TOKENS)
    """T, tokens a rank."""
    hidden: int = Field(default=1024, ge=1, le=MOST_HIDDEN)
    """H, elements of a token's row."""
    experts: int = Field(default=32, ge=1, le=MOST_EXPERTS)
    """E, experts of all ranks together."""
    topk: int = Field(default=4, ge=1, le=MOST_TOPK)
    """K, experts that a token goes to."""
    ffn: int = Field(default=512, ge=1, le=2**20)
    """Inner size of an expert; the layer workload alone has experts."""
    dtype: Dtype = "bfloat16"
    """Type of rows and weights."""


class RoutingSection(Section):
    kind: Literal["uniform", "zipf", "hot", "trace"] = "uniform"
    """Which experts tokens go to: all alike, a zipf law, one hot expert, or a recorded trace."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of everything that is drawn."""
    alpha: float = Field(default=1.0, gt=0, le=100)
    """Exponent of the zipf law."""
    share: float = Field(default=0.5, ge=0, le=1)
    """Share of the tokens that name the hot expert."""
    file: str | None = Field(default=None, min_length=1)
    """Recorded expert ids, relative to the config; for kind trace."""
    masked: float = Field(default=0.0, ge=0, le=1)
    """Share of the ids that are -1, no expert."""
    ragged: bool = False
    """Whether ranks hold different numbers of tokens, down to none."""


class WireSection(Section):
    dispatch: DispatchWire | None = None
    """What rows travel as to the experts: the shape's dtype unless said, or float8_e4m3 with a scale for each 128."""
    combine: Dtype | None = None
    """What rows travel as on the way back: each rank sums its experts' rows of a token in float32 and rounds once to
    this; the source sums those in float32 too and rounds once to the shape's dtype, which this is unless said."""


class ExchangeSection(Section):
    backend: Literal[
        "auto", "fused", "staged", "collective", "allgather", "host", "row_push", "nccl_bare", OtherSystem
    ] = "auto"
    """How rows move: by one kernel each way (fused) or by several (staged) between GPU ranks, over shared memory (host)
    between CPU ranks, by NCCL or Gloo (collective, allgather) between either. row_push is no exchange: it only pushes
    rows to known slots, a yardstick for dispatch between GPU ranks. Nor is nccl_bare, the bare NCCL calls on the bytes
    that allgather and collective move, a yardstick for these. Nor is nvshmem, torch's all_to_all_vdev_2d: it is another
    system, run for comparison."""
    transport: Literal["auto", "copy_engine"] = "auto"
    """Who moves the rows of dispatch: the backend in its own way, or with staged the copy engine, which sends all rows
    to every rank and keeps no SM busy meanwhile."""
    layout: Literal["expert", "rank"] = "expert"
    """Order of received rows: by expert, or as they came from each rank."""
    alignment: int = Field(default=16, ge=1, le=MOST_ALIGNMENT)
    """Each expert's rows start at a multiple of this."""
    padding: Literal["any", "zero"] = "any"
    """What the gaps between experts hold."""
    sms: Annotated[int | Literal["auto"], BeforeValidator(_auto_or_count)] = "auto"
    """SMs of a GPU that kernels of the exchange may take, so that they can share it: all (auto), or a number. Beside a
    matrix product half of them are best. collective and allgather take what NCCL takes."""
    capacity: Annotated[int | Literal["worst"], BeforeValidator(_rows_or_worst)] = "worst"
    """Rows received at most: enough for the worst routing, or a number."""
    wire: Annotated[WireSection, BeforeValidator(_both_ways)] = WireSection()
    """What crosses the link; a plain name is that of dispatch."""
    output: Literal["raw", "dequantised"] = "dequantised"
    """What dispatch gives of float8_e4m3 rows: values and scales (raw), or rows of the shape's dtype."""


class StepsSection(Section):
    warmup: int = Field(default=5, ge=0, le=1_000_000)
    """Steps before the clock starts."""
    count: int = Field(default=50, ge=1, le=1_000_000)
    """Steps on the clock."""
    graph: Annotated[Literal["auto", True, False], BeforeValidator(_auto_or_boolean)] = "auto"
    """Whether steps are replayed from a CUDA graph; auto is yes where it can be. CPU ranks have none."""
    verify: bool = True
    """Whether the first, the last and every 50th step are checked, off the clock."""
    trace: bool = False
    """Whether kernels of `fused` tell when their blocks came to which point: in the lines of dispatch and combine, of
    runs of their own after the steps. It costs the steps a little speed."""


class P2pSection(Section):
    protocol: Literal["put", "get"] = "put"
    """Who moves the bytes: the one that has them, or the one that wants them."""
    transports: Annotated[
        tuple[Literal["auto", "copy_engine", "tma", "collective", "host"], ...], Field(strict=False, min_length=1)
    ] = ("auto",)
    """How bytes move: by copy_engine, tma or collective (NCCL) between GPU ranks, by host between CPU ranks."""
    bytes: Annotated[tuple[Size, ...], Field(strict=False, min_length=1)] = (4096, 1048576)
    """Message sizes, such as 4KiB."""
    pattern: Literal["pairs", "all_to_all"] = "pairs"
    """One pair of ranks after the other, or all at once."""
    pairs: Annotated[Literal["all"] | tuple[tuple[int, int], ...], BeforeValidator(_all_or_pairs)] = "all"
    """Which pairs, as [source, destination]; for pattern pairs. Where all links are alike, one tells as much as all."""
    sms: Annotated[int | Literal["auto"], BeforeValidator(_auto_or_count)] = "auto"
    """SMs of a GPU that a rank's copies by tma may take together; the other transports take no number."""


class OverlapSection(Section):
    rows: int = Field(default=6144, ge=1, le=2**24)
    """Rows of the matrix product beside the exchange: rows x hidden times hidden x columns, in the shape's dtype."""
    columns: int = Field(default=4096, ge=1, le=2**20)
    """Its columns. With hidden 7168 in bfloat16 the default takes about as long as 4096 tokens to four H200."""
