"""Defines the sections of a job: every key with its type, bounds and default."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from raymoe.exchange.abilities import BACKENDS, Abilities
from raymoe.exchange.spec import (
    MOST_ALIGNMENT,
    MOST_EXPERTS,
    MOST_FACTOR,
    MOST_HIDDEN,
    MOST_ROWS,
    MOST_TOKENS,
    MOST_TOPK,
    is_capacity,
)

# Sizes with units.

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
OtherSystem = Literal["nvshmem", "deepep_v2", "nccl_ep", "nccl_ep_ll", "flashinfer"]

# Groups of the values that a key takes.

MOE = ("exchange", "overlap", "layer", "train")
"""The workloads with an exchange."""
SPANNING = ("exchange", "layer")
"""The workloads whose ranks can be in several domains."""
ROUTERS = ("softmax", "sigmoid", "chosen")
"""The kinds of a layer's own router."""
OTHER_SYSTEMS: frozenset[str] = frozenset(get_args(OtherSystem))
"""No rule refuses a case that such a system cannot run. Its result line gives the reason, and the run continues."""
ABILITIES = BACKENDS | {
    "row_push": Abilities(("cuda",), float8=True),
    "nccl_bare": Abilities(("cuda",)),
    **dict.fromkeys(OTHER_SYSTEMS, Abilities(("cuda",), float8=True)),
}
"""The abilities of each value of `exchange.backend`: the exchanges, and what serves comparison."""


class Section(BaseModel):
    """Base of all sections: strict types, frozen, and unknown keys are refused."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def _auto_or_boolean(value: Any) -> Any:
    if value == "auto" or value is True or value is False:
        return value
    raise PydanticCustomError("graph", "not one of auto, true or false")


def _recomputed_part(value: Any) -> Any:
    if value is True or value is False:
        return "all" if value else "nothing"
    if value in ("nothing", "activation", "all"):
        return value
    raise PydanticCustomError("recompute", "not one of nothing, activation, all, true or false")


def _rows_or_worst(value: Any) -> Any:
    if value == "worst" or is_capacity(value):
        return value
    raise PydanticCustomError(
        "capacity", "must be worst, or a number of rows from 1 to 2147483647, or a factor such as 1.25"
    )


def _auto_or_count(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= 1024):
        return value
    raise PydanticCustomError("sms", "must be auto, or a number from 1 to 1024")


def _auto_or_tokens(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= MOST_TOKENS):
        return value
    raise PydanticCustomError("chunk", f"must be auto, or a number of tokens from 1 to {MOST_TOKENS}")


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
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2**40}, {"type": "string", "pattern": SIZE_PATTERN}]}
    ),
]
# The validators check these bounds too, and explain them. Here they are for the schema.
Count = Annotated[int, Field(ge=1, le=1024)]
Rows = Annotated[int, Field(ge=1, le=MOST_ROWS)]
Factor = Annotated[float, Field(gt=0, le=MOST_FACTOR)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Stages = Annotated[int, Field(ge=1, le=64)]


class WorldSection(Section):
    """The ranks, and how long they wait."""

    ranks: int = Field(default=4, ge=1, le=1024, examples=[8])
    """R, the number of ranks. Each is a Ray actor; on GPUs each has a GPU of its own."""
    domain: Annotated[Count | Literal["auto"], BeforeValidator(_auto_or_count)] = Field(default="auto", examples=[8])
    """Ranks in a domain, on one node; a network connects domains. auto: one domain if a node can hold all ranks, else
    the fewest equal ones. A number divides world.ranks; if too few nodes can hold a domain, all are on one node and
    pretend to be apart. Several domains need workload exchange or layer."""
    device: Literal["auto", "cuda", "cpu"] = Field(default="auto", examples=["cpu"])
    """auto: cuda if the cluster has GPUs, even too few, and the workload can use them; for workload layer, cpu unless
    the backend needs GPUs."""
    cpus: float = Field(default=0.5, ge=0.001, le=1024, examples=[1])
    """Ray CPUs of a rank, for placement only."""
    share_gpu: bool = Field(default=False, examples=[True])
    """Whether all ranks share one GPU, to test results, not time. Needs device cuda."""
    restarts: int = Field(default=1, ge=0, le=100, examples=[0])
    """Restarts of the gang after a lost rank. Finished cases are kept."""
    placement_timeout_s: float = Field(default=60.0, gt=0, le=86400, examples=[3600])
    """Seconds to wait for free resources; then exit code 3."""
    wait_timeout_s: float = Field(default=30.0, gt=0, le=86400, examples=[120])
    """Seconds that a rank waits for a peer; then exit code 5."""

    @property
    def domains(self) -> int:
        """The number of domains that are asked for. It is 1 for auto: only the cluster shows if more are needed.

        >>> WorldSection(ranks=8, domain=2).domains, WorldSection(ranks=8).domains
        (4, 1)
        """
        return 1 if self.domain == "auto" else max(1, self.ranks // int(self.domain))


class ShapeSection(Section):
    """The sizes of tokens and experts."""

    tokens: int = Field(default=512, ge=1, le=MOST_TOKENS, examples=[4096])
    """T, the tokens of a rank in a step; with routing.ragged the most."""
    hidden: int = Field(default=1024, ge=1, le=MOST_HIDDEN, examples=[7168])
    """H, the elements of a row, whose bytes are a multiple of 16."""
    experts: int = Field(default=32, ge=1, le=MOST_EXPERTS, examples=[256])
    """E, all experts. world.ranks divides it, unless exchange.slots is given."""
    topk: int = Field(default=4, ge=1, le=MOST_TOPK, examples=[8])
    """K, the experts of a token: at most shape.experts."""
    ffn: int = Field(default=512, ge=1, le=2**20, examples=[2048])
    """Inner size of an expert."""
    dtype: Dtype = Field(default="bfloat16", examples=["float16"])
    """Type of rows and of experts' weights."""


