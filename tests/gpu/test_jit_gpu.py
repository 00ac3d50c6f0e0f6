"""Test kernels on a GPU: loaded once, completely or not at all, and launched only if they can run."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from raymoe.cuda import launch as kernels_module  # noqa: E402
from raymoe.cuda.driver import call  # noqa: E402
from raymoe.cuda.gpu import Gpu  # noqa: E402
from raymoe.cuda.jit import (  # noqa: E402
    Compiled,
    Compiler,
    Cubins,
    KernelSource,
)
from raymoe.cuda.launch import (  # noqa: E402
    Kernels,
    Launch,
    Shape,
)
from raymoe.cuda.params import U64, Params  # noqa: E402
from raymoe.cuda.structs import Watch  # noqa: E402
from raymoe.errors import (  # noqa: E402
    ConfigError,
    CudaError,
)
from raymoe.transport.copy_kernel import (  # noqa: E402
    COPY,
    Ring,
    Spread,
    Transfer,
    copy_params,
)
from tests.gpu.copies import Copies  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def fresh(gpu, compiler):
    loaded = Kernels(gpu, compiler)
    yield loaded
    gpu.synchronise()
    loaded.close()


class Calls:
    """Records the driver calls of raymoe.cuda.launch, and makes one fail by name."""

    def __init__(self, monkeypatch, fails=None):
        self.names = []
        self.fails = fails
        monkeypatch.setattr(kernels_module, "call", self)

    def __call__(self, name, *arguments):
        self.names.append(name)
        if name == self.fails:
            raise CudaError(f"{name} failed on purpose", 2)
        return call(name, *arguments)


def test_threads_that_race_load_a_kernel_once(fresh, monkeypatch):
    calls, start = Calls(monkeypatch), threading.Barrier(8)

    def ask(_):
        start.wait()
        return fresh.function(COPY)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, range(8)))
    assert all(function is found[0] for function in found)
    assert calls.names.count("cuModuleLoadData") == 1


def test_a_function_reports_its_resources(fresh, gpu):
    function = fresh.function(COPY)
    assert function.local_bytes == 0
    assert 0 < function.registers <= 128
    ring = Ring(12, 16384)
    assert ring.shared_bytes <= function.max_dynamic_shared
    assert function.resident_blocks(128, ring.shared_bytes) == gpu.sms


@pytest.mark.parametrize("step", ["cuModuleGetFunction", "cuFuncLoad", "cuFuncGetAttribute", "cuFuncSetAttribute"])
def test_a_load_that_fails_leaves_no_module(gpu, compiler, monkeypatch, step):
    loaded = Kernels(gpu, compiler)
    calls = Calls(monkeypatch, fails=step)
    with pytest.raises(CudaError, match="on purpose"):
        loaded.function(COPY)
    assert calls.names.count("cuModuleLoadData") == calls.names.count("cuModuleUnload") == 1
    calls.fails = None
    source = torch.ones(1000, dtype=torch.uint8, device="cuda")
    into = torch.zeros_like(source)
    copies = Copies(loaded)
    copies.run(copies.of(into, source))
    assert torch.equal(into, source)
    loaded.close()


def test_a_kernel_that_is_not_in_its_file_is_refused(fresh):
    with pytest.raises(CudaError, match=r"copy\.cu has no kernel cpoy"):
        fresh.function(COPY, "cpoy")
    assert fresh.function(COPY)


def test_code_for_another_gpu_is_refused_and_not_kept(gpu, compiler, monkeypatch):
    loaded = Kernels(gpu, compiler)
    other = "sm_100a" if gpu.arch != "sm_100a" else "sm_90a"
    real = compiler.compiled

    def compile_for_other_gpu(source: KernelSource, arch: str) -> Compiled:
        return real(source, other)

    monkeypatch.setattr(compiler, "compiled", compile_for_other_gpu)
    with pytest.raises(CudaError, match="cuModuleLoadData failed"):
        loaded.function(COPY)
    monkeypatch.undo()
    assert loaded.function(COPY)
    loaded.close()


def test_a_second_start_compiles_nothing(gpu, tmp_path):
    compilers = [Compiler(cubins=Cubins(tmp_path)) for _ in range(2)]
    for compiler in compilers:
        loaded = Kernels(gpu, compiler)
        loaded.function(COPY)
        loaded.close()
    assert [compiler.compilations for compiler in compilers] == [1, 0]


def test_every_gpu_of_the_process_loads_its_own_module(gpu, compiler):
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs in one process; this machine has {count}")
    gpus = [Gpu.open(ordinal) for ordinal in range(count)]
    loaded = [Kernels(gpu, compiler) for gpu in gpus]
    assert len({gpu.uuid for gpu in gpus}) == len({gpu.context_id for gpu in gpus}) == count
    for ordinal, kernels in enumerate(loaded):
        with torch.cuda.device(ordinal):
            source = torch.randint(0, 256, (100_001,), dtype=torch.uint8, device="cuda")
            into = torch.zeros_like(source)
            copies = Copies(kernels)
            copies.run(copies.of(into, source))
            assert torch.equal(into, source)
    for kernels, gpu in zip(loaded, gpus, strict=True):
        gpu.synchronise()
        kernels.close()
        gpu.close()


def test_a_gpu_that_does_not_exist_is_refused(gpu):
    with pytest.raises(CudaError, match=r"GPU 99 asked for; this process sees \d+"):
        Gpu.open(99)


def test_launches_that_cannot_run_are_refused(fresh, gpu):
    function, params = fresh.function(COPY), copy_params([Transfer(0, 0, 0)], Spread(), Watch())
    with pytest.raises(ConfigError, match="0 blocks"):
        Launch(function, Shape(0, 128), params)
    with pytest.raises(ConfigError, match="of 1 to 128 threads"):
        Launch(function, Shape(1, 256), params)
    with pytest.raises(ConfigError, match=f"leaves it {function.max_dynamic_shared}"):
        Launch(function, Shape(1, 128, function.max_dynamic_shared + 1), params)
    with pytest.raises(ConfigError, match=f"holds {gpu.sms} of 128 threads"):
        Launch(function, Shape(gpu.sms + 1, 128, function.max_dynamic_shared), params)

    @dataclass(frozen=True)
    class Other(Params):
        offset: U64

    with pytest.raises(ConfigError, match="launched with Other"):
        Launch(function, Shape(1, 128), Other(0))


def test_any_thread_may_launch(fresh):
    """Launch from a thread that has no current GPU yet, as Ray's threads."""
    source = torch.randint(0, 256, (10_000,), dtype=torch.uint8, device="cuda")
    into = torch.zeros_like(source)
    copies = Copies(fresh)
    launch = copies.of(into, source)
    torch.cuda.synchronize()
    thread = threading.Thread(target=launch, args=(copies.stream.cuda_stream,))
    thread.start()
    thread.join(30)
    copies.stream.synchronize()
    assert torch.equal(into, source)
