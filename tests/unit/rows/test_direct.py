"""Functions over rows launch directly where nobody looks on, and go through their operators everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import raymoe
from raymoe.moe import add_rms_norm, layer_norm, rms_norm, router, swiglu
from raymoe.moe.router_formulas import RouterForm
from raymoe.rows import direct, norm
from raymoe.rows.direct import directly
from tests.unit.rows.rows_driver import RowsDriver


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# By name: the function, the shapes of its arguments, and the operators of the calls forward and backward.
FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[str]]] = {
    "rms_norm": (lambda x, w: rms_norm(x, w), [(5, 64), (64,)], ["rms_norm", "rms_norm_backward"]),
    "rms_norm in any batch": (
        lambda x, w: rms_norm(x, w, batch_invariant=True),
        [(5, 64), (64,)],
        ["rms_norm", "rms_norm_backward"],
    ),
    "add_rms_norm": (
        lambda x, r, w: torch.cat(add_rms_norm(x, r, w)),
        [(5, 64), (5, 64), (64,)],
        ["rms_norm", "rms_norm_backward"],
    ),
    "add_rms_norm in any batch": (
        lambda x, r, w: torch.cat(add_rms_norm(x, r, w, batch_invariant=True)),
        [(5, 64), (5, 64), (64,)],
        ["rms_norm", "rms_norm_backward"],
    ),
    "layer_norm": (
        lambda x, w, b: layer_norm(x, w, b),
        [(2, 5, 64), (64,), (64,)],
        ["layer_norm", "layer_norm_backward"],
    ),
    "layer_norm in any batch": (
        lambda x, w, b: layer_norm(x, w, b, batch_invariant=True),
        [(2, 5, 64), (64,), (64,)],
        ["layer_norm", "layer_norm_backward"],
    ),
    "swiglu": (lambda x: swiglu(x), [(5, 128)], ["swiglu", "swiglu_backward"]),
    "swiglu with weights": (
        lambda x, w: swiglu(x, torch.tensor([0, 2, 5]), w),
        [(5, 128), (5,)],
        ["weighted_swiglu", "weighted_swiglu_backward"],
    ),
    "pointwise": (
        lambda a, b: raymoe.pointwise("silu(a) * b + a", a=a, b=b),
        [(5, 64), (64,)],
        ["pointwise", "pointwise_backward"],
    ),
}
QUANTISED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], str]] = {
    "rms_norm": (lambda x, w: rms_norm(x, w, output="float8_e4m3"), [(5, 64), (64,)], "rms_norm_fp8"),
    "layer_norm": (
        lambda x, w, b: layer_norm(x, w, b, output="float8_e4m3"),
        [(5, 64), (64,), (64,)],
        "layer_norm_fp8",
    ),
    "swiglu": (lambda x: swiglu(x, output="float8_e4m3"), [(5, 128)], "swiglu_fp8"),
}


class Operators(TorchDispatchMode):
    """Records the operators of raymoe that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "raymoe":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def never_directly(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    yield lambda: [monkeypatch.setattr(direct, "_profiling", lambda: True)][0]


def arguments(shapes: list[tuple[int, ...]], *, gradients: bool = True) -> list[torch.Tensor]:
    return [drawn(*shape, seed=index).requires_grad_(gradients) for index, shape in enumerate(shapes)]


def results(function: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    y = function(*inputs)
    return [y, *torch.autograd.grad(y, inputs, drawn(*y.shape, seed=9))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_ways_have_the_same_results_and_gradients(name: str, never_directly: Callable[[], None]) -> None:
    function, shapes, _ = FUNCTIONS[name]
    inputs = arguments(shapes)
    found = results(function, inputs)
    assert all(directly(each) for each in inputs)
    never_directly()
    assert not directly(inputs[0])
    assert all(torch.equal(result, want) for result, want in zip(found, results(function, inputs), strict=True))
    assert found[0].grad_fn is not None and not found[1].requires_grad


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_dispatch_mode_sees_the_operators_forward_and_backward(name: str) -> None:
    function, shapes, names = FUNCTIONS[name]
    inputs = arguments(shapes)
    y = function(*inputs)
    with Operators() as seen:
        results(function, inputs)
        torch.autograd.grad(y, inputs, torch.ones_like(y))  # of a forward call that nobody looked on
    assert seen.names == [*names, names[1]]


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_results_are_the_same_both_ways(name: str) -> None:
    function, shapes, op = QUANTISED[name]
    inputs = arguments(shapes, gradients=False)
    found = function(*inputs)
    with Operators() as seen:
        want = function(*inputs)
    assert seen.names == [op]
    assert torch.equal(found[0].view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(found[1], want[1])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_gradients_are_refused_and_not_wrong(name: str) -> None:
    function, shapes, _ = FUNCTIONS[name]
    inputs = arguments(shapes)
    y = function(*inputs)
    (first, *_) = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        first.sum().backward()


def test_no_call_has_a_gradient_where_none_is_needed() -> None:
    x, weight = drawn(5, 64).requires_grad_(), drawn(64)
    with torch.no_grad():
        assert not rms_norm(x, weight).requires_grad
    with torch.inference_mode():
        assert rms_norm(x, weight).is_inference()
    assert not rms_norm(x.detach(), weight).requires_grad
    assert rms_norm(x.detach(), weight.requires_grad_()).requires_grad


class Subclass(torch.Tensor):
    """Its operations are seen by `__torch_function__`."""

    seen: list[str] = []  # noqa: RUF012  (a record of the test)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_and_wrappers_go_through_the_operator() -> None:
    x, weight = drawn(5, 64), drawn(64)
    assert directly(x, torch.nn.Parameter(weight), torch.nn.Buffer(weight))
    found = rms_norm(x.as_subclass(Subclass), weight)
    assert isinstance(found, Subclass) and any("raymoe.rms_norm" in each for each in Subclass.seen)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    assert not directly(fake)
    negative = torch.complex(x, x).conj().imag
    assert negative.is_neg() and not directly(negative)
    torch.testing.assert_close(rms_norm(negative, weight), rms_norm(-x, weight))
    y = rms_norm(negative, weight.clone().requires_grad_())
    with mock.patch.object(norm, "_compute_rms_norm_backward", side_effect=AssertionError("a negative bit is ignored")):
        y.sum().backward()  # the operator has its own reference to the computation
    assert not directly(torch._efficientzerotensor((5, 64)))


def test_transforms_tracing_and_the_profiler_see_the_operator() -> None:
    x, weight = drawn(5, 64), drawn(64)
    want = rms_norm(x, weight)
    torch.testing.assert_close(torch.func.vmap(lambda row: rms_norm(row, weight))(x), want)
    wrappers: list[torch.Tensor] = []
    torch.func.vmap(lambda row: wrappers.append(row) or row)(x)
    assert not directly(wrappers[0]), "a wrapper that a transform has left"
    traced = torch.jit.trace(lambda x: rms_norm(x, weight), (x,))
    assert "raymoe::rms_norm" in str(traced.graph)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: rms_norm(x, weight))(x)
    assert "raymoe.rms_norm" in graph.code
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        rms_norm(x, weight)
    assert "raymoe::rms_norm" in {event.name for event in profiled.events()}
    with torch.device("meta"):  # a mode of functions
        assert not directly(x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_compiler_sees_operators_and_no_break(name: str) -> None:
    function, shapes, names = FUNCTIONS[name]
    inputs, graphs = arguments(shapes), []

    def backend(module: Any, _inputs: Any) -> Any:
        graphs.append(module.code)
        return module

    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for result, want in zip(results(compiled, inputs), results(function, inputs), strict=True):
        assert torch.equal(result, want)
    assert len(graphs) == 1 and f"raymoe.{names[0]}" in graphs[0]


@pytest.mark.parametrize("selective", [False, True])
def test_checkpoints_of_both_kinds_recompute_the_same(selective: bool) -> None:
    x, weight = drawn(5, 64).requires_grad_(), drawn(64).requires_grad_()
    want = results(rms_norm, [x, weight])
    saved = [torch.ops.raymoe.rms_norm.default]
    contexts: Any = (lambda: create_selective_checkpoint_contexts(saved)) if selective else None
    options = {"context_fn": contexts} if selective else {}
    found = results(lambda *inputs: checkpoint(rms_norm, *inputs, use_reentrant=False, **options), [x, weight])
    assert all(torch.equal(result, exact) for result, exact in zip(found, want, strict=True))


def test_autocast_changes_nothing() -> None:
    x, weight = drawn(5, 64).requires_grad_(), drawn(64).requires_grad_()
    want = results(rms_norm, [x, weight])
    for context in (torch.autocast("cpu", dtype=torch.bfloat16), nullcontext()):
        with context:
            found = results(rms_norm, [x, weight])
        assert all(torch.equal(result, exact) for result, exact in zip(found, want, strict=True))


def test_hooks_of_saved_tensors_see_them() -> None:
    x, weight, seen = drawn(5, 64).requires_grad_(), drawn(64).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: seen.append(each) or each.clone(), lambda each: each):
        y = rms_norm(x, weight)
    y.sum().backward()
    assert len(seen) == 2 and x.grad is not None


def test_a_router_that_will_be_differentiated_loads_both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture of forward and backward follows a warm-up, which may have been forward alone."""
    driver = RowsDriver(monkeypatch)
    form, logits = RouterForm(64, 4, "sigmoid", scale=2.5), drawn(5, 64)
    (launched,) = driver.launches_of(lambda: router._choose(logits, None, form))
    assert launched.source.stem == "router" and len(driver.loaded) == 1
    _, weights = router._Route.of(logits.requires_grad_(), None, form)
    assert [each.stem for each in driver.loaded] == ["router", "router_backward"]
    driver.capturing = True
    launches = driver.launches_of(lambda: torch.autograd.grad(weights, logits, torch.ones_like(weights)))
    assert [each.source.stem for each in launches] == ["router_backward"]
