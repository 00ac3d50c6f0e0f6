"""Wrong arguments are refused before anything is sent; the error names the value asked and the value found."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from raymoe.errors import ConfigError
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.choice import RankFacts, why_not
from raymoe.exchange.cpu.cpu_backend import CpuBackend
from raymoe.exchange.cpu.host import HostSlots
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from tests.unit.worlds import close, each, wired

T, H, E, K = 4, 16, 4, 2
SPEC = ExchangeSpec(tokens=T, hidden=H, experts=E, topk=K, dtype="float32", alignment=1)


@pytest.fixture(scope="module")
def exchange() -> Iterator[Exchange]:
    [world] = wired(1)
    with Exchange(world, SPEC) as opened:
        yield opened
    close([world])


def arguments() -> dict:
    return {"x": torch.ones(3, H), "topk_idx": torch.zeros(3, K, dtype=torch.int64), "topk_weights": torch.ones(3, K)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": [1.0]}, "x is a list; a tensor is needed"),
        ({"x": torch.ones(3, H).bfloat16()}, "x is torch.bfloat16; torch.float32 is needed"),
        ({"x": torch.ones(3, H + 1)}, r"x has shape \[3, 17\]; \[any, 16\] is needed"),
        ({"x": torch.ones(3 * H)}, r"x has shape \[48\]"),
        ({"x": torch.ones(5, H)}, "x has 5 rows; this exchange was made for at most 4 tokens a rank"),
        ({"x": torch.ones(H, 3).t()}, r"x has strides \(1, 3\); it must be contiguous"),
        ({"x": torch.ones(3, H, device="meta")}, "x is on meta; this world's ranks are on cpu"),
        ({"topk_idx": torch.zeros(3, K)}, "topk_idx is torch.float32; torch.int32 or torch.int64 is needed"),
        ({"topk_idx": torch.zeros(2, K, dtype=torch.int32)}, r"topk_idx has shape \[2, 2\]; \[3, 2\] is needed"),
        ({"topk_weights": torch.ones(3, K).double()}, "topk_weights is torch.float64; torch.float32 is needed"),
        ({"topk_weights": torch.ones(3, K + 1)}, r"topk_weights has shape \[3, 3\]"),
        ({"num_tokens": 4}, "num_tokens is 4; x has 3 rows, so 0 to 3 can be sent"),
        ({"num_tokens": -1}, "num_tokens is -1"),
        ({"num_tokens": True}, "num_tokens is True"),
        ({"num_tokens": torch.tensor([1])}, "num_tokens is torch.int64; torch.int32 is needed"),
        ({"out": torch.empty(7, H)}, r"out has shape \[7, 16\]; \[8, 16\] is needed"),
        ({"out": torch.empty(8, H).half()}, "out is torch.float16; torch.float32 is needed"),
    ],
)
def test_wrong_arguments_of_dispatch_are_refused(exchange: Exchange, change: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        exchange.dispatch(**(arguments() | change))
    exchange.dispatch(**arguments())  # nothing was sent, so the exchange still works


class Wrapper(torch.Tensor):
    """A subclass without its own memory, like DTensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        wrapper: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


