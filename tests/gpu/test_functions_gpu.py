"""Norms, SwiGLU and expressions of raymoe.moe on a GPU: eager, captured and compiled; and workload pointwise."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import raymoe  # noqa: E402
from raymoe.errors import ConfigError  # noqa: E402
from raymoe.moe import add_rms_norm, layer_norm, rms_norm, swiglu  # noqa: E402
from raymoe.rows import row_launch  # noqa: E402
from raymoe.rows.elementwise import add  # noqa: E402
from raymoe.workload.exchange.received import dequantised  # noqa: E402
from raymoe.workload.pointwise.operations import OPERATIONS  # noqa: E402
from raymoe.workload.pointwise.row_systems import OWN, SYSTEMS  # noqa: E402
from tests.gpu.ranks import NEEDS_GPU  # noqa: E402
from tests.gpu.test_exchange_workload import run  # noqa: E402

pytestmark = [*NEEDS_GPU, pytest.mark.usefixtures("gpu")]

BF16 = torch.bfloat16


def drawn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


FUNCTIONS = {
    "rms_norm": (lambda x, w: rms_norm(x, w), [(300, 7168), (7168,)]),
    "add_rms_norm": (lambda x, r, w: add_rms_norm(x, r, w), [(300, 7168), (300, 7168), (7168,)]),
    "layer_norm": (lambda x, w, b: layer_norm(x, w, b), [(3, 100, 4096), (4096,), (4096,)]),
    "swiglu": (lambda x: swiglu(x), [(300, 4096)]),
    "swiglu with weights": (lambda x, w: swiglu(x, weights=w.float()), [(300, 4096), (300,)]),
    "pointwise": (
        lambda a, b, c, d: raymoe.pointwise("silu(a) * b + where(c > 0, c, d)", a=a, b=b, c=c, d=d),
        [(300, 2048), (2048,), (300, 2048), (300, 1)],
    ),
}


def test_three_terms_are_added_in_float32_and_their_gradients_share_memory():
    terms = [drawn(300, 7168, seed=seed).requires_grad_() for seed in range(3)]
    total, dy = add(*terms), drawn(300, 7168, seed=9)
    assert torch.equal(total, sum(each.float() for each in terms).bfloat16())
    gradients = torch.autograd.grad(total, terms, dy)
    assert all(torch.equal(each, dy) for each in gradients)
    assert len({each.data_ptr() for each in gradients}) == 1


def results_and_gradients(function: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    found = function(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    outgoing = [drawn(*each.shape, dtype=each.dtype, seed=7 + index) for index, each in enumerate(found)]
    return [*found, *torch.autograd.grad(found, leaves, outgoing)]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_and_formulas_agree(name, dtype, monkeypatch):
    function, shapes = FUNCTIONS[name]
    leaves = [drawn(*shape, dtype=dtype, seed=index).requires_grad_() for index, shape in enumerate(shapes)]
    assert row_launch.takes(leaves[0])
    found = results_and_gradients(function, leaves)
    monkeypatch.setattr("raymoe.rows.row_launch.takes", lambda _: False)
    step = {BF16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    for mine, want in zip(found, results_and_gradients(function, leaves), strict=True):
        assert mine.dtype == want.dtype
        largest = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(mine.float(), want.float(), rtol=0, atol=2 * step * largest)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_later_calls_of_a_kind_take_their_own_rows_and_tensors(name):
    """With gradients and without, through the operators, and with other rows, strides and streams."""
    function, shapes = FUNCTIONS[name]
    rows = shapes[0][0]
    for count in (rows, 17, 1, 2, rows - 1, 0, rows):
        given = [drawn(*shape, seed=count + index) for index, shape in enumerate(shapes)]
        given = [each[:count] if len(each) == rows else each for each in given]
        leaves = [each.detach().requires_grad_() for each in given]
        with torch.no_grad():
            plain = _tuple(function(*given))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            found = results_and_gradients(function, leaves)
            torch.cuda.current_stream().synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):  # which sees operators
            operated = results_and_gradients(function, leaves)
        wide = [torch.cat((each, each), dim=-1)[..., : each.shape[-1]] for each in given]
        apart = _tuple(function(*(each if each.dim() > 1 else given[at] for at, each in enumerate(wide))))
        torch.cuda.synchronize()
        assert all(torch.equal(mine, other) for mine, other in zip(found, operated, strict=True))
        for mine, with_gradients, strided in zip(plain, found, apart, strict=False):
            assert torch.equal(mine, with_gradients) and torch.equal(mine, strided)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_the_same_in_every_run(name):
    function, shapes = FUNCTIONS[name]
    leaves = [drawn(*shape, seed=index).requires_grad_() for index, shape in enumerate(shapes)]
    first = results_and_gradients(function, leaves)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, results_and_gradients(function, leaves), strict=True))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_replays_forward_and_backward_on_new_values(name):
    function, shapes = FUNCTIONS[name]
    leaves = [drawn(*shape, seed=index).requires_grad_() for index, shape in enumerate(shapes)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    outgoing = [torch.ones_like(each) for each in _tuple(function(*leaves))]

    def step() -> list[torch.Tensor]:
        found = _tuple(function(*leaves))
        return [*found, *torch.autograd.grad(found, leaves, outgoing)]

    with torch.cuda.stream(stream):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        for each in leaves:
            each.copy_(drawn(*each.shape, seed=50))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(mine, want) for mine, want in zip(captured, step(), strict=True))


def _tuple(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def test_the_first_call_of_a_shape_is_refused_in_a_capture():
    x, weight, graph = drawn(3, 1208), drawn(1208), torch.cuda.CUDAGraph()
    with pytest.raises(ConfigError, match="call it once before the capture"), torch.cuda.graph(graph):
        rms_norm(x, weight)
    rms_norm(x, weight)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_compile_takes_the_functions_whole(name):
    function, shapes = FUNCTIONS[name]
    leaves = [drawn(*shape, seed=index).requires_grad_() for index, shape in enumerate(shapes)]
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True)
    for mine, want in zip(
        results_and_gradients(compiled, leaves), results_and_gradients(function, leaves), strict=True
    ):
        assert torch.equal(mine, want)


@pytest.mark.parametrize("scales", ["row", "column"])
def test_quantised_rows_are_near(scales):
    x, weight = drawn(4099, 7168), drawn(7168, seed=1)
    values, found = rms_norm(x, weight, output="float8_e4m3", scales=scales)
    want = rms_norm(x.float(), weight.float())
    torch.testing.assert_close(dequantised(values, found), want, rtol=2**-4, atol=0.02)


def test_rows_that_kernels_do_not_take_are_refused():
    with pytest.raises(ConfigError, match="multiples of 8"):
        rms_norm(drawn(4, 100), drawn(100))
    with pytest.raises(ConfigError, match="up to 32768"):
        rms_norm(drawn(4, 32776), drawn(32776))


# Workload pointwise.


def job(op: str, **pointwise: Any) -> dict[str, Any]:
    return {
        "name": "test",
        "workload": "pointwise",
        "world": {"ranks": 1, "device": "cuda"},
        "shape": {"tokens": 1200, "hidden": 1024, "ffn": 512},
        "pointwise": {"op": op, **pointwise},
        "steps": {"warmup": 1, "count": 2},
    }


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_system_has_a_line_and_ours_are_verified(ranks, op):
    (lines,) = ranks.run(1, run, job(op))
    assert [line["backend"] for line in lines] == list(SYSTEMS)
    for line in lines:
        if line["backend"] in OWN:
            assert (line["verified"], line["graph"], line["l2"]) == (True, True, "cold"), line
            assert line["gbps_memory"] > 0
        else:
            assert line.get("skipped") or line["verified"], line
    assert next(line for line in lines if line["backend"] == "eager")["verified"]


def test_stages_and_sms_are_those_that_were_asked(ranks):
    (lines,) = ranks.run(1, run, job("rms_norm", stages=2, sms=16))
    ours = next(line for line in lines if line["backend"] == "raymoe")
    assert (ours["stages"], ours["sms"], ours["verified"]) == (2, 16, True)


def test_few_rows_are_timed_in_graphs_of_many_calls(ranks):
    given = job("swiglu_experts")
    given["shape"]["tokens"] = 64
    (lines,) = ranks.run(1, run, given)
    assert all(line["verified"] for line in lines if line["backend"] in OWN)
