"""The kernels that stream rows through one GPU, against float64, in sizes that only a GPU has time for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from raymoe.cuda import driver  # noqa: E402
from raymoe.cuda.gpu import Gpu  # noqa: E402
from raymoe.errors import ConfigError  # noqa: E402
from raymoe.rows import row_launch, tile_counters  # noqa: E402
from raymoe.rows.elementwise_kernels import (  # noqa: E402
    Pointwise,
    Swiglu,
    SwigluBackward,
    new_piece_sums,
)
from raymoe.rows.norm_kernels import (  # noqa: E402
    LayerNorm,
    LayerNormBackward,
    RmsNorm,
    RmsNormBackward,
)
from raymoe.rows.pipe_shape import Limits  # noqa: E402
from tests.unit.rows.emulated_pipe import close, judge_fp8  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-5
HIDDEN = [64, 72, 128, 1024, 2048, 4096, 5120, 7168, 8192, 16384, 32768]
PIPED, PLAIN, ROW, IN_TURN = (Limits(loading=each) for each in ("PIPED", "PLAIN", "ROW", "IN_TURN"))
SILU = "([&] { const float t1 = silu(v0); return t1 * v1 + v2; }())"


def rows_of(rows: int, hidden: int, dtype: torch.dtype = BF16, seed: int = 0, gap: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    whole = torch.randn(rows, hidden + gap, device="cuda", dtype=F32).mul_(3).add_(0.5).to(dtype)
    return whole[:, :hidden]


def rms_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double()


def layer_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    centred = wide - wide.mean(1, keepdim=True)
    return centred * (centred.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double() + bias.double()


def check_norms(x: torch.Tensor, limits: Limits) -> None:
    """RMSNorm, add + RMSNorm and LayerNorm of x."""
    rows, hidden = x.shape
    weight, bias = (rows_of(1, hidden, x.dtype, seed)[0] for seed in (5, 6))
    residual = rows_of(rows, hidden, x.dtype, 7)
    out, added = torch.empty(rows, hidden, dtype=x.dtype, device="cuda"), torch.empty_like(residual)
    RmsNorm(x, weight, out, EPS).launch(limits)
    close(out, rms_of(x, weight), size=0.1)
    RmsNorm(x, weight, out, EPS, None, residual, added).launch(limits)
    assert torch.equal(added, (x.float() + residual.float()).to(x.dtype))
    close(out, rms_of(added, weight), size=0.1)
    LayerNorm(x, weight, bias, out, EPS).launch(limits)
    close(out, layer_of(x, weight, bias), size=10)


def check_gradients(x: torch.Tensor, limits: Limits) -> None:
    rows, hidden = x.shape
    dy = rows_of(rows, hidden, x.dtype, 8)
    weight, bias = (rows_of(1, hidden, x.dtype, seed)[0] for seed in (5, 6))
    for kind in ("rms", "layer"):
        wide, by, plus = (each.double().requires_grad_() for each in (x, weight, bias))
        (rms_of(wide, by) if kind == "rms" else layer_of(wide, by, plus)).backward(dy.double())
        dx, d_weight, d_bias = torch.empty_like(dy), torch.empty_like(weight), torch.empty_like(bias)
        if kind == "rms":
            RmsNormBackward(dy, x, weight, dx, d_weight, EPS).launch(limits)
        else:
            LayerNormBackward(dy, x, weight, dx, d_weight, d_bias, EPS).launch(limits)
            close(d_bias, plus.grad, size=4 * rows**0.5)
        close(dx, wide.grad, size=10)
        if kind == "rms":
            RmsNormBackward(dy, x, weight, dx, d_weight, EPS, d_total=dy).launch(limits)
            close(dx, wide.grad + dy.double(), size=10)
        close(d_weight, by.grad, size=10 * rows**0.5)


def check_fp8(rows: int, hidden: int, limits: Limits, layout: str) -> None:
    """The norms and SwiGLU with results as 8-bit floats."""
    blocks = -(-hidden // 128)
    x, gate_up = rows_of(rows, hidden), rows_of(rows, 2 * hidden, seed=1)
    weight, bias = rows_of(1, hidden, seed=5)[0], rows_of(1, hidden, seed=6)[0]
    values = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.empty((rows, blocks) if layout == "row" else (blocks, rows), device="cuda")
    scales = scales if layout == "row" else scales.T
    RmsNorm(x, weight, values, EPS, scales).launch(limits)
    judge_fp8(values.float(), scales, rms_of(x, weight))
    LayerNorm(x, weight, bias, values, EPS, scales).launch(limits)
    judge_fp8(values.float(), scales, layer_of(x, weight, bias))
    Swiglu(gate_up, values, None, scales).launch(limits)
    gate, up = gate_up.double().chunk(2, 1)
    judge_fp8(values.float(), scales, torch.nn.functional.silu(gate) * up)


def check_pieces(rows: int, hidden: int, limits: Limits, dtype: torch.dtype = BF16) -> None:
    """SwiGLU of the rows that are there, its gradient, and an expression."""
    there = rows // 4 + 1
    gate_up, dy = rows_of(rows, 2 * hidden, dtype), rows_of(rows, hidden, dtype, 1)
    offsets = torch.tensor([0, there // 2, there], dtype=torch.int32, device="cuda")
    out, d_gate_up = torch.full_like(dy, 7), torch.full_like(gate_up, 7)
    Swiglu(gate_up, out, offsets).launch(limits)
    SwigluBackward(dy, gate_up, d_gate_up, offsets).launch(limits)
    wide = gate_up[:there].double().requires_grad_()
    gate, up = wide.chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up
    want.backward(dy[:there].double())
    close(out[:there], want.detach(), size=0.1)
    close(d_gate_up[:there], wide.grad, size=1)
    assert bool((out[there:] == 7).all()) and bool((d_gate_up[there:] == 7).all())
    check_weighted(gate_up, dy, offsets, there, limits)
    row, column = rows_of(1, hidden, dtype, 1)[0], rows_of(rows, 8, dtype, 2)[:, :1]
    Pointwise(SILU, [dy, row, column], out).launch(limits)
    close(out, torch.nn.functional.silu(dy.double()) * row.double() + column.double(), size=1)


def check_weighted(gate_up: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor, there: int, limits: Limits) -> None:
    """SwiGLU with a weight for each row, its gradients, and those of the weights, twice the same."""
    out, d_gate_up = torch.full_like(dy, 7), torch.full_like(gate_up, 7)
    weights = rows_of(1, len(dy), F32, 3)[0]
    Swiglu(gate_up, out, offsets, weights=weights).launch(limits)
    found = []
    for _ in range(2):
        sums = new_piece_sums(gate_up, offsets, limits).fill_(7)
        SwigluBackward(dy, gate_up, d_gate_up, offsets, weights, sums).launch(limits)
        assert bool((sums[:, there:] == 7).all())
        found.append(sums[:, :there].sum(dim=0))
    assert torch.equal(*found)
    wide, share = gate_up[:there].double().requires_grad_(), weights[:there].double().requires_grad_()
    gate, up = wide.chunk(2, 1)
    h, wide_dy = torch.nn.functional.silu(gate) * up, dy[:there].double()
    want = h * share[:, None]
    want.backward(wide_dy)
    close(out[:there], want.detach(), size=0.1)
    close(d_gate_up[:there], wide.grad, size=1)
    size = (wide_dy * h).detach().abs().sum(dim=1)  # the gradient of a weight is a sum that may cancel
    assert bool(((found[0].double() - share.grad).abs() <= 1e-6 * size).all())
    assert bool((out[there:] == 7).all()) and bool((d_gate_up[there:] == 7).all())


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("rows", [1, 127, 1024, 4099])
def test_norms_of_any_size(rows: int, hidden: int) -> None:
    check_norms(rows_of(rows, hidden), Limits())


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("hidden", [72, 1032, 7168, 32768])
def test_norms_of_other_dtypes(dtype: torch.dtype, hidden: int) -> None:
    for limits in (PIPED, PLAIN, ROW, IN_TURN):
        check_norms(rows_of(515, hidden, dtype), limits)


@pytest.mark.parametrize("sms", [1, 32, 48, 132])
@pytest.mark.parametrize("stages", [None, 1, 2, 3, 4, 8])
def test_norms_on_any_number_of_sms_and_stages(sms: int, stages: int | None) -> None:
    check_norms(rows_of(1500, 7168), Limits(sms, stages))


def test_rows_may_be_apart_and_a_tensor_may_be_larger_than_4_gib() -> None:
    check_norms(rows_of(1500, 1024, gap=24), Limits())
    x = torch.zeros(160_000, 16384, dtype=BF16, device="cuda")
    x[-1] = rows_of(1, 16384)[0]
    weight, out = torch.ones(16384, dtype=BF16, device="cuda"), torch.empty_like(x)
    RmsNorm(x, weight, out, EPS).launch()
    close(out[-1:], rms_of(x[-1:], weight), size=0.1)
    assert not bool(out[:-1].any())


def test_millions_of_short_rows() -> None:
    x, weight = rows_of(3_000_001, 64), torch.ones(64, dtype=BF16, device="cuda")
    out = torch.empty_like(x)
    RmsNorm(x, weight, out, EPS).launch()
    close(out, rms_of(x, weight), size=0.1)


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("limits", [PIPED, PLAIN, IN_TURN], ids=lambda each: each.loading)
@pytest.mark.parametrize("hidden", [72, 2048, 7168])
def test_results_as_8_bit_floats(hidden: int, limits: Limits, layout: str) -> None:
    check_fp8(999, hidden, limits, layout)


@pytest.mark.parametrize("sms", [None, 1, 48])
@pytest.mark.parametrize("stages", [None, 1, 4])
@pytest.mark.parametrize("rows", [1025, 4099])
def test_results_as_8_bit_floats_of_rows_from_a_counter(rows: int, stages: int | None, sms: int | None) -> None:
    for hidden in (72, 4096, 7168):
        check_fp8(rows, hidden, Limits(sms, stages), "row")


def norms_with_counters(count: int, limits: Limits) -> tuple[list[RmsNorm], Callable[[], None]]:
    """Calls whose blocks take rows from a counter, and a check of their results, which it then spoils."""
    rows, hidden = 2000, 7168
    weight = rows_of(1, hidden, seed=5)[0]
    calls = [
        RmsNorm(
            rows_of(rows, hidden, seed=seed),
            weight,
            torch.zeros(rows, hidden, dtype=torch.float8_e4m3fn, device="cuda"),
            EPS,
            torch.zeros(rows, hidden // 128, device="cuda"),
        )
        for seed in range(count)
    ]
    assert all(call.kernel_call(limits).dynamic for call in calls)

    def check() -> None:
        torch.cuda.synchronize()
        for call in calls:
            judge_fp8(call.out.float(), call.scales, rms_of(call.x, weight))
            call.out.zero_()
            call.scales.zero_()
        torch.cuda.synchronize()

    return calls, check


def test_launches_that_run_at_once_take_rows_from_counters_of_their_own() -> None:
    limits = Limits(30)
    calls, check = norms_with_counters(8, limits)
    streams = [torch.cuda.Stream() for _ in range(4)]
    calls[0].launch(limits)
    torch.cuda.synchronize()
    for _ in range(20):
        for number, call in enumerate(calls):
            with torch.cuda.stream(streams[number % 4]):
                call.launch(limits)
        check()
    graphs = [torch.cuda.CUDAGraph() for _ in streams]
    for graph, first in zip(graphs, range(0, 8, 2), strict=True):
        with torch.cuda.graph(graph, stream=streams[0]):
            for call in calls[first : first + 2]:
                call.launch(limits)
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        check()


def test_a_capture_can_make_counters(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, check = norms_with_counters(5, Limits())
    calls[0].launch()
    torch.cuda.synchronize()
    monkeypatch.setattr(tile_counters, "TOGETHER", 2)
    monkeypatch.setattr(row_launch.device_of(0), "_counters", tile_counters.TileCounters(gpu))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call.launch()
    for _ in range(3):
        graph.replay()
        check()


def new_stream() -> int:
    return int(driver.call("cuStreamCreate", int(driver.bindings().CUstream_flags.CU_STREAM_NON_BLOCKING)))


def test_a_new_stream_with_the_number_of_a_destroyed_one_takes_another_counter(gpu: Gpu) -> None:
    """The driver gives numbers again while the work of the destroyed stream still runs."""
    limits = Limits(30)
    calls, check = norms_with_counters(2, limits)
    counters = tile_counters.TileCounters(gpu)
    again = 0
    for _ in range(50):
        old = new_stream()
        first_counter = counters.of_stream(old)
        with torch.cuda.stream(torch.cuda.ExternalStream(old)):
            torch.cuda._sleep(2_000_000)  # about 1 ms
            calls[0].launch(limits)
        driver.call("cuStreamDestroy", old)
        new = new_stream()
        with torch.cuda.stream(torch.cuda.ExternalStream(new)):
            calls[1].launch(limits)
        if new == old:
            again += 1
            assert counters.of_stream(new) != first_counter
        check()
        driver.call("cuStreamDestroy", new)
    if not again:
        pytest.skip("the driver gave no number of a stream again")


def test_default_streams_have_counters_by_context_and_thread(gpu: Gpu) -> None:
    counters, torch_stream = tile_counters.TileCounters(gpu), torch.cuda.Stream().cuda_stream
    streams = (0, 1, 2, torch_stream)
    mine = [counters.of_stream(stream) for stream in streams]
    assert mine == [counters.of_stream(stream) for stream in streams]
    with ThreadPoolExecutor(1) as pool:
        theirs = list(pool.map(counters.of_stream, streams))
    assert theirs[2] != mine[2], "each thread has a default stream of this number"
    assert theirs[3] == mine[3]


def test_a_kernel_has_one_launch_for_all_numbers_of_rows() -> None:
    device = row_launch.device_of(0)
    x, weight = rows_of(3000, 1064), rows_of(1, 1064, seed=5)[0]  # a shape of no other test
    out, dx, d_weight = torch.empty_like(x), torch.empty_like(x), torch.empty_like(weight)
    before = len(device.launches)
    for rows in range(1, 3001):
        RmsNorm(x[:rows], weight, out[:rows], EPS).launch()
        RmsNormBackward(x[:rows], x[:rows], weight, dx[:rows], d_weight, EPS).launch()
    close(out, rms_of(x, weight), size=0.1)
    assert len(device.launches) - before < 20
    for rows in (1, 2, 40, 133, 700, 2999):
        RmsNorm(x[:rows], weight, out.fill_(7)[:rows], EPS).launch()
        close(out[:rows], rms_of(x[:rows], weight), size=0.1)
        assert bool((out[rows:] == 7).all())


def test_threads_on_streams_of_their_own_share_launches() -> None:
    weight = rows_of(1, 2048, seed=5)[0]
    inputs = [rows_of(100 + 7 * each, 2048, seed=each) for each in range(8)]
    calls = [RmsNorm(x, weight, torch.empty_like(x), EPS) for x in inputs]
    torch.cuda.synchronize()

    def run(call: RmsNorm) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(300):
                call.launch()
            torch.cuda.current_stream().synchronize()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, calls))
    for each in calls:
        close(each.out, rms_of(each.x, weight), size=0.1)


@pytest.mark.parametrize("limits", [PIPED, PLAIN, IN_TURN, Limits(48)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("hidden", [72, 7168])
def test_swiglu_and_expressions(hidden: int, dtype: torch.dtype, limits: Limits) -> None:
    check_pieces(2000, hidden, limits, dtype)


@pytest.mark.parametrize("hidden", [72, 1024, 7168, 32768])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_gradients_of_the_norms(dtype: torch.dtype, hidden: int) -> None:
    for limits in (PIPED, PLAIN, IN_TURN):
        check_gradients(rows_of(1100, hidden, dtype), limits)


@pytest.mark.parametrize(("dtype", "hidden"), [(BF16, 7168), (BF16, 8192), (F16, 4104), (F32, 4096)], ids=str)
def test_gradients_of_few_long_rows(dtype: torch.dtype, hidden: int) -> None:
    for rows in (1, 48, 127, 132):
        for limits in (Limits(), Limits(rows), Limits(max(1, rows - 1))):  # with fewer SMs than rows: by the pipeline
            check_gradients(rows_of(rows, hidden, dtype), limits)


@pytest.mark.parametrize("rows", [100, 4096])
def test_gradients_are_the_same_in_every_run(rows: int) -> None:
    x, dy, weight = rows_of(rows, 7168), rows_of(rows, 7168, seed=1), rows_of(1, 7168, seed=5)[0]
    found = []
    for _ in range(5):
        dx, d_weight = torch.empty_like(x), torch.empty_like(weight)
        RmsNormBackward(dy, x, weight, dx, d_weight, EPS).launch()
        found.append((dx, d_weight))
    assert all(torch.equal(a, b) for each in found[1:] for a, b in zip(found[0], each, strict=True))


def test_calls_can_be_captured_after_a_first_one() -> None:
    x, weight = rows_of(600, 1096), rows_of(1, 1096, seed=5)[0]  # a shape of no other test
    out = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ConfigError, match="call it once before the capture"), torch.cuda.graph(graph):
        RmsNorm(x, weight, out, EPS).launch(Limits(sms=7))
    torch.cuda.synchronize()
    RmsNorm(x, weight, out, EPS).launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        RmsNorm(x, weight, out, EPS).launch()
    x.copy_(rows_of(600, 1096, seed=3))
    graph.replay()
    close(out, rms_of(x, weight), size=0.1)


@pytest.mark.parametrize("hidden", [72, 7168])
def test_layer_norm_of_equal_elements_is_the_bias(hidden: int) -> None:
    """A fused multiplication and addition would leave the rounding of the mean times the factor."""
    x, out = torch.full((5, hidden), 1e6, device="cuda"), torch.empty(5, hidden, device="cuda")
    weight, bias = (rows_of(1, hidden, F32, seed)[0] for seed in (5, 6))
    LayerNorm(x, weight, bias, out, EPS).launch(Limits())
    assert torch.equal(out, bias.expand_as(out))


def test_no_rows_are_no_work() -> None:
    x, weight = rows_of(0, 1024), rows_of(1, 1024)[0]
    d_weight = torch.full_like(weight, 7)
    RmsNorm(x, weight, torch.empty_like(x), EPS).launch()
    RmsNormBackward(x, x, weight, torch.empty_like(x), d_weight, EPS).launch()
    assert not bool(d_weight.any())