class RoutingSection(Section):
    """The choice of experts, the same for all backends."""

    kind: Literal["uniform", "zipf", "hot", "trace"] = Field(default="uniform", examples=["zipf"])
    """Equal chances, a Zipf law, one hot expert, or a recorded trace."""
    seed: int = Field(default=0, ge=0, lt=2**63, examples=[17])
    """Seed of routing, tokens and weights."""
    alpha: float = Field(default=1.0, gt=0, le=100, examples=[1.2])
    """The i-th most popular expert, from 0, is chosen in proportion to (i + 1) ^ -alpha."""
    share: float = Field(default=0.5, ge=0, le=1, examples=[0.9])
    """Share of tokens whose first choice is the hot expert."""
    file: str | None = Field(default=None, min_length=1, examples=["ids.npy"])
    """File of expert ids, relative to the config: integers [tokens, topk] or [steps, tokens, topk], of one rank or of
    all. `raymoe.moe.RoutingTrace` or numpy.save writes it."""
    masked: float = Field(default=0.0, ge=0, le=1, examples=[0.1])
    """Share of the ids that are -1, no expert."""
    ragged: bool = Field(default=False, examples=[True])
    """Whether ranks hold different numbers of tokens, from none to shape.tokens."""


class WireSection(Section):
    """Types of the rows on the link."""

    dispatch: DispatchWire | None = Field(default=None, examples=["float8_e4m3"])
    """Type of rows to the experts, by default shape.dtype; float8_e4m3 has a scale for 128 values."""
    combine: Dtype | None = Field(default=None, examples=["float32"])
    """Type of rows on the way back, by default shape.dtype, to which each rank rounds its float32 sums."""


class NetSection(Section):
    """Rows between domains of GPU ranks."""

    chunk: Annotated[Tokens | Literal["auto"], BeforeValidator(_auto_or_tokens)] = Field(default="auto", examples=[512])
    """Tokens that cross the network at a time, beside the exchange inside a domain. auto: at most 8 chunks of at least
    4 MiB; one where that exchange takes all rows at once, or sms leaves NCCL no SM."""


