"""Defines a job, its cases, and which of its keys mean something."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from raymoe.config.sections import (
    ABILITIES,
    MOE,
    ROUTERS,
    ExchangeSection,
    LayerSection,
    OverlapSection,
    P2pSection,
    PointwiseSection,
    ProductsSection,
    RoutingSection,
    Section,
    ShapeSection,
    StepsSection,
    TrainSection,
    WorldSection,
)
from raymoe.config.yaml_tree import Scalar
from raymoe.errors import ConfigError

# The combinations of a matrix, as plain values.

MAX_CASES = 1000


def size(matrix: Mapping[str, Sequence[Scalar]]) -> int:
    """Count the cases of a matrix."""
    return math.prod(len(values) for values in matrix.values())


def combinations(base: dict[str, Any], matrix: Mapping[str, Sequence[Scalar]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and values of every case: `base`, with one value for each key of the matrix.

    >>> base = {"shape": {"tokens": 1, "topk": 2}, "workload": "layer"}
    >>> for name, plain in combinations(base, {"workload": ["layer"], "shape.tokens": [128, 512]}):
    ...     print(name, plain["shape"])
    workload=layer,tokens=128 {'tokens': 128, 'topk': 2}
    workload=layer,tokens=512 {'tokens': 512, 'topk': 2}
    """
    short = [key.rpartition(".")[2] for key in matrix]
    labels = [key if short.count(leaf) > 1 else leaf for key, leaf in zip(matrix, short, strict=True)]
    for values in itertools.product(*matrix.values()):
        plain = base
        for key, value in zip(matrix, values, strict=True):
            plain = put(plain, key, value)
        yield ",".join(f"{label}={yaml_text(value)}" for label, value in zip(labels, values, strict=True)), plain


def put(plain: dict[str, Any], dotted: str, value: object) -> dict[str, Any]:
    """Copy `plain` with one key changed. Sections without that key are shared with the copy."""
    first, _, rest = dotted.partition(".")
    return {**plain, first: put(plain.get(first) or {}, rest, value) if rest else value}


def yaml_text(value: Scalar) -> str:
    """Write a value as YAML does."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# Keys that mean something only if another key has a certain value.


@dataclass(frozen=True)
class Meaning:
    """`key` means something only if `decider` is one of `values`.

    A config may hold sections of other workloads, so that it can be the parent of several configs. A `strict` key
    without meaning is refused: a user who gives uniform routing an alpha expects it to work.
    """

    key: str
    decider: str
    values: tuple[str, ...]
    strict: bool = False


MEANINGS = (
    Meaning("shape", "workload", (*MOE, "pointwise", "products")),
    Meaning("shape.tokens", "workload", (*MOE, "pointwise")),
    Meaning("shape.dtype", "workload", (*MOE, "pointwise")),
    Meaning("shape.experts", "workload", (*MOE, "products")),
    Meaning("shape.topk", "workload", MOE),
    Meaning("routing", "workload", MOE),
    Meaning("exchange", "workload", MOE),
    Meaning("p2p", "workload", ("p2p",)),
    Meaning("overlap", "workload", ("overlap",)),
    Meaning("pointwise", "workload", ("pointwise",)),
    Meaning("products", "workload", ("products",)),
    Meaning("layer", "workload", ("layer",)),
    Meaning("train", "workload", ("train",)),
    Meaning("layer.router.groups", "layer.router.kind", ROUTERS, strict=True),
    Meaning("layer.router.topk_groups", "layer.router.kind", ROUTERS, strict=True),
    Meaning("layer.router.scale", "layer.router.kind", ROUTERS, strict=True),
    Meaning("shape.ffn", "workload", ("layer", "pointwise", "products", "train")),
    Meaning("routing.alpha", "routing.kind", ("zipf",), strict=True),
    Meaning("routing.share", "routing.kind", ("hot",), strict=True),
    Meaning("routing.file", "routing.kind", ("trace",), strict=True),
    Meaning("p2p.pairs", "p2p.pattern", ("pairs",), strict=True),
    Meaning("exchange.output", "exchange.wire.dispatch", ("float8_e4m3",), strict=True),
    Meaning("exchange.quantised", "exchange.wire.dispatch", ("float8_e4m3",), strict=True),
    Meaning("exchange.quantised", "workload", ("exchange",), strict=True),
    Meaning("steps.trace", "workload", ("exchange",), strict=True),
    Meaning("steps.trace", "world.device", ("auto", "cuda"), strict=True),
    Meaning("steps.trace", "exchange.backend", ("auto", "fused"), strict=True),
)


def decider_values(plain: dict[str, Any], meaning: Meaning) -> list[Any]:
    """List the values that the decider takes in all cases."""
    swept = plain.get("matrix", {}).get(meaning.decider)
    return list(swept) if swept else [find(plain, meaning.decider)]


def meaningful(plain: dict[str, Any]) -> dict[str, Any]:
    """Copy a job's values without empty mappings and without the keys that mean nothing in any case.

    >>> meaningful({"workload": "layer", "routing": {"kind": "hot", "alpha": 1.0, "share": 0.5}, "p2p": {}})
    {'workload': 'layer', 'routing': {'kind': 'hot', 'share': 0.5}}
    """
    for meaning in MEANINGS:
        if not set(decider_values(plain, meaning)) & set(meaning.values):
            plain = without(plain, meaning.key.split("."))
    return _pruned(plain)


def _pruned(plain: dict[str, Any]) -> dict[str, Any]:
    pruned = {key: _pruned(value) if isinstance(value, dict) else value for key, value in plain.items()}
    return {key: value for key, value in pruned.items() if value != {}}


def find(plain: dict[str, Any], dotted: str) -> Any:
    """Return the value of a dotted key, or None if it is missing."""
    value: Any = plain
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def without(plain: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Copy `plain` without one key. Sections without that key are shared; a path into a list removes the whole list.

    >>> without({"p2p": {"bytes": [1, "x"], "pattern": "pairs"}}, ["p2p", "bytes", "1"])
    {'p2p': {'pattern': 'pairs'}}
    """
    first, *rest = path
    section = plain.get(first)
    if rest and isinstance(section, dict):
        return {**plain, first: without(section, rest)}
    return {key: value for key, value in plain.items() if key != first}


