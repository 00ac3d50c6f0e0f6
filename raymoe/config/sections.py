"""Defines the sections of a job: every key with its type, bounds and default."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from raymoe.exchange.spec import MOST_ALIGNMENT, MOST_EXPERTS, MOST_HIDDEN, MOST_ROWS, MOST_TOKENS, MOST_TOPK

# Sizes with units, and the bytes of an element.

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([A-Za-z]*)")
SIZE_PATTERN = rf"^[0-9]+(\.[0-9]+)? ?({'|'.join(_UNITS)})$"


def parse_size(text: str) -> int:
    """Convert a size with a unit to bytes. Raises ValueError with the reason.

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
    size = Fraction(number) * _UNITS[unit]  # exact; a float would lose the last bytes of a large size
    if size.denominator != 1:
        raise ValueError("is not a whole number of bytes")
    return size.numerator


def format_size(size: int) -> str:
    """Write a size in the largest unit of 1024 that divides it.

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
    """Base of all sections: strict types, frozen, and unknown keys are refused."""

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
    raise PydanticCustomError("capacity", "must be worst, or a number of rows from 1 to 2147483647")


def _auto_or_count(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= 1024):
        return value
    raise PydanticCustomError("sms", "must be auto, or a number from 1 to 1024")


def _auto_or_stages(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= 64):
        return value
    raise PydanticCustomError("stages", "must be auto, or a number from 1 to 64")


def _all_or_pairs(value: Any) -> Any:
    listed = value if isinstance(value, list | tuple) else ()
    pairs = tuple(tuple(pair) for pair in listed if isinstance(pair, list | tuple))
    valid = len(pairs) == len(listed) > 0 and all(
        len(pair) == 2 and pair[0] != pair[1] and all(type(rank) is int and rank >= 0 for rank in pair)
        for pair in pairs
    )
    if valid and len(set(pairs)) == len(pairs):
        return pairs
    if value == "all":
        return value
    raise PydanticCustomError("pairs", "must be all, or different pairs of two ranks such as [[0, 1], [1, 0]]")


def _bytes(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return parse_size(value)
        except ValueError as error:
            raise PydanticCustomError("size", "{why}", {"why": str(error)}) from None
    if type(value) is not int:
        raise PydanticCustomError("size", "not a size such as 4096 or 4KiB")
    return value


def _name_or_mapping(value: Any) -> Any:
    return {"dispatch": value} if isinstance(value, str) else value


Size = Annotated[
    int,
    BeforeValidator(_bytes),
    Field(ge=1, le=2**40),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": SIZE_PATTERN}]}),
]


class WorldSection(Section):
    ranks: int = Field(default=4, ge=1, le=1024)
    """Number of ranks. Each is a Ray actor in its own process."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the ranks. auto is cuda if the cluster has GPUs and the workload can use them, else cpu."""
    cpus: float = Field(default=0.5, ge=0.001, le=1024)
    """Ray CPUs that a rank asks for."""
    share_gpu: bool = False
    """Whether all ranks share one GPU. This is for tests of results, never for timing."""
    restarts: int = Field(default=1, ge=0, le=100)
    """How many times the gang starts again after it lost a rank."""
    placement_timeout_s: float = Field(default=60.0, gt=0, le=86400)
    """Seconds to wait for free resources in the cluster."""
    wait_timeout_s: float = Field(default=30.0, gt=0, le=86400)
    """Seconds that a rank waits for a peer."""


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
    """Inner size of an expert. Only workload layer computes experts."""
    dtype: Dtype = "bfloat16"
    """Type of rows and of experts' weights."""


class RoutingSection(Section):
    kind: Literal["uniform", "zipf", "hot", "trace"] = "uniform"
    """How tokens choose experts: all alike, by a Zipf law, one hot expert, or from a recorded trace."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of all random numbers."""
    alpha: float = Field(default=1.0, gt=0, le=100)
    """Exponent of the Zipf law."""
    share: float = Field(default=0.5, ge=0, le=1)
    """Share of the tokens that choose the hot expert."""
    file: str | None = Field(default=None, min_length=1)
    """File of recorded expert ids for kind trace, relative to the config."""
    masked: float = Field(default=0.0, ge=0, le=1)
    """Share of the ids that are -1, which means no expert."""
    ragged: bool = False
    """Whether ranks hold different numbers of tokens, possibly none."""


class WireSection(Section):
    dispatch: DispatchWire | None = None
    """Type of rows on the way to the experts. Default: the shape's dtype; or float8_e4m3, one scale for 128 values."""
    combine: Dtype | None = None
    """Type of rows on the way back. Default: the shape's dtype. Each rank sums its experts' rows of a token in float32
    and rounds once to this type. The source sums these in float32 and rounds once to the shape's dtype."""


