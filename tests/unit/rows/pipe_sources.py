"""The kernels of raymoe/rows as they are launched for some shapes, without memory."""

from __future__ import annotations

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.rows.elementwise_kernels import Pointwise, Swiglu, SwigluBackward, new_piece_sums
from raymoe.rows.norm_kernels import LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward
from raymoe.rows.pipe_shape import Limits, Loading
from raymoe.rows.quantised_rows import Quantise

ROWS, FEW = 4096, 128
E4M3, F32 = torch.float8_e4m3fn, torch.float32
PIPED, IN_TURN, PLAIN, ROW = (Limits(loading=each) for each in ("PIPED", "IN_TURN", "PLAIN", "ROW"))


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def norms(
    hidden: int, dtype: torch.dtype = torch.bfloat16, fp8: bool = False, limits: Limits = PIPED, rows: int = ROWS
) -> tuple[KernelSource, KernelSource, KernelSource]:
    """RMSNorm, add + RMSNorm, LayerNorm."""
    x, weight = tensor(rows, hidden, dtype=dtype), tensor(hidden, dtype=dtype)
    out = tensor(rows, hidden, dtype=torch.float8_e4m3fn) if fp8 else x
    scales = tensor(rows, -(-hidden // 128), dtype=torch.float32) if fp8 else None
    plain, added = RmsNorm(x, weight, out, 1e-6, scales), RmsNorm(x, weight, out, 1e-6, scales, x, x)
    calls = [each.kernel_call(limits) for each in (plain, added)]
    calls.append(LayerNorm(x, weight, weight, out, 1e-5, scales).kernel_call(limits))
    first, second, third = (call.source for call in calls)
    return first, second, third


def pieces(
    dtype: torch.dtype = torch.bfloat16, fp8: bool = False, limits: Limits = PIPED
) -> tuple[KernelSource, KernelSource, KernelSource]:
    """SwiGLU, its gradient, and an expression."""
    gate_up, out = tensor(ROWS, 4096, dtype=dtype), tensor(ROWS, 2048, dtype=dtype)
    values = tensor(ROWS, 2048, dtype=torch.float8_e4m3fn) if fp8 else out
    scales = tensor(ROWS, 16, dtype=torch.float32) if fp8 else None
    vectors = [tensor(2048, dtype=dtype), tensor(ROWS, 1, dtype=dtype)]
    code = "([&] { const float t1 = silu(v0); return t1 * v1 + v2; }())"
    return (
        Swiglu(gate_up, values, None, scales).kernel_call(limits).source,
        SwigluBackward(out, gate_up, gate_up).kernel_call(limits).source,
        Pointwise(code, [out, *vectors], out).kernel_call(limits).source,
    )


def quantising(dtype: torch.dtype = torch.bfloat16, limits: Limits = PIPED, hidden: int = 7168) -> KernelSource:
    values, scales = (tensor(ROWS, size, dtype=kind) for size, kind in ((hidden, E4M3), (-(-hidden // 128), F32)))
    return Quantise(tensor(ROWS, hidden, dtype=dtype), values, scales).kernel_call(limits).source


def weighted_pieces(
    dtype: torch.dtype = torch.bfloat16, limits: Limits = PLAIN, ffn: int = 2048
) -> tuple[KernelSource, KernelSource]:
    """SwiGLU with a weight for each row, and its gradients."""
    gate_up, out = tensor(ROWS, 2 * ffn, dtype=dtype), tensor(ROWS, ffn, dtype=dtype)
    weights, offsets = tensor(ROWS, dtype=torch.float32), tensor(9, dtype=torch.int32)
    sums = new_piece_sums(gate_up, offsets, limits)
    return (
        Swiglu(gate_up, out, offsets, weights=weights).kernel_call(limits).source,
        SwigluBackward(out, gate_up, gate_up, offsets, weights, sums).kernel_call(limits).source,
    )


def backwards(
    hidden: int, dtype: torch.dtype = torch.bfloat16, loading: Loading | None = None, rows: int = ROWS
) -> tuple[KernelSource, ...]:
    """The gradients of RMSNorm and LayerNorm, the sums of their partials, and the gradients of add + RMSNorm."""
    x, weight = tensor(rows, hidden, dtype=dtype), tensor(hidden, dtype=dtype)
    limits = Limits(132, loading=loading)
    rms = RmsNormBackward(x, x, weight, x, weight).kernel_calls(limits)
    layer = LayerNormBackward(x, x, weight, x, weight, weight).kernel_calls(limits)
    added = RmsNormBackward(x, x, weight, x, weight, d_total=x).kernel_calls(limits)
    return rms.gradients.source, layer.gradients.source, layer.sums.source, added.gradients.source


def pipe_sources() -> list[KernelSource]:
    """Kernels that must compile. A shape of each kernel comes first, which other tests compile for more GPUs."""
    return list(
        dict.fromkeys(
            [
                *norms(7168),
                *norms(7168, fp8=True)[1:],
                norms(7168, torch.float32)[1],
                norms(7168, limits=ROW)[0],
                norms(2880, torch.float16, limits=ROW)[2],
                norms(7168, limits=ROW, rows=FEW)[2],
                norms(32768, torch.float16)[0],
                norms(7168, limits=IN_TURN)[1],
                norms(7168, limits=PLAIN, fp8=True)[2],
                norms(72, limits=Limits(48, loading="PLAIN"))[1],
                norms(32768, torch.float32)[0],
                *backwards(7168),
                backwards(7168, torch.float32)[1],
                backwards(7168, torch.float16, "PLAIN")[0],
                backwards(32768)[0],
                *backwards(7168, rows=FEW),
                *backwards(4096, torch.float32, rows=FEW)[1:],
                *pieces(),
                pieces(fp8=True)[0],
                *pieces(torch.float32, fp8=True)[::2],
                pieces(torch.float16, limits=PLAIN)[1],
                quantising(),
                quantising(torch.float32, PLAIN),
                *weighted_pieces(),
                *weighted_pieces(torch.float32, PIPED),
                weighted_pieces(limits=Limits(stages=2))[1],
            ]
        )
    )