class Named(torch.Tensor):
    """A subclass with memory, whose own `__torch_function__` raises."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


def fake(*shape: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(shape)


def freed(*shape: int) -> torch.Tensor:
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def leaked_from_vmap(*shape: int) -> torch.Tensor:
    """Return a tensor of vmap that outlives the vmap."""
    leaked: list[torch.Tensor] = []
    torch.vmap(lambda row: (leaked.append(row), row)[1])(torch.ones(2, *shape))
    return leaked[0]


NOT_PLAIN_MEMORY: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "negative": (lambda *shape: torch._neg_view(torch.ones(shape)), r"is a negative view, .*; call \.resolve_neg\(\)"),
    "conjugate": (lambda *shape: torch.ones(shape, dtype=torch.complex64).conj(), r"is torch\.complex64"),
    "sparse": (lambda *shape: torch.ones(shape).to_sparse(), r"has layout torch\.sparse_coo; .* \.to_dense\(\)"),
    "mkldnn": (lambda *shape: torch.ones(shape).to_mkldnn(), r"has layout torch\._mkldnn; .* \.to_dense\(\)"),
    "quantised": (
        lambda *shape: torch._empty_affine_quantized(shape, scale=1.0, dtype=torch.qint8),
        r"is torch\.qint8",
    ),
    "meta": (lambda *shape: torch.ones(shape, device="meta"), "is on meta; this world's ranks are on cpu"),
    "fake": (fake, "is a FakeTensor, which has no values"),
    "vmap": (leaked_from_vmap, r"belongs to torch\.vmap or a transform of torch\.func"),
    "functional": (lambda *shape: torch._to_functional_tensor(torch.ones(shape)), "is being traced"),
    "wrapper": (lambda *shape: Wrapper(torch.ones(shape)), "is a Wrapper, a subclass of Tensor without memory"),
    "zeros": (torch._efficientzerotensor, "is a tensor of zeros without memory"),
    "freed": (freed, "has no memory: its storage was freed"),
    "nested": (lambda *shape: torch.nested.nested_tensor([torch.ones(shape)]), "is a nested tensor"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("kind", NOT_PLAIN_MEMORY)
def test_tensors_that_are_not_plain_memory_are_refused(exchange: Exchange, kind: str) -> None:
    make, says = NOT_PLAIN_MEMORY[kind]
    got, rows = exchange.dispatch(**arguments()), torch.ones(8, H)
    for name, shape in {"x": (3, H), "topk_weights": (3, K), "out": (8, H)}.items():
        with pytest.raises(ConfigError, match=f"^{name} {says}"):
            exchange.dispatch(**(arguments() | {name: make(*shape)}))
    with pytest.raises(ConfigError, match=f"^rows {says}"):
        exchange.combine(make(8, H), got)
    with pytest.raises(ConfigError, match=f"^out {says}"):
        exchange.combine(rows, got, out=make(3, H))
    assert exchange.combine(rows, got, weighted=False).eq(2).all()  # nothing was sent, so the exchange still works


def test_ids_and_counts_that_are_not_plain_memory_are_refused(exchange: Exchange) -> None:
    ids, one = torch.zeros(3, K, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ConfigError, match=r"^topk_idx has layout torch\.sparse_coo"):
        exchange.dispatch(**(arguments() | {"topk_idx": ids.to_sparse()}))
    with pytest.raises(ConfigError, match=r"^topk_idx is a Wrapper"):
        exchange.dispatch(**(arguments() | {"topk_idx": Wrapper(ids)}))
    with pytest.raises(ConfigError, match=r"^num_tokens is a negative view"):
        exchange.dispatch(**arguments(), num_tokens=torch._neg_view(one))
    with pytest.raises(ConfigError, match=r"^num_tokens is a Wrapper"):
        exchange.dispatch(**arguments(), num_tokens=Wrapper(one))


def test_parameters_and_subclasses_with_memory_are_accepted(exchange: Exchange) -> None:
    x, ids, weights = arguments().values()
    with torch.inference_mode():
        made_in_inference = torch.full((3, H), 3.0)
    for variant in (torch.nn.Parameter(x * 3), (x * 3).as_subclass(Named), made_in_inference):
        got = exchange.dispatch(variant, ids, torch.nn.Parameter(weights))
        assert type(got.x) is torch.Tensor
        assert exchange.combine(got.x.as_subclass(Named), got).eq(6).all()
    assert exchange.dispatch(x[:0], ids[:0], weights[:0]).tokens == 0  # an empty tensor has no address


def test_inference_mode_works_and_its_outputs_are_refused_outside(exchange: Exchange) -> None:
    with torch.inference_mode():
        out, y = torch.empty(8, H), torch.empty(3, H)
        got = exchange.dispatch(**arguments(), out=out)
        assert exchange.combine(got.x, got, out=y).eq(2).all()
    with pytest.raises(ConfigError, match="out was made in inference mode"):
        exchange.dispatch(**arguments(), out=out)
    with pytest.raises(ConfigError, match="out was made in inference mode"):
        exchange.combine(got.x, got, out=y)
    for backend in ("host", "collective", "allgather"):
        with torch.inference_mode():
            other = Exchange(exchange.world, SPEC, backend)
        got = other.dispatch(**arguments())  # its memory is not an inference tensor
        assert other.combine(got.x, got).eq(2).all()
        other.close()


def test_calls_inside_transforms_and_fake_mode_are_refused(exchange: Exchange) -> None:
    x, ids, weights = arguments().values()

    def summed(x: torch.Tensor) -> torch.Tensor:
        got = exchange.dispatch(x, ids, weights)
        return exchange.combine(got.x, got).sum()

    says = r"^dispatch inside torch\.vmap or a transform of torch\.func"
    with pytest.raises(ConfigError, match=says):
        torch.vmap(summed)(torch.ones(2, 3, H))
    with pytest.raises(ConfigError, match=says):
        torch.vmap(lambda _: summed(x))(torch.ones(2))
    for transform in (torch.func.grad, torch.func.functionalize):
        with pytest.raises(ConfigError, match=says):
            transform(summed)(x)
    with pytest.raises(ConfigError, match=says):
        torch.func.jvp(summed, (x,), (x,))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(ConfigError, match=r"^dispatch under FakeTensorMode"):
            summed(x)
        with pytest.raises(ConfigError, match=r"^making an exchange under FakeTensorMode"):
            Exchange(exchange.world, SPEC)
    assert summed(x) == 2 * x.sum()


def test_torch_compile_runs_dispatch_and_combine_untraced(exchange: Exchange) -> None:
    x, ids, weights = arguments().values()

    def twice(x: torch.Tensor) -> torch.Tensor:
        got = exchange.dispatch(x + 1, ids, weights)
        return exchange.combine(2 * got.x, got) - 1

    compiled = torch.compile(twice, backend="eager")
    for _ in range(2):
        assert compiled(x).eq(7).all()
    torch.compiler.reset()  # it remembers that these calls break the graph
    with pytest.raises(Exception, match="dispatch of an exchange cannot be traced"):
        torch.compile(twice, backend="eager", fullgraph=True)(x)
    assert twice(x).eq(7).all()


def test_wrong_arguments_of_combine_are_refused(exchange: Exchange) -> None:
    got = exchange.dispatch(**arguments())
    rows = torch.ones(8, H)
    there = got.count()
    exchange.combine(rows[:there], got)
    with pytest.raises(
        ConfigError, match=f"rows has {there - 1} rows, and {there} came, gaps included: give the results"
    ):
        exchange.combine(rows[: there - 1], got)
    with pytest.raises(ConfigError, match=r"rows has shape \[9, 16\]; \[8, 16\] is needed"):
        exchange.combine(torch.ones(9, H), got)
    with pytest.raises(ConfigError, match=r"rows is torch.float64; torch.float32 is needed"):
        exchange.combine(rows.double(), got)
    with pytest.raises(ConfigError, match="got is a str; combine takes the result of dispatch"):
        exchange.combine(rows, "got")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"out has shape \[2, 16\]; \[3, 16\] is needed"):
        exchange.combine(rows, got, out=torch.empty(2, H))
    weighted: Any
    for weighted in (torch.ones(3, K), None, 1, "no"):
        with pytest.raises(ConfigError, match=f"weighted is a {type(weighted).__name__}; it is True or False"):
            exchange.combine(rows, got, weighted)
    assert exchange.combine(rows, got, weighted=False).eq(2).all()


@pytest.mark.parametrize("zero_gaps", [torch.ones(1), None, 0])
def test_zero_gaps_is_true_or_false(exchange: Exchange, zero_gaps: Any) -> None:
    with pytest.raises(ConfigError, match=f"zero_gaps is a {type(zero_gaps).__name__}; it is True or False"):
        exchange.dispatch(**arguments(), zero_gaps=zero_gaps)


def test_depth_and_layout_decide_where_rows_arrive() -> None:
    [world] = wired(1)
    with Exchange(world, replace(SPEC, depth=0)) as none, Exchange(world, replace(SPEC, depth=2)) as two:
        with pytest.raises(ConfigError, match="dispatch without out; this exchange has depth 0"):
            none.dispatch(**arguments())
        memory = torch.empty(8, H)
        assert none.dispatch(**arguments(), out=memory).x is memory
        taken = [two.dispatch(**arguments()).x.data_ptr() for _ in range(4)]
        assert len(set(taken)) == 2
        assert taken[:2] == taken[2:]
    with Exchange(world, replace(SPEC, layout="rank")) as slots:
        with pytest.raises(ConfigError, match="out was given with layout rank"):
            slots.dispatch(**arguments(), out=memory)
        slots.dispatch(**arguments())
    close([world])


def test_inputs_that_overlap_outputs_are_refused(exchange: Exchange) -> None:
    inputs, out = arguments(), torch.empty(10, H)
    for first, from_row in ((0, 0), (0, 5), (0, 7), (2, 0), (2, 7)):
        inputs["x"] = out[from_row : from_row + 3]
        with pytest.raises(ConfigError, match="x and the memory that is written to overlap"):
            exchange.dispatch(**inputs, out=out[first : first + 8])
    assert exchange.dispatch(out[8:10], inputs["topk_idx"][:2], inputs["topk_weights"][:2], out=out[:8]).tokens == 2
    assert exchange.dispatch(out[:0], inputs["topk_idx"][:0], inputs["topk_weights"][:0], out=out[:8]).tokens == 0
    own = exchange.dispatch(**arguments())
    with pytest.raises(ConfigError, match=r"x and .* overlap, .* give another out, or x\.clone\(\)"):
        exchange.dispatch(own.x[:3], inputs["topk_idx"], inputs["topk_weights"])
    with pytest.raises(ConfigError, match="rows and the memory that is written to overlap"):
        exchange.combine(own.x, own, out=own.x[5:])
    assert exchange.combine(own.x, own).eq(2).all()


def test_a_dispatch_of_another_exchange_is_refused() -> None:
    [world] = wired(1)
    with Exchange(world, SPEC) as one, Exchange(world, SPEC) as other:
        got = one.dispatch(**arguments())
        with pytest.raises(ConfigError, match="got comes from another exchange"):
            other.combine(torch.ones(8, H), got)
    with pytest.raises(ConfigError, match="dispatch on rank 0: this exchange is closed"):
        one.dispatch(**arguments())
    assert got.x.shape == (8, H)  # dispatched rows stay valid
    close([world])


def test_outputs_do_not_require_grad(exchange: Exchange) -> None:
    inputs = arguments()
    inputs["x"].requires_grad_()
    inputs["topk_weights"].requires_grad_()
    got = exchange.dispatch(**inputs)
    assert not got.x.requires_grad
    assert not exchange.combine(torch.ones(8, H, requires_grad=True), got).requires_grad


@pytest.mark.parametrize(
    ("specs", "backends", "says"),
    [
        ([SPEC, ExchangeSpec(4, 16, 4, 2, "bfloat16", alignment=1)], ["host"] * 2, ["'float32'", "'bfloat16'"]),
        (
            [SPEC, ExchangeSpec(5, 16, 4, 2, "float32", alignment=1)],
            ["host"] * 2,
            ["tokens is", "4 on rank", "5 on rank"],
        ),
        ([SPEC, vars(SPEC)], ["host"] * 2, ["spec is a dict; an ExchangeSpec is needed"]),
        ([SPEC, SPEC], ["host", "collective"], ["backend is", "'host'", "'collective'"]),
        ([SPEC, SPEC], ["host", "fused"], ["'fused'; CPU ranks have auto, host, collective, allgather"]),
        ([ExchangeSpec(4, 16, 3, 2)] * 2, ["host"] * 2, ["3 experts on 2 ranks"]),
        (
            [ExchangeSpec(4, 16, 4, 2, expert_group=2)] * 2,
            ["host"] * 2,
            ["expert_group is 2; only the exchange inside"],
        ),
        ([ExchangeSpec(4, 16, 4, 2, wire="float8_e4m3")] * 2, ["auto"] * 2, ["only fused and staged, on GPUs"]),
    ],
)
def test_all_ranks_raise_if_specs_or_backends_differ_or_are_impossible(
    specs: list, backends: list, says: list[str]
) -> None:
    worlds = wired(2)
    outcomes = each(worlds, lambda world: Exchange(world, specs[world.rank], backends[world.rank]))
    for outcome in outcomes:
        assert isinstance(outcome, ConfigError)
    for rank, outcome in enumerate(outcomes):
        for piece in says:
            both = ("4 on rank", "5 on rank")
            assert piece in str(outcome) or (piece in both and piece.split()[0] in str(outcome)), (rank, str(outcome))
    assert each(worlds, lambda world: world.swap(1, "after")) == [[1, 1]] * 2
    close(worlds)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([{"sms": 8}, {"sms": 8}], "both are for GPUs"),
        ([{"sms": 0}, {"sms": 0}], "sms is 0; it is 'auto' or a number"),
        ([{"sms": True}, {"sms": True}], "sms is True"),
        ([{"workspace": object()}, {}], "a workspace or a number of sms asked for on CPU ranks"),
    ],
)
def test_gpu_options_are_refused_on_cpu_ranks(options: list[dict[str, Any]], says: str) -> None:
    worlds = wired(2)
    for outcome in each(worlds, lambda world: Exchange(world, SPEC, **options[world.rank])):
        assert isinstance(outcome, ConfigError)
        assert says in str(outcome)
    close(worlds)


A, B = RankFacts("a", "H100", (9, 0), nccl=True), RankFacts("b", "H100", (9, 0), nccl=True)
OLD = replace(B, name="A100", capability=(8, 0))


@pytest.mark.parametrize(
    ("backend", "spec", "facts", "says"),
    [
        ("fused", SPEC, [A, B], None),
        ("fused", SPEC, [A, A], None),
        ("fused", SPEC, [A, OLD], "A100 of rank 1 has compute capability 8.0; fused needs 9.0"),
        ("fused", ExchangeSpec(4, 16392, 4, 2), [A, B], "hidden is 16392; fused takes at most 16384"),
        ("fused", ExchangeSpec(4, 16, 32, 17), [A, B], "topk is 17; fused takes at most 16"),
        ("fused", ExchangeSpec(4, 16, 1026, 2), [A, B], "experts is 1026; fused takes at most 1024"),
        ("fused", ExchangeSpec(4, 16, 9, 2), [A] * 9, "ranks is 9; fused takes at most 8"),
        (
            "staged",
            ExchangeSpec(2**20 + 1, 16, 4, 2),
            [A, B],
            "tokens times topk is 2097154; staged takes at most 2097152",
        ),
        ("fused", ExchangeSpec(4, 16, 4, 2, wire="float8_e4m3"), [A, B], None),
        ("staged", ExchangeSpec(4, 16, 4, 2, wire="float8_e4m3"), [A, B], None),
        ("staged", SPEC, [OLD, B], "A100 of rank 0 has compute capability 8.0; staged needs 9.0"),
        ("allgather", ExchangeSpec(4, 16, 4, 2, wire="float8_e4m3"), [A, B], "only fused and staged"),
        ("collective", SPEC, [A, B], None),
        ("collective", SPEC, [A, A], "ranks 0 and 1 share GPU a"),
        ("allgather", SPEC, [A, replace(B, nccl=False)], "the torch of rank 1 was built without NCCL"),
    ],
)
def test_a_backend_is_refused_with_what_the_gpus_lack(
    backend: str, spec: ExchangeSpec, facts: list[RankFacts], says: str | None
) -> None:
    reason = why_not(backend, "cuda", spec, facts)
    assert (reason is None) == (says is None), reason
    assert says is None or says in str(reason)


class SplitOnCpu(CpuBackend):
    """A backend that can split its operations. A send leaves NaN; a receive gives the results."""

    def dispatch_send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self.tokens, self.out = tokens, out
        return replace(self.dispatch(tokens, out), x=torch.full((8, H), torch.nan))

    def dispatch_receive(self, got: Dispatched, tokens: Tokens) -> None:  # noqa: ARG002
        assert self.out is not None
        got.x = self.out

    def combine_send(self, *arguments: Any) -> None:
        arguments[-1].fill_(torch.nan)

    def combine_receive(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        self.combine(rows, got, weighted, out)


def test_sends_and_receives_must_alternate() -> None:
    [world] = wired(1)
    with Exchange(world, SPEC) as whole:
        with pytest.raises(ConfigError, match="dispatch_send asked for; host cannot split operations: take fused"):
            whole.dispatch_send(**arguments())
        want = whole.combine(torch.ones(8, H), whole.dispatch(**arguments()))
    with Exchange(world, SPEC) as exchange:
        exchange._backend = SplitOnCpu(world, SPEC, HostSlots(world, SPEC))
        got = exchange.dispatch_send(**arguments())
        for call in (exchange.dispatch, exchange.dispatch_send):
            with pytest.raises(ConfigError, match="dispatch_send has been called; call dispatch_receive with its"):
                call(**arguments())
        with pytest.raises(ConfigError, match="combine of a dispatch whose rows have not arrived"):
            exchange.combine(torch.ones(8, H), got)
        with pytest.raises(ConfigError, match="that is not the result of the last dispatch_send"):
            exchange.dispatch_receive(replace(got))
        assert exchange.dispatch_receive(got) is got
        sent = exchange.combine_send(torch.ones(8, H), got)
        with pytest.raises(ConfigError, match="combine_send has been called; call combine_receive with its"):
            exchange.combine(torch.ones(8, H), got)
        exchange.dispatch_receive(exchange.dispatch_send(**arguments()))  # combine's halves do not order it
        assert torch.equal(exchange.combine_receive(sent), want)
        with pytest.raises(ConfigError, match="that is not the result of the last combine_send"):
            exchange.combine_receive(sent)
    close([world])


def test_a_spec_takes_dtypes_of_torch() -> None:
    """It is the spec of the name: equal, with one hash, also where it is pickled or changed."""
    by_name, by_torch = (replace(SPEC, dtype=dtype) for dtype in ("float32", torch.float32))
    assert by_torch == by_name and hash(by_torch) == hash(by_name) and by_torch.dtype == "float32"
    assert pickle.loads(pickle.dumps(by_torch)) == replace(by_torch, tokens=SPEC.tokens) == by_name
    with pytest.raises(ConfigError, match="dtype is 'float64'; it is one of bfloat16, float16, float32"):
        replace(SPEC, dtype=torch.float64)