class ExchangeSection(Section):
    backend: Literal[
        "auto", "fused", "staged", "collective", "allgather", "host", "row_push", "nccl_bare", OtherSystem
    ] = "auto"
    """How rows move. GPU ranks: one kernel each way (fused) or several (staged). CPU ranks: shared memory (host).
    Both: NCCL or Gloo (collective, allgather). The others are no exchanges and serve comparison on GPUs. row_push only
    pushes rows to known slots: a limit for dispatch. nccl_bare makes only the NCCL calls that collective and allgather
    make. nvshmem is torch's all_to_all_vdev_2d."""
    transport: Literal["auto", "copy_engine"] = "auto"
    """Transport of the rows of dispatch. auto: the backend's own way. copy_engine (staged only): the copy engine sends
    all rows to every rank and occupies no SM."""
    layout: Literal["expert", "rank"] = "expert"
    """Order of received rows: by expert, or as they arrive from each rank."""
    alignment: int = Field(default=16, ge=1, le=MOST_ALIGNMENT)
    """The rows of each expert start at a multiple of this."""
    padding: Literal["any", "zero"] = "any"
    """Content of the gaps between experts."""
    sms: Annotated[int | Literal["auto"], BeforeValidator(_auto_or_count)] = "auto"
    """SMs of a GPU that the exchange's kernels may take: all (auto), or a number. Beside a matrix product fewer than
    half of them are best, 48 or 64 on H200. collective and allgather take as many as NCCL does."""
    capacity: Annotated[int | Literal["worst"], BeforeValidator(_rows_or_worst)] = "worst"
    """Most rows that a rank can receive: enough for the worst routing (worst), or a number."""
    wire: Annotated[WireSection, BeforeValidator(_name_or_mapping)] = WireSection()
    """Types of the rows on the link. A plain name sets dispatch."""
    output: Literal["raw", "dequantised"] = "dequantised"
    """Result of dispatch for float8_e4m3 rows: values and scales (raw), or rows in the shape's dtype (dequantised)."""


class StepsSection(Section):
    warmup: int = Field(default=5, ge=0, le=1_000_000)
    """Steps before the clock starts."""
    count: int = Field(default=50, ge=1, le=1_000_000)
    """Timed steps."""
    graph: Annotated[Literal["auto", True, False], BeforeValidator(_auto_or_boolean)] = "auto"
    """Whether steps are replayed from a CUDA graph. auto means yes if possible. CPU ranks have no graphs."""
    verify: bool = True
    """Whether the first, the last and every 50th step are checked, outside the timing."""
    trace: bool = False
    """Whether the kernels of `fused` record when their blocks reach each point. Extra calls after the steps record this
    for the lines of dispatch and combine. The steps become a little slower."""


class P2pSection(Section):
    protocol: Literal["put", "get"] = "put"
    """Which rank moves the bytes: the source (put) or the destination (get)."""
    transports: Annotated[
        tuple[Literal["auto", "copy_engine", "tma", "collective", "host"], ...], Field(strict=False, min_length=1)
    ] = ("auto",)
    """Transports to measure. GPU ranks: copy_engine, tma or collective (NCCL). CPU ranks: host. auto fits either."""
    bytes: Annotated[tuple[Size, ...], Field(strict=False, min_length=1)] = (4096, 1048576)
    """Message sizes, such as 4KiB."""
    pattern: Literal["pairs", "all_to_all"] = "pairs"
    """One pair of ranks after the other (pairs), or all ranks at once (all_to_all)."""
    pairs: Annotated[Literal["all"] | tuple[tuple[int, int], ...], BeforeValidator(_all_or_pairs)] = "all"
    """Pairs to measure with pattern pairs, as [source, destination]. If all links are alike, one pair is enough."""
    sms: Annotated[int | Literal["auto"], BeforeValidator(_auto_or_count)] = "auto"
    """SMs of a GPU that all tma copies of a rank may take together. The other transports have no such limit."""


PointwiseOp = Literal[
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "swiglu",
    "swiglu_experts",
    "pointwise",
    "rms_norm_fp8",
    "add_rms_norm_fp8",
    "layer_norm_fp8",
    "swiglu_fp8",
    "rms_norm_backward",
    "add_rms_norm_backward",
    "layer_norm_backward",
    "swiglu_backward",
]


class PointwiseSection(Section):
    op: PointwiseOp = "rms_norm"
    """The operation over tokens x hidden elements; of swiglu, tokens x 2 ffn. In swiglu_experts the tokens fill a
    quarter of the rows, and offsets on the device tell how many. pointwise is silu(a) * b + c with a row vector c."""
    stages: Annotated[int | Literal["auto"], BeforeValidator(_auto_or_stages)] = "auto"
    """Stages of a block's pipeline in shared memory: as many as are best (auto), or a number."""
    sms: Annotated[int | Literal["auto"], BeforeValidator(_auto_or_count)] = "auto"
    """SMs of a GPU that raymoe's kernels may take: all (auto), or a number. The other systems take all."""


class OverlapSection(Section):
    rows: int = Field(default=6144, ge=1, le=2**24)
    """Rows of the matrix product beside the exchange: rows x hidden times hidden x columns, in the shape's dtype."""
    columns: int = Field(default=4096, ge=1, le=2**20)
    """Columns of that product. With hidden 7168 in bfloat16 the default takes about as long as a dispatch of 4096
    tokens a rank between four H200."""
