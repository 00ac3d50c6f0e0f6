"""Fixtures of the GPU tests. They skip, and say why, without a GPU that raymoe's kernels run on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from raymoe.cuda.error_word import ErrorWord
from raymoe.cuda.gpu import Gpu
from raymoe.cuda.jit import Compiler, Cubins
from raymoe.cuda.launch import Kernels
from raymoe.errors import CudaMissing
from tests.gang.conftest import fault, nothing_left, pytest_runtest_makereport, start
from tests.gpu.copies import Copies

if TYPE_CHECKING:
    from tests.gpu.ranks import GpuRanks

# Tests of whole runs take these from the gang tests. The hook tells the fixture `fault` whether its test passed.
__all__ = ["fault", "nothing_left", "pytest_runtest_makereport", "start"]

MIN_CAPABILITY = (9, 0)


@pytest.fixture(scope="session")
def gpu() -> Iterator[Gpu]:
    try:
        found = Gpu.open(0)
    except CudaMissing as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")
    if found.capability < MIN_CAPABILITY:
        found.close()
        pytest.skip(f"needs compute capability {MIN_CAPABILITY} (bulk copies): {found.name} has {found.capability}")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        found.close()
        pytest.skip(f"needs a torch that sees {found.name}: torch {torch.__version__} sees no GPU")
    torch.cuda.init()
    yield found
    found.close()


@pytest.fixture(scope="session")
def compiler(tmp_path_factory) -> Compiler:
    return Compiler(cubins=Cubins(tmp_path_factory.mktemp("cubins")))


@pytest.fixture(scope="session")
def kernels(gpu, compiler) -> Iterator[Kernels]:
    loaded = Kernels(gpu, compiler)
    yield loaded
    gpu.synchronise()
    loaded.close()


@pytest.fixture
def error_word(gpu) -> Iterator[ErrorWord]:
    word = ErrorWord(gpu, rank=0)
    yield word
    word.abort("the test is over")  # ends waits that a failed test may have left
    word.close()


@pytest.fixture
def copies(kernels) -> Copies:
    return Copies(kernels)


@pytest.fixture(scope="session")
def ranks() -> Iterator[GpuRanks]:
    """Rank processes: one more than there are GPUs, and at least three."""
    from tests.gpu.ranks import GPUS, RANKS, GpuRanks, free_bytes

    with GpuRanks(max(RANKS, GPUS + 1)) as started:
        started.run(RANKS, free_bytes)  # torch allocates its own memory before any test measures
        yield started
