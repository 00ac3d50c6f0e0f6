"""Choose the backend of an exchange, and check that all ranks asked for the same and can run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from raymoe.errors import ConfigError
from raymoe.exchange.abilities import BACKENDS, backends_of
from raymoe.exchange.backend import Backend
from raymoe.exchange.domains.chunks import chunk_of, sms_beside, too_many_sms
from raymoe.exchange.nccl.rounds import MOST_EXPERTS, MOST_RANKS, SPREAD_VECTORS
from raymoe.exchange.peer.dispatch import MAX_DONE, RANK_BITS
from raymoe.exchange.spec import ROW_BYTES, ExchangeSpec
from raymoe.fp8 import FP8
from raymoe.memory.world import World

if TYPE_CHECKING:
    from raymoe.exchange.cpu.cpu_backend import Carrier
    from raymoe.exchange.peer.workspace import Workspace

AUTO = {"cpu": ("host",), "cuda": ("fused", "collective")}
"""The backends that `auto` tries, in this order, where the spec allows all of them."""
AUTO_BETWEEN_DOMAINS = ("fused", "allgather")
"""The backends that `auto` tries on GPU ranks in several domains."""
ROUNDS_MOST = {"ranks": MOST_RANKS, "experts a rank": MOST_EXPERTS, "pieces of rows": 2**31 - 1}
SPREAD_BYTES = 16 * SPREAD_VECTORS // 2  # the smallest unit of work of a row
FUSED_CAPABILITY = (9, 0)
FUSED_MOST = {"hidden": 16384, "topk": 16, "experts": 1024, "ranks": 8, "tokens times topk": 1 << RANK_BITS}


@dataclass(frozen=True)
class ExchangeRequest:
    """The caller's choices besides the spec."""

    backend: str
    workspace: Workspace | None
    sms: int | str
    chunk: int | str = "auto"


@dataclass(frozen=True)
class RankFacts:
    """The facts of a rank's GPU on which the choice depends. The defaults are for a CPU rank."""

    gpu: str = ""
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    nccl: bool = False
    sms: int = 0
    bounded: bool = False
    """Whether NCCL's SMs can be limited. Known only between domains."""


