"""Loading compiled kernels, without a GPU: once for each GPU, and completely or not at all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from raymoe.cuda import launch as kernels_module
from raymoe.cuda.jit import Compiler, Cubins, KernelSource
from raymoe.cuda.launch import Kernels
from raymoe.errors import CudaError

ARCH = "sm_90a"
TINY = KernelSource("tiny")


@pytest.fixture
def compiler(tmp_path) -> Compiler:
    (tmp_path / "tiny.cu").write_text('extern "C" __global__ void tiny(int* out) { *out = 7; }\n')
    return Compiler(tmp_path, Cubins(Path(tmp_path, "cubins")))


class FakeDriver:
    """A driver that counts modules by GPU, and fails the call that `fails` names. A handle is (GPU, number)."""

    def __init__(self, monkeypatch):
        self.current, self.loaded, self.fails, self.loads = None, set(), "", 0
        monkeypatch.setattr(kernels_module, "call", self)

    def gpu(self, ordinal: int, arch: str = ARCH) -> SimpleNamespace:
        @contextmanager
        def current():
            before, self.current = self.current, ordinal
            yield
            self.current = before

        return SimpleNamespace(ordinal=ordinal, arch=arch, current=current, shared_bytes=232448, sms=132)

    def __call__(self, name, *arguments):
        if name == self.fails:
            raise CudaError(f"{name} failed on purpose", 2)
        if name == "cuModuleLoadData":
            self.loads += 1
            module = self.current, self.loads
            self.loaded.add(module)
            return module
        if name == "cuModuleUnload":
            self.loaded.remove(arguments[0])
        if name == "cuModuleGetFunction":
            assert arguments[0] in self.loaded
            assert arguments[0][0] == self.current, "a module of another GPU"
            return arguments[0]
        return 64


STEPS = ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad", "cuFuncGetAttribute", "cuFuncSetAttribute"]


@pytest.mark.parametrize("step", STEPS)
def test_a_failed_load_leaves_no_module_and_can_be_retried(compiler, monkeypatch, step):
    driver = FakeDriver(monkeypatch)
    kernels = Kernels(driver.gpu(0), compiler)
    driver.fails = step
    for _ in range(2):
        with pytest.raises(CudaError, match=step if step != "cuModuleGetFunction" else r"tiny\.cu has no kernel tiny"):
            kernels.function(TINY)
        assert driver.loaded == set()
    driver.fails = ""
    assert kernels.function(TINY).handle in driver.loaded
    kernels.close()
    assert driver.loaded == set()


def test_every_gpu_has_its_own_module(compiler, monkeypatch):
    driver = FakeDriver(monkeypatch)
    both = [Kernels(driver.gpu(ordinal, arch), compiler) for ordinal, arch in enumerate((ARCH, ARCH, "sm_100a"))]
    functions = [kernels.function(TINY) for kernels in (*both, *both)]
    assert [function.handle[0] for function in functions] == [0, 1, 2, 0, 1, 2]
    assert driver.loads == 3
    assert compiler.compilations == 2  # one for each architecture


def test_threads_that_race_load_once(compiler, monkeypatch):
    driver, start = FakeDriver(monkeypatch), threading.Barrier(8)
    kernels = Kernels(driver.gpu(0), compiler)

    def ask(_):
        start.wait()
        return kernels.function(TINY)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, range(8)))
    assert driver.loads == 1
    assert all(each is found[0] for each in found)