class Job(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", examples=["my-exchange"])
    """1 to 64 letters, digits, dots, dashes and underscores, with which run directories begin. Default: the
    file's name."""
    workload: Literal["p2p", "exchange", "overlap", "pointwise", "products", "layer", "train"] = Field(
        examples=["exchange"]
    )
    """A step: messages between ranks (p2p), dispatch and combine (exchange), these beside a matrix product (overlap), a
    norm or activation (pointwise), products of experts (products), an MoE layer (layer), or training (train)."""
    world: WorldSection = WorldSection()
    shape: ShapeSection = ShapeSection()
    routing: RoutingSection = RoutingSection()
    exchange: ExchangeSection = ExchangeSection()
    steps: StepsSection = StepsSection()
    p2p: P2pSection = P2pSection()
    overlap: OverlapSection = OverlapSection()
    pointwise: PointwiseSection = PointwiseSection()
    products: ProductsSection = ProductsSection()
    layer: LayerSection = LayerSection()
    train: TrainSection = TrainSection()
    matrix: dict[str, Annotated[tuple[Scalar, ...], Field(strict=False, min_length=1)]] = Field(
        default_factory=dict, examples=[{"exchange.backend": ["host", "collective"], "shape.tokens": [128, 512]}]
    )
    """Lists of values. Every combination is a case, at most 1000. Keys of world and keys that take a list cannot
    vary."""

    def resolved(self) -> dict[str, Any]:
        """Return every key that means something in this job, as plain values. `job_from_resolved` reads them back."""
        return meaningful(self.model_dump(mode="json", exclude_none=True))

    def cases(self) -> tuple[Case, ...]:
        """Return one case for each combination of the matrix, in file order; the last key changes fastest."""
        if not self.matrix:
            return (Case("default", 0, self),)
        base = self.model_dump(exclude={"matrix"})
        named = combinations(base, self.matrix)
        return tuple(Case(name, i, Job.model_validate(meaningful(plain))) for i, (name, plain) in enumerate(named))


@dataclass(frozen=True)
class Case:
    """One combination of the matrix. `job` has its values and no matrix."""

    name: str
    index: int
    job: Job


def kind_of_ranks(job: Job) -> str | None:
    """Decide from a job alone whether its ranks are on `cuda` or `cpu`; None if either is possible.

    >>> exchange = {"name": "x", "workload": "exchange"}
    >>> kind_of_ranks(Job(**exchange, matrix={"exchange.backend": ("host", "collective")}))
    'cpu'
    >>> kind_of_ranks(Job(**exchange, exchange={"backend": "fused"})), kind_of_ranks(Job(**exchange))
    ('cuda', None)
    """
    if job.world.device != "auto":
        return job.world.device
    jobs = [case.job for case in job.cases()] if "workload" in job.matrix else [job]
    kinds = {_needed_kind(alone) for alone in jobs} - {None}
    if len(kinds) > 1:
        raise ConfigError("matrix.workload has cases for GPU ranks and cases for CPU ranks; run them apart")
    layers = any(alone.workload in ("layer", "train") for alone in jobs)
    return kinds.pop() if kinds else "cpu" if layers else None


def _needed_kind(job: Job) -> str | None:
    """Return the kind of ranks that a workload and its backends need; None if either serves."""
    if job.workload == "overlap":
        return "cuda"
    if job.workload == "p2p" and "host" in job.p2p.transports:
        return "cpu"
    return _kind_of_backends(job) if job.workload in ("exchange", "layer", "train") else None


def _kind_of_backends(job: Job) -> str | None:
    """Return the kind of ranks that the backends of all cases need. Raises if one needs GPUs and another CPUs."""
    backends: dict[str | None, str] = {}  # the first backend that needs each kind
    for case in job.cases():
        backends.setdefault(ABILITIES[case.job.exchange.backend].only_device, case.job.exchange.backend)
    if "cuda" in backends and "cpu" in backends:
        raise ConfigError(
            f"exchange.backend needs GPU ranks in one case ({backends['cuda']}) and CPU ranks in another "
            f"({backends['cpu']}), but all cases run in one gang; start a run for each"
        )
    return "cuda" if "cuda" in backends else "cpu" if "cpu" in backends else None
