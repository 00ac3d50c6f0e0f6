"""Functions that ranks run under compute-sanitizer besides exchanges: copies of exact sizes, rows, injected bugs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np

from raymoe.cuda import jit
from raymoe.cuda.driver import call
from raymoe.cuda.error_word import ErrorWord
from raymoe.cuda.gpu import Gpu
from raymoe.cuda.jit import Compiler, Cubins, KernelSource
from raymoe.cuda.launch import Kernels, Launch, Shape
from raymoe.cuda.params import U32, Address, Params
from raymoe.cuda.structs import Operation
from raymoe.errors import CudaError
from raymoe.memory.world import World
from raymoe.packaged import packaged_folder
from raymoe.rows.pipe_shape import Limits, Loading
from raymoe.transport.copy_kernel import Ring, Spread, Transfer, copy_launch
from tests.emulator.build import Change
from tests.unit.exchange.exchange_cases import Case, run_case

POISON = 0xEE
OPERATION_BYTES, WORD_BYTES = Operation.nbytes(), 8

WORDS = 255
"""1,020 bytes: the memory after them, up to the next multiple of 512, belongs to no other allocation."""
THREADS = 256


@dataclass(frozen=True)
class InjectedBug(Params):
    """The struct of injected_bugs.cu."""

    words: Address
    count: U32


INJECTED_BUGS = KernelSource("injected_bugs", (InjectedBug,))
MISTAKES = {"memcheck": "past_the_end", "synccheck": "divergent", "racecheck": "unordered"}
"""The kernel of injected_bugs.cu that each tool must name."""


def injected_compiler(cubins: Cubins | None = None) -> Compiler:
    return Compiler(Path(__file__).parent, cubins)


def run_injected(world: World, tool: str, case: Case) -> str:
    """Run a step of an exchange, as in the cases, and then the injected bug; return the driver's error."""
    run_case(world, case)
    kernels = Kernels(world.gpu, injected_compiler())
    function = kernels.function(INJECTED_BUGS, MISTAKES[tool])
    with memory(world.gpu, 4 * WORDS) as words:
        try:
            Launch(function, Shape(1, THREADS), InjectedBug(words, WORDS))(0)
            world.gpu.synchronise()
        except CudaError as error:  # the tool may end a kernel that has a bug
            return str(error)
    kernels.close()
    return "no error"


