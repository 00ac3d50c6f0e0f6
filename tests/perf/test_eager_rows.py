"""Measure how long an eager call of a function over rows keeps its thread, forward and backward, on one GPU.

    pytest -m perf tests/perf/test_eager_rows.py -s

prints a table, beside torch's own functions and the same formulas through torch.compile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch._functorch.config as compiler_settings  # noqa: E402

import raymoe  # noqa: E402
from raymoe.fp8 import quantise  # noqa: E402
from raymoe.moe import add_rms_norm, layer_norm, rms_norm, router_formulas, swiglu  # noqa: E402
from raymoe.moe.router import route  # noqa: E402
from raymoe.moe.router_formulas import RouterForm  # noqa: E402
from raymoe.rows import formulas  # noqa: E402
from raymoe.rows.elementwise import add  # noqa: E402
from tests.gpu.ranks import NEEDS_GPU  # noqa: E402

pytestmark = [*NEEDS_GPU, pytest.mark.perf]

MAX_FORWARD_US, MAX_BACKWARD_US = 25.0, 40.0
"""Of a call without gradients, and of a backward beyond what torch's engine takes for a function that computes nothing
(its thread for the GPU, and the checks of the gradients)."""
TOGETHER, CHUNKS = 50, 40
"""Calls between two waits for the GPU, fewer than its queue holds, and how often."""
RUNS = 3
"""Runs at most. Another user of the host's cores can double the times of a whole run."""
ROWS, HIDDEN, FFN, EXPERTS = 16, 7168, 2048, 256
BF16 = torch.bfloat16
FORM = RouterForm(EXPERTS, 8, "sigmoid", groups=8, topk_groups=4, scale=2.5)

Function = Callable[..., Any]


def first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found


@dataclass(frozen=True)
class Case:
    """A function, the same by torch, and its tensors. Only those of the first `leaves` have gradients."""

    ours: Function
    torchs: Function
    shapes: tuple[tuple[int, ...], ...]
    leaves: int = 0

    def tensors(self) -> list[Any]:
        source = torch.Generator("cuda").manual_seed(0)
        made = [torch.randn(shape, generator=source, device="cuda") for shape in self.shapes]
        return [each if each.shape in ((ROWS,), (EXPERTS,), (ROWS, EXPERTS)) else each.to(BF16) for each in made]


def silu_mul(gate_up: Any) -> Any:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def norm(x: Any, weight: Any) -> Any:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


def added_norm(x: Any, residual: Any, weight: Any) -> Any:
    total = x + residual
    return norm(total, weight), total


ROW, VECTOR = (ROWS, HIDDEN), (HIDDEN,)
CASES = {
    "rms_norm": Case(rms_norm, norm, (ROW, VECTOR), 2),
    "add_rms_norm": Case(add_rms_norm, added_norm, (ROW, ROW, VECTOR), 3),
    "layer_norm": Case(
        layer_norm, lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[-1:], w, b), (ROW, VECTOR, VECTOR), 3
    ),
    "swiglu": Case(swiglu, silu_mul, ((ROWS, 2 * FFN),), 1),
    "swiglu with weights": Case(
        lambda x, w: swiglu(x, weights=w),
        lambda x, w: (silu_mul(x.float()) * w[:, None]).to(x.dtype),
        ((ROWS, 2 * FFN), (ROWS,)),
        2,
    ),
    "pointwise": Case(
        lambda a, b, c: raymoe.pointwise("silu(a) * b + c", a=a, b=b, c=c),
        lambda a, b, c: torch.nn.functional.silu(a) * b + c,
        (ROW, ROW, ROW),
        3,
    ),
    "add of three": Case(add, lambda a, b, c: a + b + c, (ROW, ROW, ROW), 3),
    "router": Case(
        lambda logits, bias: route(logits, FORM, bias)[1],
        lambda logits, bias: router_formulas.route(logits, FORM, bias)[1],
        ((ROWS, EXPERTS), (EXPERTS,)),
        1,
    ),
    "rms_norm to fp8": Case(
        lambda x, w: rms_norm(x, w, output="float8_e4m3"),
        lambda x, w: quantise(formulas.rms_norm(x, w, 1e-6)),
        (ROW, VECTOR),
    ),
    "swiglu to fp8": Case(
        lambda x: swiglu(x, output="float8_e4m3"), lambda x: quantise(formulas.swiglu(x)), ((ROWS, 2 * FFN),)
    ),
}