@dataclass(frozen=True)
class Choice:
    """The backend and its settings, the same on all ranks."""

    backend: str
    sms: int = 0
    """SMs that the kernels of `fused` and `staged` may take on each GPU."""
    lines: bool = False
    """Whether `fused` takes the LL path, which carries rows in lines (raymoe/exchange/peer/fused_ll.py)."""
    chunk: int = 0
    """Tokens of a chunk in which rows cross between domains; 0: all at once."""
    parts: tuple[Choice, ...] = ()
    """With layout `token`: the choices of its two parts (`ExchangeSpec.parts`)."""

    def chunks(self, tokens: int) -> int:
        """The number of chunks that hold `tokens` tokens."""
        return -(-tokens // self.chunk) if self.chunk else 1


def choose(world: World, spec: ExchangeSpec, request: ExchangeRequest) -> Choice:
    """Choose the backend and the SMs that it takes. Collective: all ranks get the same result, or all raise."""
    problem = _request_error(world, spec, request)
    choices = {} if problem else asdict(spec)
    choices |= {"backend": request.backend, "sms": request.sms, "workspace": request.workspace is not None}
    choices |= {"chunk": request.chunk}
    facts: list[RankFacts] = []
    for rank, other in enumerate(world.swap((choices, problem, _facts(world)), "exchange: spec")):
        assert isinstance(other, tuple)
        theirs, their_problem, their_facts = other
        facts.append(their_facts)
        if problem is None and their_problem is not None:
            raise ConfigError(f"rank {rank}: {their_problem}")
        for key, value in choices.items():
            if problem is None and theirs[key] != value:
                here = f"{value!r} on rank {world.rank}"
                raise ConfigError(f"{key} is {theirs[key]!r} on rank {rank} and {here}; an exchange has one spec")
    if problem is not None:
        raise problem
    spec, device = spec.over_slots(world.size), world.device.type
    names = _names_to_try(world, spec) if request.backend == "auto" else (request.backend,)
    between = device == "cuda" and world.domains > 1
    make = _choose_between_domains if between else _make_choice
    parts, reasons = spec.parts(world.size), []
    for name in names:
        why = [
            why_not_between_domains(name, part, facts, world.domains) if between else why_not(name, device, part, facts)
            for part in parts
        ]
        reason = next(filter(None, why), None)
        if reason is None:
            made = tuple(make(name, world, part, request, facts) for part in parts)
            return replace(made[0], parts=made) if spec.by_token else made[0]
        reasons.append(reason)
    raise ConfigError(f"backend {request.backend} asked for and {reasons[0]}")


def _make_choice(
    name: str, world: World, spec: ExchangeSpec, request: ExchangeRequest, facts: Sequence[RankFacts]
) -> Choice:
    """Turn `sms` into a number, and decide how `fused` carries rows."""
    if not BACKENDS[name].hopper_kernels:
        return Choice(name)
    from raymoe.exchange.peer.workspace import Links, is_ll

    limit = None if request.sms == "auto" else int(request.sms)
    most = min(MAX_DONE, *(gpu.sms for gpu in facts))
    lines = name == "fused" and is_ll(spec, limit) and world.shared(Links).lines
    return Choice(name, most if limit is None else min(limit, most), lines)


def _choose_between_domains(
    name: str, world: World, spec: ExchangeSpec, request: ExchangeRequest, facts: Sequence[RankFacts]
) -> Choice:
    """Choose the settings of the exchange inside, and the chunks in which rows cross."""
    inside = _make_choice(name, world.domain, spec.inside(world.domains), request, facts)
    return in_chunks(inside, spec, request, facts)


def in_chunks(inside: Choice, spec: ExchangeSpec, request: ExchangeRequest, facts: Sequence[RankFacts]) -> Choice:
    """Add the chunks in which rows cross between domains to the choice inside, and limit its SMs to leave some free.

    A number of tokens as `chunk` asks for flags and slots where `fused` would carry rows in lines.
    """
    reasons = []
    if not BACKENDS[inside.backend].chunks:
        reasons.append(f"backend {inside.backend} waits for all rows: take fused, or leave chunk out")
    if inside.lines and request.chunk == "auto":
        reasons.append("few tokens cross at once")
    if without := [rank for rank, gpu in enumerate(facts) if not gpu.bounded]:
        reasons.append(
            f"the NCCL of rank {without[0]} is older than 2.17 and takes SMs as it likes: take a later one, or leave "
            "chunk out"
        )
    limit, most = None if request.sms == "auto" else int(request.sms), min(gpu.sms for gpu in facts)
    if reason := too_many_sms(limit, most):
        reasons.append(reason)
    chunk = chunk_of(spec, request.chunk, reasons)
    if not chunk:
        return inside
    return replace(inside, sms=min(inside.sms, sms_beside(limit, most)), lines=False, chunk=chunk)


def _names_to_try(world: World, spec: ExchangeSpec) -> tuple[str, ...]:
    """The backends that `auto` tries, in this order."""
    device = world.device.type
    if spec.by_copy_engine and device == "cuda":
        return ("staged",)
    return AUTO_BETWEEN_DOMAINS if device == "cuda" and world.domains > 1 else AUTO[device]


def why_not(name: str, device: str, spec: ExchangeSpec, facts: Sequence[RankFacts]) -> str | None:
    """Say why this backend cannot serve these ranks, and what to do; None where it can.

    >>> spec = ExchangeSpec(tokens=8, hidden=64, experts=4, topk=2)
    >>> why_not("collective", "cuda", spec, [RankFacts(gpu="a", nccl=True), RankFacts(gpu="a", nccl=True)])
    'ranks 0 and 1 share GPU a; NCCL needs one GPU a rank: take fused or staged, or leave share_gpu out'
    >>> why_not("fused", "cuda", spec, [RankFacts("a", "NVIDIA A100", (8, 0))])
    'NVIDIA A100 of rank 0 has compute capability 8.0; fused needs 9.0 or more: take collective'
    >>> why_not("host", "cpu", ExchangeSpec(8, 64, 4, 2, wire="float8_e4m3"), [RankFacts()])
    'rows that cross as float8_e4m3; only fused and staged, on GPUs, carry them so: leave wire out'
    >>> why_not("fused", "cuda", ExchangeSpec(8, 64, 4, 2, transport="copy_engine"), [RankFacts()])
    'transport copy_engine; only staged, on GPUs, has it: take staged, or leave transport out'
    """
    if spec.by_copy_engine and not BACKENDS[name].copy_engine:
        return f"transport {spec.transport}; only staged, on GPUs, has it: take staged, or leave transport out"
    if spec.dispatch_wire == FP8 and not BACKENDS[name].float8:
        return f"rows that cross as {FP8}; only fused and staged, on GPUs, carry them so: leave wire out"
    if spec.dispatch_wire == FP8 and spec.by_copy_engine:
        return f"rows that cross as {FP8} by {spec.transport}; a copy quantises nothing: leave transport or wire out"
    if device == "cuda" and BACKENDS[name].nccl:
        return _no_nccl(facts) or _no_round_kernels(spec, len(facts))
    return _no_kernels(name, spec, facts) if BACKENDS[name].hopper_kernels else None


def why_not_between_domains(name: str, spec: ExchangeSpec, facts: Sequence[RankFacts], domains: int) -> str | None:
    """Say why this backend cannot serve GPU ranks in several equal domains, and what to do; None where it can.

    >>> facts, spec = [RankFacts("a", "NVIDIA H200", (9, 0), nccl=True)] * 4, ExchangeSpec(8, 64, 4, 2)
    >>> why_not_between_domains("fused", spec, facts, domains=2)
    >>> why_not_between_domains("collective", spec, facts, domains=2)
    'ranks are on GPUs in 2 domains, which collective does not connect: take fused, staged or allgather'
    >>> why_not_between_domains("fused", ExchangeSpec(8, 72, 4, 2, wire="float8_e4m3"), facts, domains=2)
    'hidden is 72; between domains values of float8_e4m3 move in pieces of 16: leave the wire of dispatch out'
    >>> why_not_between_domains("allgather", ExchangeSpec(8, 64, 4, 2, wire="float8_e4m3"), facts, domains=2)
    'in domain 0, rows that cross as float8_e4m3; only fused and staged, on GPUs, carry them so: leave wire out'
    >>> why_not_between_domains("fused", spec, [RankFacts("a", "NVIDIA A100", (8, 0), nccl=True)] * 4, domains=2)
    'in domain 0, NVIDIA A100 of rank 0 has compute capability 8.0; fused needs 9.0 or more: take allgather'
    >>> why_not_between_domains("allgather", spec, facts, domains=2)
    'in domain 0, ranks 0 and 1 share GPU a; NCCL needs one GPU a rank: take fused or staged, or leave share_gpu out'
    """
    between = f"ranks are on GPUs in {domains} domains"
    if not BACKENDS[name].between_domains:
        return f"{between}, which {name} does not connect: take fused, staged or allgather"
    if spec.dispatch_wire == FP8 and spec.hidden % ROW_BYTES:
        return (
            f"hidden is {spec.hidden}; between domains values of {FP8} move in pieces of {ROW_BYTES}: leave the wire "
            "of dispatch out"
        )
    if without := [rank for rank, gpu in enumerate(facts) if not gpu.nccl]:
        return f"the torch of rank {without[0]} was built without NCCL, which connects domains: take another torch"
    size = len(facts) // domains
    for domain in range(domains):
        theirs = facts[domain * size : (domain + 1) * size]
        if reason := why_not(name, "cuda", spec.inside(domains), theirs):
            return f"in domain {domain}, {reason.replace('take collective', 'take allgather')}"
    return None


def make_backend(choice: Choice, world: World, spec: ExchangeSpec, workspace: Workspace | None) -> Backend:
    """Make this rank's part of the chosen backend."""
    # Imported here, so that a job loads torch.distributed or CUDA only where it uses it.
    name = choice.backend
    if spec.by_token:
        return _make_by_token(choice, world, spec, workspace)
    if world.device.type == "cuda":
        if world.domains > 1:
            return _make_between_gpus(choice, world, spec)
        return _make_on_gpu(choice, world, spec, workspace)
    from raymoe.exchange.cpu.cpu_backend import CpuBackend

    if world.domains > 1:
        from raymoe.exchange.domains.hierarchical import HierarchicalRows

        return CpuBackend(world, spec, HierarchicalRows(world, spec, partial(_make_carrier, name)))
    return CpuBackend(world, spec, _make_carrier(name, world, spec))


def _make_by_token(choice: Choice, world: World, spec: ExchangeSpec, workspace: Workspace | None) -> Backend:
    """Make the backend of layout `token`. Kernels over NVLink have one workspace for its two parts."""
    from raymoe.exchange.token_rows import TokenBackend

    parts, own = spec.parts(world.size), None
    if BACKENDS[choice.backend].hopper_kernels and world.domains == 1 and workspace is None:
        from raymoe.exchange.peer.workspace import Workspace

        workspace = own = Workspace(world, spec)
    makers = zip(choice.parts, parts, strict=True)
    return TokenBackend(world, spec, [make_backend(each, world, part, workspace) for each, part in makers], own)


def _make_carrier(name: str, world: World, spec: ExchangeSpec) -> Carrier:
    """Make the carrier of CPU ranks in one domain."""
    if name == "collective":
        from raymoe.exchange.cpu.gloo import GlooCollective

        return GlooCollective(world, spec)
    if name == "allgather":
        from raymoe.exchange.cpu.gloo import GlooAllgather

        return GlooAllgather(world, spec)
    from raymoe.exchange.cpu.host import HostSlots

    return HostSlots(world, spec)


def _make_between_gpus(choice: Choice, world: World, spec: ExchangeSpec) -> Backend:
    from raymoe.exchange.domains.hierarchical_gpu import HierarchicalGpu, InsideBackend, RailParts
    from raymoe.exchange.nccl.nccl_kernels import SharedLauncher
    from raymoe.net.nccl_rail import NcclRail

    launcher = world.shared(SharedLauncher)  # made first, so that it is closed last
    rail = world.shared(NcclRail)  # before NCCL inside a domain: it sets the domain of this rank for NCCL
    inside = _make_on_gpu(choice, world.domain, spec.inside(world.domains), None)
    assert isinstance(inside, InsideBackend), f"{choice.backend} serves several domains"
    return HierarchicalGpu(world, spec, RailParts(launcher, rail, inside, choice.chunk))


def _make_on_gpu(choice: Choice, world: World, spec: ExchangeSpec, workspace: Workspace | None) -> Backend:
    name, sms = choice.backend, choice.sms
    if name == "collective":
        from raymoe.exchange.nccl.nccl_backends import NcclCollective
        from raymoe.exchange.nccl.nccl_kernels import SharedLauncher
        from raymoe.net.nccl_rounds import NcclRounds

        launcher = world.shared(SharedLauncher)  # made first, so that it is closed last
        return NcclCollective(world, spec, world.shared(NcclRounds), launcher)
    if name == "allgather":
        from raymoe.exchange.nccl.nccl_backends import NcclAllgather
        from raymoe.exchange.nccl.nccl_kernels import SharedLauncher
        from raymoe.net.nccl_rounds import NcclRounds

        launcher = world.shared(SharedLauncher)
        return NcclAllgather(world, spec, world.shared(NcclRounds), launcher)
    from raymoe.exchange.peer.fused import FUSED
    from raymoe.exchange.peer.fused_chunks import CHUNKS, ChunksBackend
    from raymoe.exchange.peer.fused_ll import FEW_TOKENS
    from raymoe.exchange.peer.peer_backend import PeerBackend
    from raymoe.exchange.peer.staged import COPIED, STAGED

    if name == "staged":
        return PeerBackend(world, spec, workspace, sms, COPIED if spec.by_copy_engine else STAGED)
    if choice.chunk and not choice.lines:
        return ChunksBackend(world, spec, workspace, sms, CHUNKS)
    return PeerBackend(world, spec, workspace, sms, FEW_TOKENS if choice.lines else FUSED)


def _request_error(world: World, spec: object, request: ExchangeRequest) -> ConfigError | None:
    """Find the first error that this rank sees without the others."""
    device = world.device.type
    if not isinstance(spec, ExchangeSpec):
        return ConfigError(f"spec is a {type(spec).__name__}; an ExchangeSpec is needed")
    if spec.placed_experts:
        return ConfigError(f"placed_experts is {spec.placed_experts}; give slots, and experts as callers number them")
    if spec.expert_group != 1:
        return ConfigError(f"expert_group is {spec.expert_group}; only the exchange inside a domain has groups")
    if request.backend not in backends_of(device):
        kind = "CPU" if device == "cpu" else "GPU"
        return ConfigError(f"backend is {request.backend!r}; {kind} ranks have {', '.join(backends_of(device))}")
    if request.sms != "auto" and (type(request.sms) is not int or request.sms < 1):
        return ConfigError(f"sms is {request.sms!r}; it is 'auto' or a number of SMs, at least 1")
    if request.chunk != "auto" and (type(request.chunk) is not int or request.chunk < 1):
        return ConfigError(f"chunk is {request.chunk!r}; it is 'auto' or a number of tokens, at least 1")
    if request.chunk != "auto" and (device == "cpu" or world.domains == 1):
        where = "between CPU ranks" if device == "cpu" else "in a world of one domain"
        return ConfigError(
            f"chunk is {request.chunk} {where}; rows cross in chunks between domains of GPU ranks alone: leave it out"
        )
    if world.domains > 1 and request.workspace is not None:
        return ConfigError(
            f"a workspace was given in a world of {world.domains} domains; an exchange between domains makes its own: "
            "leave workspace out"
        )
    if device == "cpu" and (request.workspace is not None or request.sms != "auto"):
        return ConfigError("a workspace or a number of sms asked for on CPU ranks; both are for GPUs: leave them out")
    try:
        spec.check(world.size)
    except ConfigError as error:
        return error
    return None


def _facts(world: World) -> RankFacts:
    if world.device.type == "cpu":
        return RankFacts()
    from torch import distributed

    nccl = distributed.is_available() and distributed.is_nccl_available()
    bounded = False
    if nccl and world.domains > 1:
        from raymoe.net.nccl import bounds_blocks

        bounded = bounds_blocks()
    return RankFacts(world.gpu.uuid, world.gpu.name, world.gpu.capability, nccl, world.gpu.sms, bounded)


def _no_nccl(facts: Sequence[RankFacts]) -> str | None:
    if without := [rank for rank, rank_facts in enumerate(facts) if not rank_facts.nccl]:
        return f"the torch of rank {without[0]} was built without NCCL: take fused or staged, or another torch"
    gpus = [rank_facts.gpu for rank_facts in facts]
    for rank, gpu in enumerate(gpus):
        if gpus.index(gpu) != rank:
            return (
                f"ranks {gpus.index(gpu)} and {rank} share GPU {gpu}; NCCL needs one GPU a rank: take fused or staged, "
                "or leave share_gpu out"
            )
    return None


def _no_round_kernels(spec: ExchangeSpec, ranks: int) -> str | None:
    """Say why the kernels around NCCL's collectives cannot serve this spec; None where they can.

    >>> _no_round_kernels(ExchangeSpec(tokens=8, hidden=64, experts=8192, topk=2), 2)
    'experts a rank is 4096; collective and allgather take at most 3072 on GPUs'
    """
    rows = ranks * spec.tokens * max(spec.topk, -(-spec.row_bytes // SPREAD_BYTES))
    for key, size in (("ranks", ranks), ("experts a rank", spec.local_experts(ranks)), ("pieces of rows", rows)):
        if size > ROUNDS_MOST[key]:
            return f"{key} is {size}; collective and allgather take at most {ROUNDS_MOST[key]} on GPUs"
    return None


def _no_kernels(name: str, spec: ExchangeSpec, facts: Sequence[RankFacts]) -> str | None:
    for rank, gpu in enumerate(facts):
        if gpu.capability < FUSED_CAPABILITY:
            has, needs = (".".join(map(str, version)) for version in (gpu.capability, FUSED_CAPABILITY))
            return (
                f"{gpu.name} of rank {rank} has compute capability {has}; {name} needs {needs} or more: take collective"
            )
    entries = spec.tokens * spec.topk  # all of them may name one expert
    sizes = (spec.hidden, spec.topk, spec.experts, len(facts), entries)
    needed = dict(zip(FUSED_MOST, sizes, strict=True))
    for key, most in FUSED_MOST.items():
        if needed[key] > most:
            return f"{key} is {needed[key]}; {name} takes at most {most}: take collective"
    return None
