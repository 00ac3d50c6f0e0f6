"""Compilation at run time: once, complete, the same in every process, and without leftovers if it fails."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cuda.core
import pytest

from raymoe.cuda import jit
from raymoe.cuda.jit import CompileError, Compiler, Cubins, KernelSource, shared_compiler
from raymoe.errors import RaymoeError

ARCH = "sm_90a"
TINY = KernelSource("tiny")
SOURCE = """#include "raymoe/outer.cuh"
#ifndef FACTOR
#define FACTOR 1
#endif
extern "C" __global__ void tiny(int* out) { *out = raymoe::number() * FACTOR; }
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    headers = tmp_path / "kernels" / "include" / "raymoe"
    headers.mkdir(parents=True)
    (headers / "inner.cuh").write_text("#pragma once\n#define NUMBER 7\n")
    (headers / "outer.cuh").write_text(
        '#pragma once\n# include "inner.cuh"\nnamespace raymoe { __device__ int number() { return NUMBER; } }\n'
    )
    (headers / "unused.cuh").write_text("#pragma once\n")
    (tmp_path / "kernels" / "tiny.cu").write_text(SOURCE)
    return tmp_path / "kernels"


@pytest.fixture
def cubins(tmp_path) -> Cubins:
    return Cubins(tmp_path / "cubins")


def entries(cubins: Cubins) -> list[Path]:
    return sorted(cubins.folder.glob("*.cubin"))


def temporary_files(cubins: Cubins) -> list[Path]:
    return [path for path in cubins.folder.glob("*") if path.suffix != ".cubin"]


def test_a_second_compiler_reads_the_cache(folder, cubins):
    first, second = Compiler(folder, cubins), Compiler(folder, Cubins(cubins.folder))
    cold, warm = first.compiled(TINY, ARCH), second.compiled(TINY, ARCH)
    assert (first.compilations, second.compilations) == (1, 0)
    assert warm.cubin == cold.cubin
    assert cold.cubin.startswith(b"\x7fELF")
    assert "registers" in cold.log
    assert ".entry tiny" in cold.ptx


START = """
from raymoe.transport.copy_kernel import COPY
from raymoe.cuda.jit import shared_compiler
compiler = shared_compiler()
done = compiler.compiled(COPY, "sm_90a")
print(compiler.compilations, done.key)
"""


def test_a_second_process_reads_the_copy_kernel_from_the_cache(tmp_path):
    def start() -> list[str]:
        environment = {**os.environ, "RAYMOE_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-c", START]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    (cold, key), (warm, same) = start(), start()
    assert (cold, warm, same) == ("1", "0", key)


def test_threads_that_race_compile_once(folder, cubins):
    compiler, start = Compiler(folder, cubins), threading.Barrier(8)

    def ask(_):
        start.wait()
        return compiler.compiled(TINY, ARCH)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, range(8)))
    assert compiler.compilations == 1
    assert all(each is found[0] for each in found)


RACER = """
import hashlib, sys, time
from pathlib import Path
from raymoe.cuda.jit import Cubins
from raymoe.cuda.jit import Compiler, KernelSource
import cuda.core
compiler = Compiler(Path(sys.argv[1]), Cubins.from_environment())
print("ready", flush=True)
sys.stdin.readline()
done = compiler.compiled(KernelSource("tiny"), "sm_90a")
print(hashlib.sha256(done.cubin).hexdigest(), flush=True)
"""


def test_processes_that_race_get_the_same_cubin(folder, cubins):
    environment = {**os.environ, "RAYMOE_CACHE_DIR": str(cubins.folder)}
    command = [sys.executable, "-c", RACER, str(folder)]
    racers = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        digests = {racer.communicate(timeout=60)[0].strip() for racer in racers}
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    after = Compiler(folder, cubins)
    assert digests == {hashlib.sha256(after.compiled(TINY, ARCH).cubin).hexdigest()}
    assert after.compilations == 0
    assert len(entries(cubins)) == 1
    assert temporary_files(cubins) == []


