"""Norms with `batch_invariant` have one kernel and block for all numbers of rows, so a row has the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.moe import add_rms_norm, layer_norm, rms_norm, swiglu
from raymoe.moe.layer_form import Norm
from raymoe.rows import norm, pipe_shape
from raymoe.rows.norm_kernels import LayerNorm, RmsNorm
from raymoe.rows.pipe_shape import Limits, RowWork, row_breaks, row_shape
from tests.emulator.build import compiler
from tests.unit.moe.bits import same_bits
from tests.unit.rows.emulated_pipe import run_call, tensors_of
from tests.unit.rows.rows_driver import Counters, Enqueued, RowsDriver

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HIDDEN = (8, 64, 512, 1032, 4096, 7168, 16384, 32768)
MOST_ROWS = 20_000
SMS = (None, 1, 48, 132)


def drawn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Shapes and kernels.


def numbers_of_rows(work: RowWork, sms: int | None) -> list[int]:
    """Numbers of rows up to 20000, on both sides of each at which the fastest shape may change."""
    pick = random.Random(3).randrange
    near = {number + by for number in row_breaks(work, Limits(sms)) for by in (-1, 0)}
    return sorted(
        number
        for number in {*range(1, 20), *near, *(pick(MOST_ROWS) for _ in range(20)), MOST_ROWS}
        if 1 <= number <= MOST_ROWS
    )


def works(hidden: int) -> list[RowWork]:
    """The norms: of one input and of two, plain and to 8-bit floats, with a bias and without."""
    return [
        RowWork(1, hidden, 8 * item * inputs, inputs, 4 * item, quantised=quantised, biased=biased)
        for item in (2, 4)
        for inputs, biased in ((1, False), (2, False), (1, True))
        for quantised in (False, True)
    ]


@pytest.mark.parametrize("hidden", HIDDEN)
def test_the_shape_of_a_block_depends_on_no_number_of_rows(hidden: int) -> None:
    for work in works(hidden):
        for sms in SMS:
            limits = Limits(sms, batch_invariant=True)
            shapes = {row_shape(replace(work, rows=rows), limits) for rows in numbers_of_rows(work, sms)}
            assert len(shapes) == 1, f"{work}, {sms} SMs: {shapes}"


def test_the_fastest_shapes_depend_on_it() -> None:
    """So the test above can fail, and calls without the option still get the shape of their number of rows."""
    for hidden in (512, 4096, 7168, 16384):
        work = RowWork(1, hidden, 16, registers=8)
        shapes = {row_shape(replace(work, rows=rows), Limits()).defines for rows in numbers_of_rows(work, None)}
        assert len(shapes) > 1, hidden


def test_it_is_the_shape_of_many_rows() -> None:
    for hidden in HIDDEN:
        for work in works(hidden):
            for sms in SMS:
                many = row_shape(replace(work, rows=1 << 24), Limits(sms))
                assert row_shape(work, Limits(sms, batch_invariant=True)) == many


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("hidden", [512, 4096, 7168, 16384])
def test_all_numbers_of_rows_have_one_build_of_the_kernel(hidden: int, dtype: torch.dtype) -> None:
    """Another build of the same source may also fuse other multiplications and additions."""
    vector = empty(hidden, dtype=dtype)

    def calls(rows: int) -> list[RmsNorm | LayerNorm]:
        x = empty(rows, hidden, dtype=dtype)
        values, scales = empty(rows, hidden, dtype=torch.float8_e4m3fn), empty(rows, hidden // 128, dtype=F32)
        return [
            RmsNorm(x, vector, x),
            RmsNorm(x, vector, x, residual=x, residual_out=x),
            RmsNorm(x, vector, values, scales=scales),
            LayerNorm(x, vector, vector, x),
            LayerNorm(x, vector, vector, values, scales=scales),
        ]

    for sms in (None, 48):
        limits = Limits(sms, batch_invariant=True)
        builds = [
            {(call.source, call.threads, call.shared_bytes) for call in same_norm}
            for same_norm in zip(
                *(
                    [each.kernel_call(limits) for each in calls(rows)]
                    for rows in (1, 2, 17, 128, 133, 192, 193, 512, 513, 1024, 1025, 4096, MOST_ROWS)
                ),
                strict=True,
            )
        ]
        assert [len(build) for build in builds] == [1] * 5


# The option on its ways to the kernel.

CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], Any]] = {
    "rms_norm": lambda x, w, how: rms_norm(x, w, **how),
    "add_rms_norm": lambda x, w, how: add_rms_norm(x, x, w, **how),
    "layer_norm": lambda x, w, how: layer_norm(x, w, w, **how),
}
COUNTS = (1, 5, 128, 600, 1024, 1100)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RowsDriver:
    rows_driver = RowsDriver(monkeypatch)
    Counters(monkeypatch, rows_driver)
    return rows_driver


def launched(driver: RowsDriver, call: Callable[[torch.Tensor], Any]) -> set[tuple[Any, ...]]:
    """The kernels and blocks of a function of rows, called with several numbers of them."""
    found: list[Enqueued] = []
    for count in COUNTS:
        found += driver.launches_of(lambda count=count: call(drawn(count, 1024, dtype=BF16)))
    assert len(found) == len(COUNTS)
    return {(each.source, each.threads, each.shared_bytes) for each in found}


@pytest.mark.parametrize("sms", [None, 48])
@pytest.mark.parametrize("output", [None, "float8_e4m3"])
@pytest.mark.parametrize("name", CALLS)
def test_each_way_to_the_kernel_knows_the_option(
    name: str, output: str | None, sms: int | None, driver: RowsDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directly, with gradients, and through the operator."""
    weight = drawn(1024, dtype=BF16)
    how: dict[str, Any] = {"output": output, "sms": sms}
    chosen = {"batch_invariant": True}
    always_one = (name, output, sms) == ("add_rms_norm", None, None)  # two inputs never use the pipeline there
    assert (len(launched(driver, lambda x: CALLS[name](x, weight, how))) > 1) is not always_one
    kernels = launched(driver, lambda x: CALLS[name](x, weight, how | chosen))
    assert len(kernels) == 1
    if output is None:
        weight.requires_grad_()
        assert launched(driver, lambda x: CALLS[name](x, weight, how | chosen)) == kernels
    monkeypatch.setattr("raymoe.rows.direct._profiling", lambda: True)
    assert launched(driver, lambda x: CALLS[name](x, weight, how | chosen)) == kernels