def copies(world: World, nbytes: int, ring: Ring, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Copy `nbytes` to and from each pair of offsets; return the pairs that went wrong.

    A launch has two transfers, the second with the offsets exchanged. Every end and every word is an allocation of
    exactly its size, so a byte read or written beyond the end is outside the allocation.
    """
    rng, wrong = np.random.default_rng(nbytes), []
    kernels, error_word = Kernels(world.gpu), ErrorWord(world.gpu, world.rank)
    watch = error_word.watch(20.0)
    for index, pair in enumerate(pairs):
        with ExitStack() as stack:
            transfers, ends = [], []
            for into_at, source_at in (pair, pair[::-1]):
                source = stack.enter_context(memory(world.gpu, nbytes + source_at))
                into = stack.enter_context(memory(world.gpu, nbytes + into_at))
                operation = stack.enter_context(memory(world.gpu, OPERATION_BYTES))
                signal = stack.enter_context(memory(world.gpu, WORD_BYTES))
                sent = rng.integers(0, 256, nbytes + source_at, dtype=np.uint8)
                want = np.full(nbytes + into_at, POISON, dtype=np.uint8)
                write(world.gpu, source, sent)
                write(world.gpu, into, want)
                want[into_at:] = sent[source_at:]
                transfers.append(Transfer(into + into_at, source + source_at, nbytes, operation, signal=signal))
                ends.append((into, want, signal))
            launch = copy_launch(kernels, transfers, Spread(3, ring, in_turn=bool(index % 2)), watch)
            launch(0)
            world.gpu.synchronise()
            for into, want, signal in ends:
                right = np.array_equal(read(world.gpu, into, len(want)), want)
                if not right or read(world.gpu, signal, WORD_BYTES).view(np.uint64)[0] != 1:
                    wrong.append(pair)
    error_word.check()
    error_word.close()
    kernels.close()
    return wrong


EACH_THREAD_ARRIVES = tuple(
    Change("pipe.cuh", old, new)
    for old, new in (
        ("ptx::barrier_init(empty(stage), GROUP_WARPS);", "ptx::barrier_init(empty(stage), GROUP_THREADS);"),
        ("if (threadIdx.x % 32 == 0) {\n            arrive_empty(turn);\n        }", "arrive_empty(turn);"),
        (
            "if (!leads()) {\n            return;\n        }\n        store();\n        ptx::bulk_commit();",
            "if (thread_in_group() >= 32) {\n            return;\n        }\n"
            "        if (leads()) {\n            store();\n            ptx::bulk_commit();\n        }",
        ),
        (
            "ptx::bulk_wait_read<0>();\n            arrive_empty",
            "ptx::bulk_wait_read<0>();\n __syncwarp(); arrive_empty",
        ),
        ("ptx::bulk_wait_read<1>();", "ptx::bulk_wait_read<1>(); __syncwarp();"),
    )
) + tuple(
    Change(f"product/{name}", old, new)
    for name, old, new in (
        ("multiplying.cuh", "1 + Others::ARRIVALS);", "1 + 32 * Others::ARRIVALS);"),
        (
            "multiplying.cuh",
            "memory.empty(stage), MULTIPLYING_WARPS);",
            "memory.empty(stage), 32 * MULTIPLYING_WARPS);",
        ),
        (
            "multiplying.cuh",
            "if (threadIdx.x % 32 == 0) {\n        ptx::barrier_arrive(memory.empty(turn % STAGES));\n    }",
            "ptx::barrier_arrive(memory.empty(turn % STAGES));",
        ),
        (
            "scaled.cuh",
            "if (lane == 0) {\n            ptx::barrier_arrive(memory.full(stage));\n        }",
            "ptx::barrier_arrive(memory.full(stage));",
        ),
    )
)
"""Let all threads of a group arrive at `empty`, and those of a product that scale at `full`. In the kernels one thread
arrives for its warp, and the first thread of a group for the first warp. Not for outer_product.cu, whose warps arrive
at the same `empty` by code of its own.

For racecheck an arrival orders only the thread that arrives. It does not follow an order that comes to this thread by
__syncwarp or by the barrier of the group. So of each warp it reports 31 of 32 threads, all but the one that arrives
(compute-sanitizer 2025.3 and 2026.4, H100, 2026-11-25). The emulator follows that order, and finds a mistake in it
(tests/unit/rows/test_pipe_injected_bugs.py)."""


def each_thread_arrives(world: World, function: Callable[..., None], *arguments: object) -> None:
    """Call a function of this file with kernels that have EACH_THREAD_ARRIVES."""
    kernels = packaged_folder("kernels")
    assert kernels is not None
    with TemporaryDirectory() as folder:
        changed = shutil.copytree(kernels, Path(folder) / "kernels")
        for change in EACH_THREAD_ARRIVES:
            (path,) = changed.rglob(change.file)
            path.write_text(change.made_in(path.read_text()))
        with mock.patch.object(jit, "_shared", Compiler(changed)), mock.patch("raymoe.rows.row_launch._devices", {}):
            function(world, *arguments)


def streams(_world: World, rows: int, hidden: int, loading: Loading) -> None:
    """Run each kernel of raymoe/rows on a few SMs; raise if a result is wrong."""
    from tests.gpu import test_pipe_gpu as pipe  # it skips where torch is missing

    limits = Limits(sms=3, loading=loading)
    x = pipe.rows_of(rows, hidden)
    pipe.check_norms(x, limits)
    pipe.check_gradients(x, limits)
    pipe.check_gradients(pipe.rows_of(3, 4104), Limits(sms=3))  # a block for each row
    pipe.check_pieces(rows, hidden, limits)
    pipe.check_fp8(rows, hidden, limits, "column")


def streams_on_all_sms(_world: World, hidden: int) -> None:
    """Run them on the whole GPU, where blocks have other shapes, and SwiGLU of all rows with its gradient."""
    import torch

    from raymoe.moe import swiglu
    from tests.gpu import test_pipe_gpu as pipe

    x = pipe.rows_of(41, hidden)
    pipe.check_norms(x, Limits())
    pipe.check_gradients(x, Limits())
    pipe.check_pieces(41, hidden, Limits())
    pipe.check_fp8(41, hidden, Limits(), "column")
    if hidden >= 4096:  # so many turns that stages are used again, and that blocks take rows from a counter
        pipe.check_gradients(x, Limits(2))
        pipe.check_norms(pipe.rows_of(1030, hidden), Limits(20))
        pipe.check_fp8(1030, hidden, Limits(20), "row")
    given, dy = pipe.rows_of(41, 2 * hidden).requires_grad_(), pipe.rows_of(41, hidden, seed=1)
    wide = given.detach().double().requires_grad_()
    gate, up = wide.chunk(2, 1)
    found, wanted = swiglu(given), torch.nn.functional.silu(gate) * up
    found.backward(dy)
    wanted.backward(dy.double())
    assert given.grad is not None and wide.grad is not None
    pipe.close(found.detach(), wanted.detach(), size=0.1)
    pipe.close(given.grad, wide.grad, size=1)


def layer_kernels(_world: World) -> None:
    """Run the router's kernels, a product of few rows, and the kernels over rows of experts."""
    import torch

    from raymoe.moe import grouped_linear
    from raymoe.moe.expert_kernels import ActivationForm
    from tests.gpu import test_expert_rows_gpu as expert_rows
    from tests.gpu import test_router_gpu as router

    for name in ("deepseek_v3", "gpt_oss"):
        router.test_the_kernel_makes_the_choice_of_the_reference(name)
        router.test_gradients_are_those_of_the_formula(name)
    router.test_logits_and_their_gradients_are_those_of_float64(130, torch.bfloat16)
    counts, offsets = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([0, 1, 16], [0, 0, 8, 24]))
    x, weight = (torch.randn(shape, device="cuda").bfloat16() for shape in ((24, 96), (3, 64, 96)))
    y = grouped_linear(x, weight, offsets, counts)
    for begin, count, its in zip(offsets.tolist(), counts.tolist(), weight, strict=False):
        wanted = x[begin : begin + count].double() @ its.double().T
        torch.testing.assert_close(y[begin : begin + count].double(), wanted, rtol=2**-7, atol=2**-5)
    for form in (ActivationForm(interleaved=True, alpha=1.702, limit=1.5, up_plus=1.0), ActivationForm()):
        expert_rows.test_gated_activations_and_their_gradients_equal_the_formula(64, form, biased=True, weighted=True)
    expert_rows.test_gradients_of_biases_are_near_float64_and_equal_in_five_runs("eager")
    expert_rows.test_weighted_gradients_are_in_place_and_stop_at_the_last_offset(torch.bfloat16, "eager")