def change(path: Path) -> None:
    path.write_text(path.read_text() + "// changed\n")


@pytest.mark.parametrize("name", ["tiny.cu", "include/raymoe/outer.cuh", "include/raymoe/inner.cuh"])
def test_a_changed_source_or_header_is_compiled_again(folder, cubins, name):
    compiler = Compiler(folder, cubins)
    before = compiler.compiled(TINY, ARCH)
    change(folder / name)
    assert compiler.compiled(TINY, ARCH).key != before.key
    assert compiler.compilations == 2


def test_a_changed_header_that_is_not_included_compiles_nothing(folder, cubins):
    compiler = Compiler(folder, cubins)
    before = compiler.compiled(TINY, ARCH)
    change(folder / "include" / "raymoe" / "unused.cuh")
    assert compiler.compiled(TINY, ARCH) is before


def test_defines_architecture_and_nvrtc_version_are_part_of_the_key(folder, cubins, monkeypatch):
    compiler = Compiler(folder, cubins)
    keys = [compiler.compiled(TINY, ARCH).key, compiler.compiled(TINY, "sm_100a").key]
    keys.append(compiler.compiled(KernelSource("tiny", defines=(("FACTOR", "3"),)), ARCH).key)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (13, 99))
    keys.append(compiler.compiled(TINY, ARCH).key)
    assert len(set(keys)) == 4
    assert compiler.compilations == 4


def test_the_folder_of_the_sources_is_not_part_of_the_key(folder, cubins, tmp_path):
    Compiler(folder, cubins).compiled(TINY, ARCH)
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere" / "kernels")
    compiler = Compiler(elsewhere, cubins)
    compiler.compiled(TINY, ARCH)
    assert compiler.compilations == 0


class CountingProgram(cuda.core.Program):
    """A program that counts how many of them are open."""

    alive = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        type(self).alive += 1

    def close(self):
        type(self).alive -= 1
        super().close()


def test_a_compile_error_holds_log_and_command_and_leaves_no_files(folder, cubins, monkeypatch):
    monkeypatch.setattr(cuda.core, "Program", CountingProgram)
    (folder / "include" / "raymoe" / "inner.cuh").write_text("#pragma once\n#define NUMBER nowhere\n")
    compiler = Compiler(folder, cubins)
    with pytest.raises(CompileError, match=r'tiny\.cu does not compile for sm_90a.*"nowhere" is undefined') as caught:
        compiler.compiled(TINY, ARCH)
    error = caught.value
    assert len(str(error).splitlines()) == 1
    assert "1 error detected" in error.log
    assert str(folder / "tiny.cu") in error.command
    assert "-arch=sm_90a" in error.command
    assert str(folder / "include") in error.command
    assert any(error.log in note and error.command in note for note in error.__notes__)
    assert entries(cubins) == temporary_files(cubins) == []
    assert CountingProgram.alive == 0
    (folder / "include" / "raymoe" / "inner.cuh").write_text("#pragma once\n#define NUMBER 8\n")
    assert compiler.compiled(TINY, ARCH).cubin
    assert CountingProgram.alive == 0