def test_the_norm_of_a_layer_takes_it_when_it_is_told(driver: RowsDriver) -> None:
    part = Norm(drawn(1024, dtype=BF16), 1e-6)
    assert len(launched(driver, part)) > 1
    part.by_row = True
    assert len(launched(driver, part)) == 1


# Bits, by emulated kernels.


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let shapes change at few rows."""
    for name, few in (
        ("WHOLE_GPU", 2),
        ("ALONE_ROWS", 2),
        ("FEW_ROWS", 3),
        ("PIPED_ROWS", 6),
        ("CONSUMER_WARPS", 4),
        ("WIDE_WARPS", 4),
        ("PLAIN_WARPS", 5),
    ):
        monkeypatch.setattr(pipe_shape, name, few)
    yield


def normed(kind: type[RmsNorm | LayerNorm], x: torch.Tensor, limits: Limits, *, fp8: bool) -> list[torch.Tensor]:
    rows, hidden = x.shape
    out = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn if fp8 else x.dtype)
    scales = torch.empty(rows, -(-hidden // 128)) if fp8 else None
    vectors = [drawn(hidden, dtype=x.dtype, seed=seed) for seed in (7, 8)]
    kernel = kind(x, *(vectors if kind is LayerNorm else vectors[:1]), out, 1e-6, scales)
    run_call(kernel.kernel_call(limits), tensors_of(kernel))
    return [out] if scales is None else [out, scales]


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles the kernels for a CPU")
@pytest.mark.parametrize(
    ("kind", "fp8", "sms"),
    [(RmsNorm, False, None), (LayerNorm, False, None), (RmsNorm, True, None), (RmsNorm, False, 2)],
    ids=["rms_norm", "layer_norm", "rms_norm, fp8", "rms_norm, 2 SMs"],
)
def test_a_row_has_the_same_bits_in_any_batch(
    kind: type[RmsNorm | LayerNorm], fp8: bool, sms: int | None, small_limits: None
) -> None:
    x = drawn(12, 1032, seed=1) * 3 + 0.5
    batches = [slice(first, first + count) for count in (1, 3, 6, 7) for first in (0, 5)]

    def differing(limits: Limits) -> list[slice]:
        whole = normed(kind, x, limits, fp8=fp8)
        return [
            rows
            for rows in batches
            if not all(map(same_bits, normed(kind, x[rows].clone(), limits, fp8=fp8), [all_[rows] for all_ in whole]))
        ]

    assert differing(Limits(sms, batch_invariant=True)) == []
    assert differing(Limits(sms)) != [], "so the comparison can fail"


# Where torch computes.


@pytest.mark.parametrize("output", [None, "float8_e4m3"])
@pytest.mark.parametrize("name", CALLS)
def test_a_long_row_alone_has_the_same_bits_on_several_threads(name: str, output: str | None) -> None:
    """torch divides the sum of one row of 32768 elements among its threads, but gives each of several rows to one."""
    x, weight = drawn(3, 40_000, seed=2) + 0.5, drawn(40_000, seed=3)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for row in range(3):
            alone = _flat(CALLS[name](x[row], weight, {"output": output, "batch_invariant": True}))
            among = _flat(CALLS[name](x, weight, {"output": output, "batch_invariant": True}))
            assert all(same_bits(one, rows[row]) for one, rows in zip(alone, among, strict=True))
    finally:
        torch.set_num_threads(before)


def _flat(results: Any) -> list[torch.Tensor]:
    return [results] if torch.is_tensor(results) else [tensor for each in results for tensor in _flat(each)]


def test_a_gpu_without_the_kernels_refuses_it() -> None:
    x = empty(3, 64, dtype=F32)
    with pytest.raises(ConfigError, match=r"a GPU of compute capability .* is needed"):
        norm._by_formula(lambda rows: rows, x, batch_invariant=True)
    assert norm._by_formula(lambda rows: rows, x, batch_invariant=False) is x


def test_it_is_an_option_of_norms_alone() -> None:
    x = torch.ones(4, 64)
    with pytest.raises(ConfigError, match="batch_invariant is 1; it is True or False"):
        rms_norm(x, x[0], batch_invariant=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batch_invariant"):
        swiglu(x, batch_invariant=True)  # type: ignore[call-arg]