class ExchangeSection(Section):
    """Dispatch and combine."""

    backend: Literal[
        "auto", "fused", "staged", "collective", "allgather", "host", "row_push", "nccl_bare", OtherSystem
    ] = Field(default="auto", examples=["collective"])
    """GPU ranks: one kernel each way (fused) or several (staged). CPU ranks: shared memory (host). Both: NCCL or Gloo
    (collective, allgather). For comparison on GPUs: rows to known slots (row_push), NCCL's calls alone (nccl_bare),
    torch's all_to_all_vdev_2d (nvshmem), and libraries to install (deepep_v2, nccl_ep, nccl_ep_ll, flashinfer)."""
    transport: Literal["auto", "copy_engine"] = Field(default="auto", examples=["copy_engine"])
    """copy_engine (staged only) sends all rows to every rank and occupies no SM."""
    layout: Literal["expert", "rank", "token"] = Field(default="expert", examples=["rank"])
    """Received rows: by expert, as they arrive from each rank, or one for each token and rank (token; workload exchange
    only)."""
    alignment: int = Field(default=16, ge=1, le=MOST_ALIGNMENT, examples=[128])
    """Each expert's rows start at a multiple of this many."""
    padding: Literal["any", "zero"] = Field(default="any", examples=["zero"])
    """Gaps between experts: unspecified, or zeros, which gradients of weights need."""
    slots: int | None = Field(default=None, ge=1, le=MOST_EXPERTS, examples=[36])
    """Expert slots of a rank (workload exchange only). A plan for the case's load fills them with experts, and copies
    of the busiest. Results have the loads of slots."""
    sms: Annotated[Count | Literal["auto"], BeforeValidator(_auto_or_count)] = Field(default="auto", examples=[48])
    """SMs that the exchange's kernels may take; auto: all. NCCL chooses for collective and allgather."""
    capacity: Annotated[Rows | Factor | Literal["worst"], BeforeValidator(_rows_or_worst)] = Field(
        default="worst", examples=[8192, 1.25]
    )
    """C, the most rows that a rank can receive: those of any routing (worst), a number, or with a decimal point a
    factor of the mean, tokens x topk (layout token: x the smaller of topk and ranks). If more arrive, all ranks refuse
    the step: exit code 7."""
    wire: Annotated[WireSection, BeforeValidator(_name_or_mapping)] = Field(
        default=WireSection(), examples=["float8_e4m3"]
    )
    """A plain name sets dispatch."""
    output: Literal["raw", "dequantised"] = Field(default="dequantised", examples=["raw"])
    """Result of dispatch: values and scales (raw), or rows in shape.dtype."""
    quantised: bool = Field(default=False, examples=[True])
    """Whether dispatch takes rows as 8-bit floats with scales, as a norm can give them, and quantises none."""
    net: NetSection = Field(default=NetSection(), examples=[{"chunk": 512}])
    """The network between domains of GPU ranks."""


class StepsSection(Section):
    """The steps of a case."""

    warmup: int = Field(default=5, ge=0, le=1_000_000, examples=[20])
    """Steps that are not timed."""
    count: int = Field(default=50, ge=1, le=1_000_000, examples=[200])
    """Timed steps. A sample is the time of the slowest rank."""
    graph: Annotated[Literal["auto", True, False], BeforeValidator(_auto_or_boolean)] = Field(
        default="auto", examples=[False]
    )
    """Whether a CUDA graph replays the steps. auto: where possible; true: else an error."""
    verify: bool = Field(default=True, examples=[False])
    """Whether an oracle checks the first, the last and every 50th step, untimed. A wrong result: exit code 6."""
    trace: bool = Field(default=False, examples=[True])
    """Whether kernels record when blocks reach each point, which takes a little time."""


class P2pSection(Section):
    """Copies between two ranks."""

    protocol: Literal["put", "get"] = Field(default="put", examples=["get"])
    """The source (put) or the destination (get) moves the bytes."""
    transports: Annotated[
        tuple[Literal["auto", "copy_engine", "tma", "collective", "host"], ...], Field(strict=False, min_length=1)
    ] = Field(default=("auto",), examples=[["copy_engine", "tma"]])
    """GPU ranks: copy_engine, tma or collective (NCCL). CPU ranks: host."""
    bytes: Annotated[tuple[Size, ...], Field(strict=False, min_length=1)] = Field(
        default=(4096, 1048576), examples=[["4KiB", "256MiB"]]
    )
    """Message sizes to measure."""
    pattern: Literal["pairs", "all_to_all"] = Field(default="pairs", examples=["all_to_all"])
    """Pairs of ranks one after the other, or all ranks at once."""
    pairs: Annotated[Literal["all"] | tuple[tuple[int, int], ...], BeforeValidator(_all_or_pairs)] = Field(
        default="all", examples=[[[0, 1], [1, 0]]]
    )
    """Pairs of [source, destination]; one is enough if links are alike."""
    sms: Annotated[Count | Literal["auto"], BeforeValidator(_auto_or_count)] = Field(default="auto", examples=[16])
    """SMs of all tma copies of a rank together."""


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
    """Norms, SwiGLU and a pointwise expression over rows."""

    op: PointwiseOp = Field(default="rms_norm", examples=["layer_norm"])
    """The operation over tokens x hidden elements; swiglu: tokens x 2 ffn. In swiglu_experts tokens fill a quarter of
    the rows. pointwise is silu(a) * b + c with a row vector c."""
    stages: Annotated[Stages | Literal["auto"], BeforeValidator(_auto_or_stages)] = Field(default="auto", examples=[4])
    """Stages of a block's pipeline in shared memory."""
    sms: Annotated[Count | Literal["auto"], BeforeValidator(_auto_or_count)] = Field(default="auto", examples=[48])
    """SMs that raymoe's kernels may take; auto: all."""


