"""Every kernel compiles for Hopper and Blackwell, some also for Ampere, with pip's NVRTC and without a GPU.

Other tests check properties of the compiled code.
"""

import os
import re
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raymoe.cuda.jit import Compiled, CompileError, Compiler, Cubins, KernelSource
from raymoe.cuda.params import U32, U64, Address, Params
from raymoe.cuda.structs import STRUCTS, Peers
from raymoe.exchange.domains.domain_kernels import (
    ADVANCE_CHUNK,
    ENTER_DOMAIN,
    JOIN_EXPERTS,
    PUBLISH_STATUSES,
    PUBLISH_TOKENS,
    sum_source,
)
from raymoe.exchange.nccl.rounds import (
    COMPARE_PASSES,
    COUNT,
    NUMBER,
    PUBLISH_PASS,
    PUBLISH_ROUTING,
    SPREAD,
    sum_sources,
)
from raymoe.exchange.peer.combine import beside_product, combine_source, with_ll_statuses
from raymoe.exchange.peer.dispatch import (
    ANNOUNCE,
    WARPS,
    WIDE,
    alltoallv_source,
    dispatch_source,
    in_groups,
    in_mixed_blocks,
    pack_source,
    routed_again,
)
from raymoe.exchange.peer.ll import LlGrid, combine_ll_source, dispatch_ll_source
from raymoe.exchange.slot_kernel import MARK_DISPATCH, TAKE_SLOTS
from raymoe.exchange.token_kernels import PACK_CHOICES, TAKE_CHOICES
from raymoe.packaged import packaged_folder
from raymoe.transport.copy_kernel import COPY, MOST_TRANSFERS, CopyParams, Transfer
from raymoe.workload.compare.row_push import ROW_PUSH
from tests.unit.moe.expert_rows_sources import expert_rows_sources
from tests.unit.moe.product_fp8_sources import product_fp8_sources
from tests.unit.moe.product_sources import outer_sources, product_sources
from tests.unit.moe.router_cases import router_sources
from tests.unit.rows.pipe_sources import pipe_sources