def products(_world: World) -> None:
    """Run the products of experts in each class of tiles."""
    import torch

    from tests.gpu import test_products_gpu as on_gpu

    gated = partial(on_gpu.test_gated_products_by_all_switches, dtype=torch.bfloat16, keep=True)
    for tiles in on_gpu.CLASSES:
        on_gpu.test_each_class_multiplies_the_rows_of_each_expert(tiles, 72, 272, torch.bfloat16)
        on_gpu.test_products_by_all_switches(tiles, torch.float16, biased=True, weighted=True)
        for form in on_gpu.FORMS:
            gated(tiles, form, biased=True, weighted=True)


def quantised_products(_world: World) -> None:
    """Run the products of 8-bit operands in each class of tiles, tokens as columns and as rows of wgmma."""
    from tests.gpu import test_products_fp8_gpu as on_gpu

    for tiles in on_gpu.CLASSES:
        on_gpu.test_each_class_multiplies_the_rows_of_each_expert(tiles, 144, 272)
        for form in on_gpu.FORMS:
            on_gpu.test_gated_products_by_all_switches(tiles, form, biased=True, weighted=True)


def product_gradients(_world: World) -> None:
    """Run the gradients of products, of rows and of weights, and the copies of rows that are kept for them."""
    import torch

    from tests.gpu import test_kept_rows_gpu as kept_rows
    from tests.gpu import test_product_gradients_gpu as on_gpu

    for tiles in on_gpu.CLASSES:
        on_gpu.test_gradients_of_rows(tiles, 72, 272, torch.bfloat16)
        on_gpu.test_transposed_weights_give_the_same_bits(tiles)
    for dtype in (torch.bfloat16, torch.float16):
        on_gpu.test_gradients_of_weights(200, 328, dtype)
        on_gpu.test_gradients_of_weights_are_added_in_float32(200, 328, dtype)
    on_gpu.test_sums_of_small_integers_are_exact((63, 64, 65, 127, 128, 129))
    for columns, topk in ((24, 3), (1032, 37)):
        kept_rows.test_the_kernel_brings_each_row_back_to_its_places(columns, topk, "eager")


@contextmanager
def memory(gpu: Gpu, nbytes: int) -> Iterator[int]:
    """Allocate zeroed GPU memory, of exactly this size for the driver and its tools."""
    with gpu.current():
        address = int(call("cuMemAlloc", nbytes))
        call("cuMemsetD8", address, 0, nbytes)
    try:
        yield address
    finally:
        with gpu.current():
            call("cuMemFree", address)


def write(gpu: Gpu, address: int, values: np.ndarray) -> None:
    with gpu.current():
        call("cuMemcpyHtoD", address, values.ctypes.data, values.nbytes)
        call("cuCtxSynchronize")


def read(gpu: Gpu, address: int, nbytes: int) -> np.ndarray:
    values = np.empty(nbytes, dtype=np.uint8)
    with gpu.current():
        call("cuMemcpyDtoH", values.ctypes.data, address, nbytes)
    return values