def host_us(call: Callable[[], object]) -> float:
    """Microseconds that a call keeps its thread: the median over chunks of calls."""
    for _ in range(TOGETHER):
        call()
    times = []
    for _ in range(CHUNKS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(TOGETHER):
            call()
        times.append((time.perf_counter() - begin) / TOGETHER * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


class Nothing(torch.autograd.Function):
    """A function whose gradients are there already."""

    @staticmethod
    def forward(ctx: Any, out: Any, gradients: list[Any], *_leaves: Any) -> Any:
        ctx.gradients = gradients
        return out.clone()

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return None, None, *ctx.gradients


def backward_of(function: Function, case: Case) -> Callable[[], object]:
    given = case.tensors()
    leaves = [each.requires_grad_() for each in given[: case.leaves]]
    y = first(function(*given))
    dy = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def nothing(case: Case) -> Function:
    out = first(case.torchs(*case.tensors())).detach()
    gradients = [torch.zeros_like(each) for each in case.tensors()[: case.leaves]]
    return lambda *given: Nothing.apply(out, gradients, *given[: case.leaves])


def measured(case: Case) -> dict[str, float]:
    """Host times of raymoe, torch and torch.compile: forward, forward with gradients, and backward."""
    torch.compiler.reset()
    compiled = torch.compile(case.torchs, fullgraph=True, dynamic=False, options={"compile_threads": 1})
    found = {}
    for name, function in (("raymoe", case.ours), ("torch", case.torchs), ("compile", compiled)):
        given = case.tensors()
        with torch.no_grad():
            found[f"{name} forward"] = host_us(lambda f=function, g=given: f(*g))  # type: ignore[misc]
        if case.leaves:
            for each in given[: case.leaves]:
                each.requires_grad_()
            found[f"{name} training"] = host_us(lambda f=function, g=given: f(*g))  # type: ignore[misc]
            found[f"{name} backward"] = host_us(backward_of(function, case))
    if case.leaves:
        found["engine"] = host_us(backward_of(nothing(case), case))
    return found


def too_slow(name: str, case: Case, found: dict[str, float]) -> list[str]:
    """The bars that these times do not keep."""
    wrong = []
    if found["raymoe forward"] > min(MAX_FORWARD_US, found["compile forward"]):
        wrong.append(f"{name} forward")
    if case.leaves:
        beyond = found["raymoe backward"] - found["engine"]
        if beyond > MAX_BACKWARD_US or found["raymoe backward"] > found["compile backward"]:
            wrong.append(f"{name} backward")
    return wrong


COLUMNS = [f"{name} {what}" for what in ("forward", "training", "backward") for name in ("raymoe", "torch", "compile")]


def table(times: dict[str, dict[str, float]]) -> str:
    lines = [f"host us of a call on {torch.cuda.get_device_name()}, torch {torch.__version__}"]
    lines.append(f"{'':20s}" + "".join(f"{each:>17s}" for each in [*COLUMNS, "engine"]))
    for name, found in times.items():
        cells = [f"{found[each]:17.1f}" if each in found else f"{'':17s}" for each in [*COLUMNS, "engine"]]
        lines.append(f"{name:20s}" + "".join(cells))
    return "\n".join(lines)


@pytest.fixture(autouse=True)
def backward_passes_can_repeat() -> Iterator[None]:
    with compiler_settings.patch(donated_buffer=False):
        yield


@pytest.mark.timeout(1200)
def test_an_eager_call_takes_little_host_time(capsys: pytest.CaptureFixture[str]) -> None:
    wrong: list[str] = []
    for _ in range(RUNS):
        times = {name: measured(case) for name, case in CASES.items()}
        with capsys.disabled():
            print(f"\n{table(times)}")
        wrong = [each for name, case in CASES.items() for each in too_slow(name, case, times[name])]
        if not wrong:
            return
    pytest.fail(f"too slow in {RUNS} runs: {', '.join(wrong)}")