class ProductsSection(Section):
    """The products of experts: gate and up, the same with SwiGLU, and down."""

    rows: int = Field(default=256, ge=1, le=2**20, examples=[64])
    """Rows of an expert on average; with kind hot, those of the hot one."""
    dtype: Dtype = Field(default="bfloat16", examples=["float16"])
    """Type of rows and weights."""
    kind: Literal["equal", "uniform", "zipf", "hot"] = Field(default="uniform", examples=["hot"])
    """Rows of the experts: as many for each (equal), drawn with equal chances (uniform) or in proportion to 1 / i
    (zipf), or all for one and 4 for each other (hot)."""


class RouterSection(Section):
    """The router of a layer."""

    kind: Literal["given", "softmax", "sigmoid", "chosen"] = Field(default="given", examples=["sigmoid"])
    """given: no router and no norm, but the section routing. Else softmax over all experts (Mixtral, Qwen3), sigmoid of
    each (DeepSeek-V3), or softmax over the chosen (gpt-oss)."""
    groups: int = Field(default=1, ge=1, le=1024, examples=[8])
    """Groups of experts. A group's score is the sum of its two best."""
    topk_groups: int = Field(default=1, ge=1, le=1024, examples=[4])
    """The best groups, whose experts compete."""
    scale: float = Field(default=1.0, gt=0, le=1000, examples=[2.5])
    """Factor of the weights, which sum to one before it."""


class LayerSection(Section):
    """A whole layer: norm, router, dispatch, experts, combine, shared expert, and x added."""

    backward: bool = Field(default=False, examples=[True])
    """Whether a step also computes gradients of tokens and weights."""
    recompute: Annotated[Literal["nothing", "activation", "all", True, False], BeforeValidator(_recomputed_part)] = (
        Field(default="nothing", examples=["activation"])
    )
    """Forward work that the backward pass repeats: nothing (false), the experts' activation, or all (true)."""
    shared: int = Field(default=0, ge=0, le=2**20, examples=[2048])
    """Inner size of the shared expert; 0: none."""
    router: RouterSection = Field(default=RouterSection(), examples=[{"kind": "sigmoid"}])
    """The router of the layer, or none."""
    experts: Literal["swiglu", "gpt_oss"] = Field(default="swiglu", examples=["gpt_oss"])
    """SwiGLU, or gpt-oss, which clamps it and adds biases."""
    experts_dtype: Literal["float8_e4m3"] | None = Field(default=None, examples=["float8_e4m3"])
    """Format of the weights of all experts, also the shared one; default: shape.dtype. With float8_e4m3 weights and
    rows, also between GPUs, are 8-bit values with scales, and there is no backward pass."""
    microbatches: int = Field(default=1, ge=1, le=16, examples=[2])
    """Parts of a rank's tokens. The exchange of one, on exchange.sms, runs beside the experts of another."""
    overlap: Literal["none", "combine"] = Field(default="none", examples=["combine"])
    """Exchange beside the products on GPUs: combine sends the first columns of results while others are computed."""


class TrainSection(Section):
    """A small model in training, with checkpoints, beside an unsharded one."""

    layers: int = Field(default=2, ge=1, le=64, examples=[4])
    """Layers of the model: RMSNorm, sigmoid router, experts, and x added."""
    oracle: int = Field(default=20, ge=0, le=100_000, examples=[50])
    """First steps in which each rank also trains the unsharded model and compares losses. A wrong loss: exit code 6."""
    checkpoint_every: int = Field(default=50, ge=1, le=1_000_000, examples=[200])
    """Steps between checkpoints. After a lost rank all ranks go on from the last one."""
    folder: str | None = Field(default=None, min_length=1, examples=["/shared/soak"])
    """Folder of the checkpoints, which all ranks reach; default: a temporary one of the node. It is removed after the
    last step, and kept after a failure for --resume."""


class OverlapSection(Section):
    """The matrix product beside an exchange."""

    rows: int = Field(default=6144, ge=1, le=2**24, examples=[12288])
    """Rows of the product: rows x hidden times hidden x columns, in shape.dtype."""
    columns: int = Field(default=4096, ge=1, le=2**20, examples=[2048])
    """Columns of the product."""