KERNELS = packaged_folder("kernels")
ARCHS = ("sm_90a", "sm_100a")
STEMS = sorted(path.stem for path in KERNELS.rglob("*.cu"))
_FOLDER = KERNELS / "include" / "raymoe"
HEADERS = sorted(str(path.relative_to(_FOLDER)) for path in _FOLDER.rglob("*.cuh"))
DTYPES = ("bfloat16", "float16", "float32")
BEFORE_HOPPER = (
    *(PUBLISH_ROUTING, COUNT, NUMBER, SPREAD, PUBLISH_PASS, COMPARE_PASSES, TAKE_SLOTS),
    *(MARK_DISPATCH, PACK_CHOICES, TAKE_CHOICES),
    *(source for dtype in DTYPES for wire in DTYPES for source in sum_sources(dtype, wire)),
    *(PUBLISH_TOKENS, ENTER_DOMAIN, JOIN_EXPERTS, PUBLISH_STATUSES),
    *(sum_source(dtype, wire) for dtype in DTYPES for wire in DTYPES),
)
"""Kernels of the backends that GPUs before Hopper have."""
PIPE = pipe_sources()
PRODUCTS = sorted(
    (*product_sources(), *outer_sources(), *product_fp8_sources()),
    key=lambda source: int(dict(source.defines).get("MOST_TOKENS", 0)),
)
"""Those of few tokens first: they compile faster, and `make test` takes the first one of each macro."""
ON_ROWS = (*PIPE, *router_sources(), *expert_rows_sources(), *PRODUCTS)
"""Kernels that read no memory of peers."""
MANY_ON_ROWS = [source for index, source in enumerate(ON_ROWS) if index % 4]
"""Three of four, which are compiled for one architecture only: they are many, and take long."""
MIXED = (
    *(in_mixed_blocks(dispatch_source(), senders) for senders in (1, 2, 3, 4)),
    in_mixed_blocks(dispatch_source(stamped=True), 1),
    in_mixed_blocks(dispatch_source(traces=True), 1),
    in_mixed_blocks(dispatch_source(known=True), 1),
    in_mixed_blocks(dispatch_source(known=True, chunked=True), 3),
    in_mixed_blocks(routed_again(in_groups(dispatch_source(chunked=True))), 2),
    *(in_mixed_blocks(dispatch_source(dtype, fp8=True), senders) for dtype in DTYPES for senders in (5, 7)),
    in_mixed_blocks(dispatch_source("bfloat16", fp8=True, stamped=True, traces=True), 5),
    in_mixed_blocks(routed_again(in_groups(dispatch_source("bfloat16", fp8=True, chunked=True))), 5),
)
"""Dispatches on few SMs, whose blocks send and place."""
MIXED_LL = LlGrid(2, 2, 1, mixed=True)
"""Few tokens on few SMs likewise."""
SOURCES = (
    *BEFORE_HOPPER,
    *ON_ROWS,
    COPY,
    ROW_PUSH,
    alltoallv_source(),
    pack_source(),
    pack_source(stamped=True),
    ANNOUNCE,
    ADVANCE_CHUNK,
    dispatch_source(),
    dispatch_source(stamped=True),
    dispatch_source(known=True),
    dispatch_source(stamped=True, known=True),
    routed_again(dispatch_source()),
    routed_again(dispatch_source(stamped=True)),
    routed_again(in_groups(dispatch_source(chunked=True))),
    dispatch_source(chunked=True),
    dispatch_source(stamped=True, chunked=True),
    dispatch_source(known=True, chunked=True),
    dispatch_source("float16", fp8=True, chunked=True),
    dispatch_source(traces=True, known=True),
    *MIXED,
    in_groups(dispatch_source()),
    in_groups(dispatch_source(chunked=True)),
    in_groups(dispatch_source(fp8=True)),
    in_groups(dispatch_ll_source()),
    in_groups(dispatch_ll_source(fp8=True)),
    *(dispatch_source(dtype, fp8=True) for dtype in DTYPES),
    *(combine_source(dtype) for dtype in DTYPES),
    *(combine_source(dtype, warps=WIDE) for dtype in DTYPES),
    *(combine_source(dtype, carries=True) for dtype in DTYPES),
    *(combine_source(dtype, warps=WIDE, carries=True) for dtype in DTYPES),
    combine_source("bfloat16", traces=True, warps=WIDE, carries=True),
    *(
        with_ll_statuses(combine_source(dtype, warps=warps, carries=True))
        for dtype in DTYPES
        for warps in (WARPS, WIDE)
    ),
    combine_source("bfloat16", stamped=True),
    combine_source("bfloat16", stamped=True, carries=True),
    combine_source("float32", wire="bfloat16", carries=True),
    combine_source("float32", wire="bfloat16"),
    combine_source("bfloat16", wire="float32"),
    combine_source("float16", wire="bfloat16"),
    dispatch_ll_source(),
    routed_again(dispatch_ll_source()),
    routed_again(in_groups(dispatch_ll_source())),
    *(dispatch_ll_source(dtype, fp8=True) for dtype in DTYPES),
    *(MIXED_LL.build_of(dispatch_ll_source(fp8=fp8)) for fp8 in (False, True)),
    *(MIXED_LL.build_of(combine_ll_source(dtype)) for dtype in DTYPES),
    dispatch_source(traces=True),
    dispatch_ll_source(traces=True),
    combine_source("bfloat16", traces=True, warps=WIDE),
    *(beside_product(combine_source(dtype, warps=WIDE)) for dtype in DTYPES),
    beside_product(combine_source("bfloat16", wire="float32")),
    beside_product(combine_source("bfloat16", stamped=True)),
    combine_ll_source("bfloat16", traces=True),
    *(combine_ll_source(dtype) for dtype in DTYPES),
)
"""The kernels as they are launched, with each set of defines."""
HOPPER = {source for source in SOURCES if ("BLOCK_WARPS", str(WIDE)) in source.defines and source.stem == "combine"}
NARROW = {source for source in SOURCES if source.stem == "combine" and source not in HOPPER}
ONE_OF_EACH = {source.stem: source for source in reversed(PIPE)}
HOPPER |= set(PIPE) - set(ONE_OF_EACH.values())
"""Combines of 16 warps, used only on Hopper, and of 8 warps. raymoe/exchange/peer/combine.py gives the reason."""
HOPPER |= set(PRODUCTS)  # no other GPU has wgmma
BULK = {"copy", "row_push", "dispatch", "combine"}
"""Kernels that must move their bytes by bulk copies."""
BY_HAND = {"alltoallv", "pack", "spread_rows"}
"""Kernels that move rows by ordinary loads and stores."""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Compiler:
    return Compiler(cubins=Cubins(tmp_path_factory.mktemp("cubins")))


