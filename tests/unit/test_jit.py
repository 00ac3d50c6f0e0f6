"""Compiling at run time: once, whole, the same for everybody, and with nothing left behind where it fails."""

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

from raymoe.device import jit
from raymoe.device.jit import CompileError, Compiler, Cubins, KernelSource, shared_compiler
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


def aside(cubins: Cubins) -> list[Path]:
    return [path for path in cubins.folder.glob("*") if path.suffix != ".cubin"]


def test_the_second_start_compiles_nothing(folder, cubins):
    first, second = Compiler(folder, cubins), Compiler(folder, Cubins(cubins.folder))
    cold, warm = first.compiled(TINY, ARCH), second.compiled(TINY, ARCH)
    assert (first.compilations, second.compilations) == (1, 0)
    assert warm.cubin == cold.cubin
    assert cold.cubin.startswith(b"\x7fELF")
    assert "registers" in cold.log
    assert ".entry tiny" in cold.ptx


START = """
from raymoe.device.copy import COPY
from raymoe.device.jit import shared_compiler
compiler = shared_compiler()
done = compiler.compiled(COPY, "sm_90a")
print(compiler.compilations, done.key)
"""


def test_the_second_process_compiles_nothing_of_what_is_shipped(tmp_path):
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
from raymoe.device.jit import Cubins
from raymoe.device.jit import Compiler, KernelSource
import cuda.core
compiler = Compiler(Path(sys.argv[1]), Cubins.from_environment())
print("ready", flush=True)
sys.stdin.readline()
done = compiler.compiled(KernelSource("tiny"), "sm_90a")
print(hashlib.sha256(done.cubin).hexdigest(), flush=True)
"""


def test_processes_that_race_agree(folder, cubins):
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
        said = {racer.communicate(timeout=60)[0].strip() for racer in racers}
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    after = Compiler(folder, cubins)
    assert said == {hashlib.sha256(after.compiled(TINY, ARCH).cubin).hexdigest()}
    assert after.compilations == 0
    assert len(entries(cubins)) == 1
    assert aside(cubins) == []


def change(path: Path) -> None:
    path.write_text(path.read_text() + "// changed\n")


@pytest.mark.parametrize("name", ["tiny.cu", "include/raymoe/outer.cuh", "include/raymoe/inner.cuh"])
def test_a_change_of_the_source_or_of_any_header_is_compiled(folder, cubins, name):
    compiler = Compiler(folder, cubins)
    before = compiler.compiled(TINY, ARCH)
    change(folder / name)
    assert compiler.compiled(TINY, ARCH).key != before.key
    assert compiler.compilations == 2


def test_a_header_that_is_not_included_changes_nothing(folder, cubins):
    compiler = Compiler(folder, cubins)
    before = compiler.compiled(TINY, ARCH)
    change(folder / "include" / "raymoe" / "unused.cuh")
    assert compiler.compiled(TINY, ARCH) is before


def test_flags_and_architecture_and_nvrtc_are_part_of_the_key(folder, cubins, monkeypatch):
    compiler = Compiler(folder, cubins)
    keys = [compiler.compiled(TINY, ARCH).key, compiler.compiled(TINY, "sm_100a").key]
    keys.append(compiler.compiled(KernelSource("tiny", defines=(("FACTOR", "3"),)), ARCH).key)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (13, 99))
    keys.append(compiler.compiled(TINY, ARCH).key)
    assert len(set(keys)) == 4
    assert compiler.compilations == 4


def test_where_the_sources_lie_is_not(folder, cubins, tmp_path):
    Compiler(folder, cubins).compiled(TINY, ARCH)
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere" / "kernels")
    compiler = Compiler(elsewhere, cubins)
    compiler.compiled(TINY, ARCH)
    assert compiler.compilations == 0


class Counting(cuda.core.Program):
    """A program that says when it is made and when it is destroyed."""

    alive = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        type(self).alive += 1

    def close(self):
        type(self).alive -= 1
        super().close()


def test_a_failure_tells_everything_and_leaves_nothing(folder, cubins, monkeypatch):
    monkeypatch.setattr(cuda.core, "Program", Counting)
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
    assert entries(cubins) == aside(cubins) == []
    assert Counting.alive == 0
    (folder / "include" / "raymoe" / "inner.cuh").write_text("#pragma once\n#define NUMBER 8\n")
    assert compiler.compiled(TINY, ARCH).cubin
    assert Counting.alive == 0


def test_a_failure_reaches_all_who_wait_and_the_next_may_succeed(folder, cubins, monkeypatch):
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
def test_a_damaged_entry_is_compiled_again_and_mended(folder, cubins, damage):
    good = Compiler(folder, cubins).compiled(TINY, ARCH)
    (entry,) = entries(cubins)
    whole = entry.read_bytes()
    middle = len(whole) // 2
    entry.write_bytes(
        {
            "cut": whole[:middle],
            "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "empty": b"",
            "other": b"\x7fELF of somebody else" * 20,
        }[damage]
    )
    compiler = Compiler(folder, Cubins(cubins.folder))
    assert compiler.compiled(TINY, ARCH).cubin == good.cubin
    assert compiler.compilations == 1
    assert entry.read_bytes() == whole


def test_a_reader_finds_all_of_an_entry_or_nothing(cubins):
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
    assert found <= blobs  # not None either, which is what a half-written entry would give


KILLED = """
import os, signal, sys
from pathlib import Path
from raymoe.device.jit import Cubins
os.replace = lambda *paths, **folders: os.kill(os.getpid(), signal.SIGKILL)
Cubins(Path(sys.argv[1])).put("key", b"x" * 100000)
"""


def test_a_writer_that_is_killed_leaves_no_entry(cubins):
    done = subprocess.run([sys.executable, "-c", KILLED, str(cubins.folder)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert entries(cubins) == []
    assert cubins.get("key") is None
    cubins.put("key", b"whole")
    assert cubins.get("key") == b"whole"


def test_a_folder_that_cannot_be_used_is_named_once_and_costs_no_run(folder, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    compiler = Compiler(folder, Cubins(tmp_path / "file" / "cubins"))
    with pytest.warns(RuntimeWarning, match="RAYMOE_CACHE_DIR"):
        assert compiler.compiled(TINY, ARCH).cubin
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.compiled(TINY, "sm_100a").cubin


def test_the_folder_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYMOE_CACHE_DIR", str(tmp_path / "here"))
    assert Cubins.from_environment().folder == tmp_path / "here"
    monkeypatch.delenv("RAYMOE_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Cubins.from_environment().folder == tmp_path / ".cache" / "raymoe"


def test_a_kernel_that_is_not_there(folder, cubins):
    with pytest.raises(RaymoeError, match=r"no kernel tinny .* there are tiny"):
        Compiler(folder, cubins).compiled(KernelSource("tinny"), ARCH)


def test_cuda_s_own_headers_are_found(folder, cubins):
    (folder / "tiny.cu").write_text(f"#include <cuda_bf16.h>\n{SOURCE}")
    assert Compiler(folder, cubins).compiled(TINY, ARCH).cubin


def test_there_is_one_compiler_a_process(monkeypatch, tmp_path):
    monkeypatch.setenv("RAYMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_shared", None)
    start = threading.Barrier(8)

    def ask(_):
        start.wait()
        return shared_compiler()

    with ThreadPoolExecutor(8) as threads:
        assert len(set(map(id, threads.map(ask, range(8))))) == 1


def test_nothing_is_loaded_before_it_is_used():
    modules = sorted(path.stem for path in Path(jit.__file__).parent.glob("*.py") if path.stem != "__init__")
    program = (
        f"import sys\nimport {', '.join(f'raymoe.device.{name}' for name in modules)}\n"
        "loaded = [name for name in ('torch', 'cuda', 'numpy', 'ray') if name in sys.modules]\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
