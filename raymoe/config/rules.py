"""Rules between the values of different keys. Each rule checks one case, never a matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from raymoe.config.job import Job
from raymoe.config.sections import ABILITIES, MOE, OTHER_SYSTEMS, SPANNING
from raymoe.exchange.abilities import BACKENDS, Abilities, backends_of
from raymoe.exchange.spec import MOST_ROWS, ROW_BYTES, worst_rows
from raymoe.fp8 import FP8
from raymoe.memory.layout import ITEM_BYTES

_VECTOR = 8  # elements of a row that the kernels of workload pointwise move at a time

GPU_TRANSPORTS = frozenset({"copy_engine", "tma", "collective"})
SMS_TRANSPORTS = frozenset({"auto", "tma"})

BESIDE = sorted(name for name in backends_of("cuda") if not BACKENDS[name].waits_on_host)
"""The backends that can run beside a matrix product, because their operations never wait on the host."""


@dataclass(frozen=True)
class Rule:
    """`check` gives (reason, hint), or None if the rule holds. `keys` are those that it reads, the main one first."""

    workloads: tuple[str, ...]
    keys: tuple[str, ...]
    check: Callable[[Job], tuple[str, str] | None]


@dataclass(frozen=True)
class BrokenRule:
    """A rule that a job breaks, with the reason and what to do."""

    rule: Rule
    reason: str
    hint: str

    def __str__(self) -> str:
        return f"{self.rule.keys[0]}: {self.reason}, {self.hint}"


def broken_rules(job: Job) -> Iterator[BrokenRule]:
    """Find the rules that a job without a matrix breaks."""
    for rule in RULES:
        if job.workload in rule.workloads and (problem := rule.check(job)):
            yield BrokenRule(rule, *problem)


def _abilities(job: Job) -> Abilities:
    return ABILITIES[job.exchange.backend]


def _experts_divide(job: Job) -> tuple[str, str] | None:
    experts, ranks = job.shape.experts, job.world.ranks
    if experts % ranks == 0 or job.exchange.slots is not None:
        return None
    below, above = experts // ranks * ranks, -(-experts // ranks) * ranks
    possible = f"{below} or {above}" if below else str(above)
    return f"{experts} experts do not divide among {ranks} ranks", f"{possible} would"


def _slots_hold_the_experts(job: Job) -> tuple[str, str] | None:
    slots, ranks, experts = job.exchange.slots, job.world.ranks, job.shape.experts
    if slots is None:
        return None
    if job.workload != "exchange":
        return f"workload {job.workload} has no slots", "leave slots out, or run workload exchange"
    if job.exchange.backend in (*OTHER_SYSTEMS, "row_push", "nccl_bare"):
        return f"{job.exchange.backend} has no slots", "take a backend of raymoe, or leave slots out"
    if slots * ranks < experts:
        return f"{experts} experts do not fit into {slots} slots on each of {ranks} ranks", f"{-(-experts // ranks)} do"
    return None


def _topk_fits(job: Job) -> tuple[str, str] | None:
    if job.shape.topk <= job.shape.experts:
        return None
    return f"topk {job.shape.topk} is more than the {job.shape.experts} experts", f"at most {job.shape.experts}"


def _rows_are_multiples_of_16_bytes(job: Job) -> tuple[str, str] | None:
    size = ITEM_BYTES[job.shape.dtype]
    row = job.shape.hidden * size
    if row % ROW_BYTES == 0:
        return None
    step = ROW_BYTES // size
    return (
        f"a row of {job.shape.hidden} {job.shape.dtype} has {row} bytes, not a multiple of {ROW_BYTES}",
        f"hidden {-(-job.shape.hidden // step) * step} would do",
    )


def _rows_can_be_counted(job: Job) -> tuple[str, str] | None:
    entries = job.world.ranks * job.shape.tokens * job.shape.topk
    local = job.exchange.slots or job.shape.experts // job.world.ranks
    rows = worst_rows(entries, local, job.exchange.alignment)
    if rows <= MOST_ROWS:
        return None
    return f"a rank may receive {rows} rows, offsets count to {MOST_ROWS}", "take fewer tokens, ranks or topk"


def _capacity_suffices(job: Job) -> tuple[str, str] | None:
    """No id is masked, so R ranks receive R*T*K rows together, and at least one receives T*K or more."""
    routing, rows = job.routing, job.shape.tokens * job.shape.topk
    capacity = job.exchange.capacity
    if (
        capacity == "worst"
        or job.exchange.layout == "token"
        or routing.masked > 0
        or routing.ragged
        or routing.kind == "trace"
    ):
        return None
    if capacity >= (1 if isinstance(capacity, float) else rows):
        return None
    way_out = "write 1.0 or more, or worst" if isinstance(capacity, float) else f"write {rows} or more, or worst"
    return f"capacity {capacity} overflows with any routing, since one rank receives at least {rows} rows", way_out


def _experts_take_their_rows(job: Job) -> tuple[str, str] | None:
    if job.exchange.layout != "token":
        return None
    return f"the experts of workload {job.workload} take no rows by token", "write expert or rank"


def _dispatch_sends_the_dtype(job: Job) -> tuple[str, str] | None:
    wire, dtype = job.exchange.wire.dispatch, job.shape.dtype
    if wire in (None, dtype, FP8):
        return None
    return f"rows of {dtype} cannot cross as {wire}", f"write {dtype} or leave it out"


def _float8_is_for_gpus(job: Job) -> tuple[str, str] | None:
    if job.exchange.wire.dispatch != FP8:
        return None
    if job.workload == "train" or (job.workload == "layer" and job.layer.experts_dtype is None):
        return f"rows of a layer cannot cross as {FP8}, whose gradients would be lost", "leave wire out"
    if job.world.device == "cpu":
        return f"rows cannot cross as {FP8} between CPU ranks", "leave wire out, or run workload exchange on cuda"
    if not _abilities(job).float8:
        return (
            f"backend {job.exchange.backend} has no {FP8}",
            "fused and staged have it, the others send the shape's dtype",
        )
    return None


def _backend_serves_the_device(job: Job) -> tuple[str, str] | None:
    device = job.world.device
    if device == "auto" or device in _abilities(job).devices:
        return None
    return f"{job.exchange.backend} is no backend of {device} ranks", "auto chooses one that is"


def _layers_have_exchanges(job: Job) -> tuple[str, str] | None:
    if job.exchange.backend in BACKENDS:
        return None
    exchanges = ", ".join(backends_of("cuda", "cpu"))
    return f"{job.exchange.backend} is no exchange, so no layer can use it", f"layers take {exchanges}"


def _gpus_multiply_16_bits(job: Job) -> tuple[str, str] | None:
    if job.world.device != "cuda" or job.shape.dtype == "bfloat16":
        return None
    if job.shape.dtype == "float16" and not job.layer.backward:
        return None
    gradients = " with a backward pass" if job.shape.dtype == "float16" else ""
    return f"experts on GPUs are not {job.shape.dtype}{gradients}", "write bfloat16, or device: cpu"


def _experts_of_8_bits_infer(job: Job) -> tuple[str, str] | None:
    if job.layer.experts_dtype is None or not job.layer.backward:
        return None
    return f"experts of {FP8} have no gradients", "leave out backward or experts_dtype"


def _microbatches_infer(job: Job) -> tuple[str, str] | None:
    if job.layer.microbatches == 1:
        return None
    if job.layer.backward:
        return "microbatches have no backward pass", "leave out backward or microbatches"
    if job.layer.router.kind == "given":
        return "microbatches are of a layer with a router", "write router.kind: softmax or sigmoid"
    return None


def _overlapped_layers_infer(job: Job) -> tuple[str, str] | None:
    if job.layer.overlap == "none":
        return None
    if job.layer.backward:
        return "a combine beside its product is of passes without gradients", "leave out backward or overlap"
    if job.layer.microbatches > 1:
        return "microbatches have the exchange of others beside their products", "leave out microbatches or overlap"
    return None


def _experts_of_8_bits_take_8_bits(job: Job) -> tuple[str, str] | None:
    wire, experts = job.exchange.wire.dispatch, job.layer.experts_dtype
    if experts is None:
        return None
    if wire not in (None, FP8):
        return f"rows cross as {wire} and experts of {experts} take {FP8}", "leave out wire or experts_dtype"
    if job.world.device == "cuda" and not _abilities(job).float8:
        return f"backend {job.exchange.backend} has no {FP8} on GPUs", "take fused or staged"
    return None


def _one_chooses_the_experts(job: Job) -> tuple[str, str] | None:
    routing, kind = job.routing, job.layer.router.kind
    if kind == "given" or (routing.kind == "uniform" and routing.masked == 0):
        return None
    choice = f"routing {routing.kind}" if routing.kind != "uniform" else f"{routing.masked:g} of the ids masked"
    return f"{choice} beside a {kind} router, which chooses experts itself", "write router.kind: given, or leave it out"


def _gpus_train_16_bits(job: Job) -> tuple[str, str] | None:
    if job.world.device != "cuda" or job.shape.dtype == "bfloat16":
        return None
    return f"experts of {job.shape.dtype} cannot be trained on GPUs", "write bfloat16"


def _the_router_trains(job: Job) -> tuple[str, str] | None:
    routing = job.routing
    if routing.kind == "uniform" and not routing.masked and not routing.ragged:
        return None
    return "the layers of workload train route by their own routers", "keep routing.seed alone"


def _training_is_eager(job: Job) -> tuple[str, str] | None:
    if job.steps.graph is not True:
        return None
    return "the host reads the loss of each training step, so none is captured", "write auto or false"


def _recomputing_is_of_a_backward_pass(job: Job) -> tuple[str, str] | None:
    if job.layer.backward or job.layer.recompute == "nothing":
        return None
    return "nothing is recomputed without a backward pass", "write backward: true, or leave recompute out"


def _groups_hold_the_choice(job: Job) -> tuple[str, str] | None:
    experts, topk, router = job.shape.experts, job.shape.topk, job.layer.router
    if router.kind == "given" or (router.groups == 1 and router.topk_groups == 1):
        return None
    size = experts // router.groups
    if experts % router.groups or size < 2:
        return f"{experts} experts in {router.groups} groups; groups are equal and hold two or more", "change groups"
    if router.topk_groups > router.groups or router.topk_groups * size < topk:
        best = f"the best {router.topk_groups} of {router.groups} groups of {size} experts"
        return f"{best} do not hold top-{topk}", "change topk_groups"
    return None


def _only_staged_has_transports(job: Job) -> tuple[str, str] | None:
    exchange = job.exchange
    if exchange.transport == "auto":
        return None
    if job.world.device == "cpu":
        return "CPU ranks have no copy engine", "write auto or leave it out"
    if not _abilities(job).copy_engine:
        return f"backend {exchange.backend} has no choice of transport", f"backend staged takes {exchange.transport}"
    if exchange.wire.dispatch == FP8:
        return f"the copy engine cannot convert rows to {FP8}", "leave wire or transport out"
    return None


def _sms_need_gpus(job: Job) -> tuple[str, str] | None:
    if job.exchange.sms == "auto" or job.world.device != "cpu":
        return None
    return "CPU ranks have no SMs", "write auto or leave it out"


def _chunks_cross_domains(job: Job) -> tuple[str, str] | None:
    """With domain auto, the ranks find out how many domains there are."""
    if job.exchange.net.chunk == "auto":
        return None
    way_out = "write auto or leave it out"
    if job.workload == "layer":
        return "a layer's exchange chooses its chunks itself", way_out
    if job.world.device == "cpu":
        return "rows between CPU ranks cross at once", way_out
    if job.world.domains == 1 and job.world.domain != "auto":
        return "rows cross in chunks between domains, and these ranks have one", f"set world.domain, or {way_out}"
    if _abilities(job).chunks and job.exchange.transport == "auto":
        return None
    return "only backend fused waits for chunks of rows", "take fused or auto"


def _nccl_is_not_captured(job: Job) -> tuple[str, str] | None:
    if job.steps.graph is not True or not _abilities(job).waits_on_host or job.world.device != "cuda":
        return None
    return f"backend {job.exchange.backend} waits on the host, so no CUDA graph can capture it", "write auto or false"


def _trace_is_named(job: Job) -> tuple[str, str] | None:
    if job.routing.kind != "trace" or job.routing.file is not None:
        return None
    return "kind trace needs a file", "name a .npy file of expert ids in routing.file"


def _peers_exist(job: Job) -> tuple[str, str] | None:
    if job.world.ranks > 1:
        return None
    return "one rank has no peer to send to", "p2p takes 2 ranks or more"


def _pairs_exist(job: Job) -> tuple[str, str] | None:
    last = 0 if job.p2p.pairs == "all" else max(max(pair) for pair in job.p2p.pairs)
    if last < job.world.ranks:
        return None
    return f"there is no rank {last} among {job.world.ranks} ranks", f"ranks are 0 to {job.world.ranks - 1}"


def _domains_are_equal(job: Job) -> tuple[str, str] | None:
    ranks, domain = job.world.ranks, job.world.domain
    if domain == "auto" or ranks % domain == 0:
        return None
    possible = [str(size) for size in range(1, ranks + 1) if ranks % size == 0]
    return f"{ranks} ranks do not divide into domains of {domain}", f"{_listed(possible)} would"


def _listed(names: list[str]) -> str:
    """Join names.

    >>> _listed(["1", "2", "4"]), _listed(["1"])
    ('1, 2 or 4', '1')
    """
    return " or ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])


def _workload_may_span(job: Job) -> tuple[str, str] | None:
    if job.world.domains == 1 or job.workload in SPANNING:
        return None
    return f"workload {job.workload} has one domain, not {job.world.domains}", "leave world.domain out"


def _backends_cross_domains(job: Job) -> tuple[str, str] | None:
    """CPU ranks have no backend that cannot. Where the device is open, the rank finds out."""
    abilities, domains = _abilities(job), job.world.domains
    on_gpus = "cuda" in (job.world.device, abilities.only_device)
    if domains == 1 or not on_gpus or abilities.between_domains:
        return None
    return (
        f"{job.exchange.backend} does not cross {domains} domains of GPU ranks",
        "fused, staged, allgather and auto do",
    )


def _domains_take_the_dtype(job: Job) -> tuple[str, str] | None:
    """GPU ranks quantise rows before they cross to another domain. Values move in pieces there."""
    hidden = job.shape.hidden
    if job.world.domains == 1 or job.exchange.wire.dispatch != FP8 or hidden % ROW_BYTES == 0:
        return None
    return (
        f"rows of {hidden} elements cannot cross {job.world.domains} domains as {FP8}",
        f"leave wire out, or write hidden {-(-hidden // ROW_BYTES) * ROW_BYTES}",
    )


def _graph_needs_gpus(job: Job) -> tuple[str, str] | None:
    on_cpus = job.world.device == "cpu"
    if job.workload == "layer" and job.world.device == "auto":
        on_cpus = _abilities(job).only_device != "cuda"
    if job.steps.graph is not True or not on_cpus:
        return None
    return "CUDA graphs need GPU ranks and these are CPU ranks", "write auto or false"


def _sharing_needs_gpus(job: Job) -> tuple[str, str] | None:
    if not job.world.share_gpu or job.world.device == "cuda":
        return None
    return f"only GPU ranks can share a GPU, and device is {job.world.device}", "write device: cuda"


def _transports_are_for(device: str, wrong: frozenset[str]) -> Callable[[Job], tuple[str, str] | None]:
    def check(job: Job) -> tuple[str, str] | None:
        misplaced = [name for name in job.p2p.transports if name in wrong]
        if job.world.device != device or not misplaced:
            return None
        return f"{misplaced[0]} is no transport of {device} ranks", "auto chooses one that is"

    return check


def _a_transport_takes_sms(job: Job) -> tuple[str, str] | None:
    if job.p2p.sms == "auto":
        return None
    if job.world.device == "cpu":
        return "CPU ranks have no SMs", "write auto or leave it out"
    if not SMS_TRANSPORTS & set(job.p2p.transports):
        return f"{', '.join(job.p2p.transports)} take no number of SMs", "transport tma does"
    return None


def _overlap_is_between_gpus(job: Job) -> tuple[str, str] | None:
    if job.world.device != "cpu":
        return None
    return "workload overlap has no CPU ranks", "write cuda or auto"


def _can_run_beside_a_product(job: Job) -> tuple[str, str] | None:
    if job.exchange.backend in BESIDE:
        return None
    return f"backend {job.exchange.backend} cannot run beside a matrix product", f"{', '.join(BESIDE)} can"


def _overlap_is_eager(job: Job) -> tuple[str, str] | None:
    if job.steps.graph is not True:
        return None
    return "workload overlap is timed without CUDA graphs, on a stream that the host holds", "write auto or false"


def _kernels_need_gpus(job: Job) -> tuple[str, str] | None:
    pointwise = job.pointwise
    if (pointwise.sms == "auto" and pointwise.stages == "auto") or job.world.device != "cpu":
        return None
    return "CPU ranks have no SMs and no stages", "write auto or leave both out"


def _products_are_vectors(job: Job) -> tuple[str, str] | None:
    for key in ("hidden", "ffn"):
        elements = getattr(job.shape, key)
        if elements % _VECTOR:
            more = -(-elements // _VECTOR) * _VECTOR
            return f"rows of {elements} elements, not a multiple of {_VECTOR}", f"{key} {more} would do"
    return None


def _rows_are_vectors(job: Job) -> tuple[str, str] | None:
    key = "ffn" if job.pointwise.op.startswith("swiglu") else "hidden"
    elements = getattr(job.shape, key)
    if elements % _VECTOR == 0:
        return None
    return (
        f"rows of {elements} elements, not a multiple of {_VECTOR}",
        f"{key} {-(-elements // _VECTOR) * _VECTOR} would do",
    )


RULES = (
    Rule(("pointwise",), ("pointwise.sms", "pointwise.stages", "world.device"), _kernels_need_gpus),
    Rule(("pointwise",), ("shape.hidden", "shape.ffn", "pointwise.op"), _rows_are_vectors),
    Rule(("products",), ("shape.hidden", "shape.ffn"), _products_are_vectors),
    Rule(("overlap",), ("world.device", "workload"), _overlap_is_between_gpus),
    Rule(("overlap",), ("exchange.backend", "workload"), _can_run_beside_a_product),
    Rule(("overlap",), ("steps.graph", "workload"), _overlap_is_eager),
    Rule((*MOE, "p2p", "pointwise", "products"), ("steps.graph", "world.device"), _graph_needs_gpus),
    Rule((*MOE, "p2p", "pointwise", "products"), ("world.share_gpu", "world.device"), _sharing_needs_gpus),
    Rule((*MOE, "p2p", "pointwise", "products"), ("world.domain", "world.ranks"), _domains_are_equal),
    Rule((*MOE, "p2p", "pointwise", "products"), ("world.domain", "world.ranks", "workload"), _workload_may_span),
    Rule(
        SPANNING,
        ("exchange.backend", "world.domain", "world.ranks", "world.device"),
        _backends_cross_domains,
    ),
    Rule(
        ("exchange",),
        ("exchange.wire.dispatch", "shape.hidden", "world.domain", "world.ranks"),
        _domains_take_the_dtype,
    ),
    Rule(("p2p",), ("p2p.transports", "world.device"), _transports_are_for("cpu", GPU_TRANSPORTS)),
    Rule(("p2p",), ("p2p.transports", "world.device"), _transports_are_for("cuda", frozenset({"host"}))),
    Rule((*MOE, "products"), ("shape.experts", "world.ranks"), _experts_divide),
    Rule(
        MOE,
        ("exchange.slots", "exchange.backend", "shape.experts", "world.ranks", "workload"),
        _slots_hold_the_experts,
    ),
    Rule(MOE, ("shape.topk", "shape.experts"), _topk_fits),
    Rule(MOE, ("shape.hidden", "shape.dtype"), _rows_are_multiples_of_16_bytes),
    Rule(
        MOE,
        ("shape.tokens", "shape.topk", "world.ranks", "shape.experts", "exchange.alignment", "exchange.slots"),
        _rows_can_be_counted,
    ),
    Rule(
        MOE,
        ("exchange.capacity", "shape.tokens", "shape.topk", "routing.kind", "routing.masked", "routing.ragged"),
        _capacity_suffices,
    ),
    Rule(("layer", "overlap", "train"), ("exchange.layout", "workload"), _experts_take_their_rows),
    Rule(MOE, ("exchange.wire.dispatch", "shape.dtype"), _dispatch_sends_the_dtype),
    Rule(
        MOE,
        ("exchange.wire.dispatch", "exchange.backend", "world.device", "workload", "layer.experts_dtype"),
        _float8_is_for_gpus,
    ),
    Rule(("exchange", "layer", "train"), ("exchange.backend", "world.device"), _backend_serves_the_device),
    Rule(("layer", "train"), ("exchange.backend", "workload"), _layers_have_exchanges),
    Rule(("layer",), ("shape.dtype", "world.device", "layer.backward", "workload"), _gpus_multiply_16_bits),
    Rule(("layer",), ("layer.experts_dtype", "layer.backward"), _experts_of_8_bits_infer),
    Rule(("layer",), ("layer.microbatches", "layer.backward", "layer.router.kind"), _microbatches_infer),
    Rule(("layer",), ("layer.overlap", "layer.backward", "layer.microbatches"), _overlapped_layers_infer),
    Rule(
        ("layer",),
        ("layer.experts_dtype", "exchange.wire.dispatch", "exchange.backend", "world.device"),
        _experts_of_8_bits_take_8_bits,
    ),
    Rule(("layer",), ("layer.router.kind", "routing.kind", "routing.masked"), _one_chooses_the_experts),
    Rule(("train",), ("shape.dtype", "world.device", "workload"), _gpus_train_16_bits),
    Rule(("train",), ("routing.kind", "routing.masked", "routing.ragged", "workload"), _the_router_trains),
    Rule(("train",), ("steps.graph", "workload"), _training_is_eager),
    Rule(("layer",), ("layer.recompute", "layer.backward"), _recomputing_is_of_a_backward_pass),
    Rule(
        ("layer",),
        ("layer.router.groups", "layer.router.topk_groups", "shape.experts", "shape.topk"),
        _groups_hold_the_choice,
    ),
    Rule(
        MOE,
        ("exchange.transport", "exchange.backend", "exchange.wire.dispatch", "world.device", "workload"),
        _only_staged_has_transports,
    ),
    Rule(MOE, ("exchange.sms", "world.device", "workload"), _sms_need_gpus),
    Rule(
        MOE,
        (
            *("exchange.net.chunk", "exchange.backend", "exchange.transport"),
            *("world.domain", "world.ranks", "world.device", "workload"),
        ),
        _chunks_cross_domains,
    ),
    Rule(("exchange", "layer"), ("steps.graph", "exchange.backend", "world.device"), _nccl_is_not_captured),
    Rule(MOE, ("routing.kind", "routing.file"), _trace_is_named),
    Rule(("p2p",), ("p2p.sms", "p2p.transports", "world.device"), _a_transport_takes_sms),
    Rule(("p2p",), ("world.ranks",), _peers_exist),
    Rule(("p2p",), ("p2p.pairs", "world.ranks"), _pairs_exist),
)