def name_of(case: tuple[KernelSource, str]) -> str:
    source, arch = case
    return "-".join((source.stem, *(value for _, value in source.defines), arch))


@pytest.fixture(scope="module")
def under_way(request, compiler) -> Iterator[dict[tuple[KernelSource, str], Future[Compiled]]]:
    """The compilations that this session's tests need, started in advance on all CPUs."""
    ours = [each for each in request.session.items if each.path == request.path and "compiled" in each.fixturenames]
    threads = ThreadPoolExecutor(os.cpu_count())
    asked = dict.fromkeys(each.callspec.params["compiled"] for each in ours)
    yield {case: threads.submit(compiler.compiled, *case) for case in asked}
    threads.shutdown(cancel_futures=True)


CASES = [
    (source, arch) for source in SOURCES for arch in ARCHS if arch == "sm_90a" or source not in (*HOPPER, *MANY_ON_ROWS)
]
CASES += [(source, "sm_80") for source in BEFORE_HOPPER]


def marked(cases: list[tuple[KernelSource, str]]) -> Iterator[Any]:
    """Leave a build to `make test-all` if earlier ones have its kernel, macros, way of loading and architecture."""
    seen: set[tuple[str, ...]] = set()
    for source, arch in cases:
        defined = {(source.stem, name, value if name == "PIPE_LOADING" else "") for name, value in source.defines}
        shown = {(source.stem,), (arch,), *defined}
        yield pytest.param((source, arch), marks=pytest.mark.thorough if shown <= seen else ())
        seen |= shown


@pytest.fixture(params=marked(CASES), ids=map(name_of, CASES))
def compiled(request, under_way):
    return under_way[request.param].result()


RULES: list[Callable[[Compiled], None]] = []
"""Checks that every build passes. One that is about some builds only passes the others."""


def rule(check: Callable[[Compiled], None]) -> Callable[[Compiled], None]:
    """Let `test_a_build_keeps_every_rule` call this check for every build."""
    RULES.append(check)
    return check


@pytest.mark.timeout(290)  # all builds of the session start at once, and each takes many seconds on a loaded machine
def test_a_build_keeps_every_rule(compiled):
    for check in RULES:
        check(compiled)


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


def test_the_list_of_sources_covers_every_kernel_file():
    assert "copy" in STEMS
    assert {"base/ptx.cuh", "base/ring.cuh", "base/sync.cuh", "base/peer.cuh"} <= set(HEADERS)
    assert {source.stem for source in SOURCES} == set(STEMS)


@rule
def a_kernel_compiles_without_warnings(compiled):
    assert "warning" not in compiled.log.lower(), compiled.log
    assert compiled.cubin.startswith(b"\x7fELF")


MOST_BYTES = {"dispatch_ll": 82_000, "combine_ll": 60_000}
"""Limits of instruction bytes on Hopper; a cold cache loads them line by line: docs/evidence/experiments/ll_path.md."""


def instruction_bytes(cubin: bytes, kernel: str) -> int:
    """Return the bytes of a kernel's section in a 64-bit ELF file."""
    at, count, names = *struct.unpack_from("<Q", cubin, 0x28), *struct.unpack_from("<HH", cubin, 0x3C)
    sections = [struct.unpack_from("<IIQQQQ", cubin, at + number * 64) for number in range(count)]
    named = {
        cubin[sections[names][4] + name : cubin.index(b"\0", sections[names][4] + name)].decode(): size
        for name, _, _, _, _, size in sections
    }
    return named[f".text.{kernel}"]