def test_a_failure_is_raised_in_all_waiting_threads_and_a_retry_compiles(folder, cubins, monkeypatch):
    compiler, start = Compiler(folder, cubins), threading.Barrier(4)
    broken = threading.Event()
    real = jit.compile_unit

    def fails(unit):
        broken.wait(5)
        raise CompileError("broken on purpose", "the log", "the command")

    monkeypatch.setattr(jit, "compile_unit", fails)

    def ask(_):
        start.wait()
        try:
            return compiler.compiled(TINY, ARCH)
        except CompileError as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, index) for index in range(4)]
        broken.set()
        assert {each.result(30) for each in asked} == {"broken on purpose"}
    monkeypatch.setattr(jit, "compile_unit", real)
    assert compiler.compiled(TINY, ARCH).cubin


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_damaged_cache_entry_is_compiled_again_and_replaced(folder, cubins, damage):
    good = Compiler(folder, cubins).compiled(TINY, ARCH)
    (entry,) = entries(cubins)
    intact = entry.read_bytes()
    middle = len(intact) // 2
    entry.write_bytes(
        {
            "cut": intact[:middle],
            "flipped": intact[:middle] + bytes([intact[middle] ^ 1]) + intact[middle + 1 :],
            "empty": b"",
            "other": b"\x7fELF of somebody else" * 20,
        }[damage]
    )
    compiler = Compiler(folder, Cubins(cubins.folder))
    assert compiler.compiled(TINY, ARCH).cubin == good.cubin
    assert compiler.compilations == 1
    assert entry.read_bytes() == intact


def test_a_reader_never_finds_half_a_cache_entry(cubins):
    blobs = {bytes([value]) * (1 << 20) for value in range(4)}
    begun, stop = threading.Event(), threading.Event()

    def write():
        while not stop.is_set():
            for blob in blobs:
                cubins.put("key", blob)
                begun.set()

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        reader = Cubins(cubins.folder)
        assert reader.get("other") is None
        assert begun.wait(30)
        found = {reader.get("key") for _ in range(200)}
        stop.set()
        writing.result(30)
    assert found <= blobs  # a half-written entry would give None


KILLED = """
import os, signal, sys
from pathlib import Path
from raymoe.cuda.jit import Cubins
os.replace = lambda *paths, **folders: os.kill(os.getpid(), signal.SIGKILL)
Cubins(Path(sys.argv[1])).put("key", b"x" * 100000)
"""


def test_a_killed_writer_leaves_no_cache_entry(cubins):
    done = subprocess.run([sys.executable, "-c", KILLED, str(cubins.folder)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert entries(cubins) == []
    assert cubins.get("key") is None
    cubins.put("key", b"whole")
    assert cubins.get("key") == b"whole"


def test_an_unusable_cache_folder_warns_once_and_compiles_anyway(folder, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    compiler = Compiler(folder, Cubins(tmp_path / "file" / "cubins"))
    with pytest.warns(RuntimeWarning, match="RAYMOE_CACHE_DIR"):
        assert compiler.compiled(TINY, ARCH).cubin
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.compiled(TINY, "sm_100a").cubin


def test_the_cache_folder_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYMOE_CACHE_DIR", str(tmp_path / "here"))
    assert Cubins.from_environment().folder == tmp_path / "here"
    monkeypatch.delenv("RAYMOE_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Cubins.from_environment().folder == tmp_path / ".cache" / "raymoe"


def test_an_unknown_kernel_is_refused_with_the_known_ones(folder, cubins):
    with pytest.raises(RaymoeError, match=r"no kernel tinny .* there are tiny"):
        Compiler(folder, cubins).compiled(KernelSource("tinny"), ARCH)


def test_cuda_headers_are_found(folder, cubins):
    (folder / "tiny.cu").write_text(f"#include <cuda_bf16.h>\n{SOURCE}")
    assert Compiler(folder, cubins).compiled(TINY, ARCH).cubin


def test_a_process_has_one_shared_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("RAYMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_shared", None)
    start = threading.Barrier(8)

    def ask(_):
        start.wait()
        return shared_compiler()

    with ThreadPoolExecutor(8) as threads:
        assert len(set(map(id, threads.map(ask, range(8))))) == 1


def test_importing_raymoe_device_loads_neither_torch_nor_cuda():
    modules = sorted(path.stem for path in Path(jit.__file__).parent.glob("*.py") if path.stem != "__init__")
    program = (
        f"import sys\nimport {', '.join(f'raymoe.cuda.{name}' for name in modules)}\n"
        "loaded = [name for name in ('torch', 'cuda', 'numpy', 'ray') if name in sys.modules]\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