@rule
def kernels_for_few_tokens_keep_their_limit_of_instruction_bytes(compiled):
    most = MOST_BYTES.get(compiled.source.stem)
    if most is not None and compiled.arch == "sm_90a" and ("TRACED", "1") not in compiled.source.defines:
        size = instruction_bytes(compiled.cubin, compiled.source.stem)
        assert most / 2 < size <= most, f"{size} bytes of instructions; what became unrolled or inlined?"


@rule
def a_kernel_uses_no_local_memory(compiled):
    figures = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", compiled.log)
    entries = re.findall(r"Compiling entry function '(\w+)'", compiled.log)
    assert len(figures) >= len(entries) >= 1, compiled.log
    assert all(each == ("0", "0", "0") for each in figures), compiled.log
    assert b".nv.local." not in compiled.cubin
    assert not re.search(r"^\s*\.local\b", compiled.ptx, re.MULTILINE)


@rule
def a_kernel_uses_few_enough_registers_for_16_warps_per_sm(compiled):
    most = 216 if compiled.source in NARROW else 65536 // (32 * WIDE)
    if compiled.source in (*PIPE, *PRODUCTS):
        (threads,) = re.findall(r"\.maxntid (\d+)", compiled.ptx)
        most = min(255, 65536 // int(threads))
    for registers in re.findall(r"Used (\d+) registers", compiled.log):
        assert int(registers) <= most, compiled.log


@rule
def ptxas_does_not_serialise_wgmma(compiled):
    """Its notes C7512 and C7519 say that wgmma waits for the one before, or that the sums are copied between them."""
    assert not re.search(r"C75\d\d|wgmma.*serialized", compiled.log), compiled.log
    if compiled.source in PRODUCTS:
        dimensions = 4 if compiled.source.stem == "outer_product" else 3
        assert "setmaxnreg" in compiled.ptx and f"cp.async.bulk.tensor.{dimensions}d" in compiled.ptx


@rule
def a_kernel_does_not_flush_denormal_numbers_to_zero(compiled):
    rest = compiled.ptx.replace("ex2.approx.ftz.f32", "")  # expf first scales its argument to normal numbers
    assert ".ftz" not in rest


@rule
def a_kernel_has_the_name_of_its_file(compiled):
    assert f".entry {compiled.source.stem}(" in compiled.ptx


@rule
def a_block_has_as_many_threads_as_its_headers_assume(compiled):
    """It is `THREADS` of dispatch.cuh: the last thread reads the poison in `await_all`, and strides have this width."""
    text = (KERNELS / f"{compiled.source.path}.cu").read_text()
    if "raymoe/peer/dispatch/dispatch.cuh" in text or "raymoe/peer/combine/combine.cuh" in text:
        defined = dict(compiled.source.defines).get("BLOCK_WARPS") or re.findall(r"#define BLOCK_WARPS (\d+)", text)
        warps = int(defined if isinstance(defined, str) else (*defined, WARPS)[0])
        warps += int(dict(compiled.source.defines).get("MIXED_SENDERS", 0))
        assert re.findall(r"\.maxntid (\d+)", compiled.ptx) == [str(32 * warps)]


@rule
def bulk_kernels_move_bytes_by_bulk_copies(compiled):
    if compiled.source.stem in BULK:
        loads = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes" in compiled.ptx
        assert loads == (compiled.source.stem != "combine")  # it reads rows by ordinary loads
        assert "cp.async.bulk.global.shared::cta.bulk_group" in compiled.ptx
        assert "fence.proxy.async" in compiled.ptx


@rule
def rows_on_one_gpu_come_by_the_way_that_their_block_asks_for(compiled):
    loading = dict(compiled.source.defines).get("PIPE_LOADING")
    if loading is not None:
        by_bulk = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes" in compiled.ptx
        assert by_bulk == (loading in ("PIPED", "IN_TURN"))
        assert ("mbarrier.inval" in compiled.ptx) == (loading == "IN_TURN")
        assert ("mbarrier.arrive.shared::cta" in compiled.ptx) == (loading == "PIPED")  # stages are given back
        stored = "cp.async.bulk.global.shared::cta.bulk_group" in compiled.ptx
        quantises = compiled.source.stem == "quantise" or ("FP8", "1") in compiled.source.defines
        leaves_by_bulk = not quantises or ("ADD", "1") in compiled.source.defines
        assert stored == (by_bulk and leaves_by_bulk)


@rule
def kernels_without_bulk_copies_move_pieces_of_16_bytes(compiled):
    if compiled.source.stem in BY_HAND:
        for way in ("ld", "st"):
            assert f"{way}.global.v2.u64" in compiled.ptx
            assert not re.search(rf"\b{way}\.global\S*\.[bus](8|16)\b", compiled.ptx)


@rule
def no_kernel_of_peers_loads_by_the_read_only_path(compiled):
    if compiled.source not in ON_ROWS:
        assert "ld.global.nc" not in compiled.ptx  # it may return data that a peer has overwritten


@rule
def a_flag_is_stored_after_the_bulk_stores_have_arrived(compiled):
    if "st.release.sys" in compiled.ptx and "bulk_group" in compiled.ptx:
        arrived = re.search(r"cp\.async\.bulk\.wait_group\s+0;", compiled.ptx)
        assert arrived, "nothing waits for the stores themselves; wait_group.read is about the source"
        assert arrived.start() < compiled.ptx.rindex("st.release.sys")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("header", HEADERS)
def test_a_header_compiles_alone(header, tmp_path):
    (tmp_path / "include").symlink_to(KERNELS / "include")
    (tmp_path / "alone.cu").write_text(f'#include "raymoe/{header}"\nextern "C" __global__ void alone() {{}}\n')
    Compiler(tmp_path, Cubins(tmp_path / "cubins")).compiled(KernelSource("alone"), ARCHS[0])


def test_the_other_structs_have_the_same_layout_as_in_python(tmp_path):
    (tmp_path / "include").symlink_to(KERNELS / "include")
    lines = [
        '#include "raymoe/base/peer.cuh"',
        '#include "raymoe/base/sync.cuh"',
        'extern "C" __global__ void structs() {}',
    ]
    (tmp_path / "structs.cu").write_text("\n".join(lines) + "\n")
    source = KernelSource("structs", (Peers, *STRUCTS))
    Compiler(tmp_path, Cubins(tmp_path / "cubins")).compiled(source, ARCHS[0])


def test_the_parameters_of_the_copy_kernel_have_the_expected_offsets():
    transfer, offsets = Transfer.offsets(), CopyParams.offsets()
    assert (transfer["dst"], transfer["src"], transfer["bytes"], Transfer.nbytes()) == (0, 8, 16, 72)
    assert offsets["watch.timeout_ns"] == offsets["watch"] + 24 == MOST_TRANSFERS * 72 + 24
    # The limit is that of a kernel's parameters on any architecture.
    assert CopyParams.nbytes() == MOST_TRANSFERS * 72 + 56 < 4096


def test_a_struct_that_differs_does_not_compile(compiler):
    @dataclass(frozen=True)
    class Operation(Params):  # the real one: epoch, ticket, unused
        ticket: U32
        epoch: U64

    with pytest.raises(CompileError, match="Operation_ticket_is_not_at_byte_0"):
        compiler.compiled(KernelSource("copy/copy", (Operation,)), ARCHS[0])


def test_the_copy_kernel_does_not_compile_for_sm_80(compiler):
    with pytest.raises(CompileError, match=r"compute capability 9\.0"):
        compiler.compiled(COPY, "sm_80")


def test_assembly_is_only_in_two_headers():
    files = [*KERNELS.rglob("*.cu"), *(KERNELS / "include").rglob("*.cuh")]
    users = {path.name for path in files if re.search(r"\basm\b", without_comments(path.read_text()))}
    assert users == {"ptx.cuh", "ptx_matrix.cuh"}


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.cu*")), ids=lambda path: path.name)
def test_kernel_files_are_short_and_narrow(path: Path):
    lines = path.read_text().splitlines()
    assert len(lines) <= (530 if path.name == "ptx.cuh" else 350)  # ptx.cuh is a list of instructions
    assert max(map(len, lines)) <= 120


def test_an_address_is_eight_bytes():
    @dataclass(frozen=True)
    class One(Params):
        at: Address

    assert One.nbytes() == 8
