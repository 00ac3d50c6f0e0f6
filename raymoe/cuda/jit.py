"""Compile kernels at run time, by NVRTC through `cuda.core`: no nvcc and no build step.

A compiled kernel has a key: the hash of its source, all included headers, its Python structs, flags, architecture and
NVRTC's version. Paths are not in the key, so all installations of a user share compiled kernels.

A process compiles a key once, for all threads. The result stays on disk for later processes. Processes that ask at the
same time each compile, and their results are equal.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raymoe.cuda import cache
from raymoe.cuda.params import Params
from raymoe.errors import CudaMissing, RaymoeError, printable
from raymoe.packaged import packaged_folder

# The headers of a kernel, which are part of its key.

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)


@dataclass
class Headers:
    """Headers that a source includes, and the names for which there is no file."""

    texts: dict[Path, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)


def included(text: str, folders: Sequence[Path]) -> Headers:
    """Find every header that `text` includes, at any depth, looked for in `folders` in turn.

    Preprocessor conditions are not evaluated, so this may find headers that the compiler never opens. Then a key
    changes more often than needed, which is safe. For the same reason a missing header is no error here: the compiler
    reports it if it matters.
    """
    headers = Headers()
    waiting = [(text, list(folders))]
    while waiting:
        content, search = waiting.pop()
        for bracket, name in _INCLUDE.findall(content):
            places = search if bracket == '"' else folders
            path = next((folder / name for folder in places if (folder / name).is_file()), None)
            if path is None:
                headers.missing.add(name)
            elif (path := path.resolve()) not in headers.texts:
                headers.texts[path] = path.read_text(encoding="utf-8", errors="surrogateescape")
                waiting.append((headers.texts[path], [path.parent, *folders]))
    return headers


# Compiled kernels on disk, shared by all processes of a user.
#
# An entry is the machine code followed by its SHA-256: tools that read cubins still read it, and an entry that was
# damaged on disk is found out and compiled again. `cache` says which folders and files are trusted.
#
# A folder that cannot be used costs a second a kernel and process, which is no reason to end a run: a RuntimeWarning
# names it.

LIMIT_BYTES = 512 << 20
_DIGEST_BYTES = 32
_SUFFIX = ".cubin"


class Cubins:
    """A mapping from a key to machine code. Any number of threads and processes may use one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._out_of_use = False
        self._warned = False

    @classmethod
    def from_environment(cls) -> Cubins:
        return cls(cache.cache_folder())

    def get(self, key: str) -> bytes | None:
        """Give the content that this user has put under the key; None if there is none, or if it is damaged."""
        if self._out_of_use:
            return None
        try:
            with cache.private_folder(self.folder) as folder:
                entry = self._entry(folder, key)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up(error)
            return None
        if entry is None:
            return None
        code, digest = entry[:-_DIGEST_BYTES], entry[-_DIGEST_BYTES:]
        return code if code and hashlib.sha256(code).digest() == digest else None

    def put(self, key: str, code: bytes) -> None:
        if self._out_of_use:
            return
        try:
            with cache.private_folder(self.folder, create=True) as folder:
                cache.write(folder, key + _SUFFIX, code + hashlib.sha256(code).digest())
                cache.bound(folder, _SUFFIX, LIMIT_BYTES)
        except OSError as error:
            self._give_up(error)

    def _entry(self, folder: int, key: str) -> bytes | None:
        """Read an entry. One that somebody else may have written is told once; the compiled kernel replaces it."""
        try:
            return cache.read(folder, key + _SUFFIX, LIMIT_BYTES)
        except cache.NotPrivateError as error:
            self._warn(f"{self.folder / key}{_SUFFIX} is not used ({error.strerror}); it is compiled again")
            return None

    def _give_up(self, error: OSError) -> None:
        self._out_of_use = True
        self._warn(
            f"compiled kernels cannot be kept in {self.folder} ({error.strerror or error}), so every process compiles "
            f"its own; set {cache.CACHE_VARIABLE} to a folder that you own and only you can write"
        )

    def _warn(self, sentence: str) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            warnings.warn(printable(sentence), RuntimeWarning, stacklevel=2)


_SCHEME = "raymoe 1"  # to be changed with the contents of a key or of an entry


class CompileError(RaymoeError):
    """A kernel does not compile. Tracebacks show the whole log and the command, as notes."""

    def __init__(self, message: str, log: str, command: str) -> None:
        super().__init__(message)
        self.log = log
        self.command = command
        self.add_note(f"command: {command}\n{log}")


@dataclass(frozen=True)
class KernelSource:
    """`kernels/<path>.cu`, and the structs and macros to compile it with."""

    path: str
    """The folder and the name of the file, such as "peer/dispatch"."""
    structs: tuple[type[Params], ...] = ()
    """Python twins of structs in the source; the compiler checks that their layouts are equal."""
    defines: tuple[tuple[str, str], ...] = ()

    @property
    def stem(self) -> str:
        """The name of the file without its folder, which is also the name of its kernel."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Compiled:
    """Machine code of a source for an architecture."""

    source: KernelSource
    arch: str
    key: str
    cubin: bytes
    log: str
    """The output of NVRTC and ptxas; empty where the code came from disk."""
    ptx: str
    """Empty where the code came from disk."""


class Compiler:
    """Compiles the sources of one folder. Safe from any thread."""

    def __init__(self, folder: Path | None = None, cubins: Cubins | None = None) -> None:
        kernels = folder or packaged_folder("kernels")
        if kernels is None:
            raise RaymoeError("the folder kernels/ is missing from this installation of raymoe; install it again")
        self.folder = kernels
        self._cubins = cubins or Cubins.from_environment()
        self._lock = threading.Lock()
        self._compiled: dict[str, Future[Compiled]] = {}
        self.compilations = 0
        """How many times this object has run NVRTC."""

    def compiled(self, source: KernelSource, arch: str) -> Compiled:
        """Return the code of a source for an architecture such as sm_90a: known, from disk, or compiled now."""
        unit = self._unit(source, arch)
        with self._lock:
            future = self._compiled.get(unit.key)
            ours = future is None
            if future is None:
                future = self._compiled[unit.key] = Future()
        if not ours:
            return future.result()
        try:
            done = self._from_disk(unit) or self._compile(unit)
        except BaseException as error:
            with self._lock:
                del self._compiled[unit.key]  # the next caller tries again
            future.set_exception(error)
            raise
        future.set_result(done)
        return done

    def _from_disk(self, unit: _Unit) -> Compiled | None:
        cubin = self._cubins.get(unit.key)
        return None if cubin is None else Compiled(unit.source, unit.arch, unit.key, cubin, log="", ptx="")

    def _compile(self, unit: _Unit) -> Compiled:
        with self._lock:
            self.compilations += 1
        done = compile_unit(unit)
        self._cubins.put(unit.key, done.cubin)
        return done

    def _unit(self, source: KernelSource, arch: str) -> _Unit:
        path = self.folder / f"{source.path}.cu"
        if not path.is_file():
            known = ", ".join(sorted(str(file.relative_to(self.folder))[:-3] for file in self.folder.rglob("*.cu")))
            raise RaymoeError(f"no kernel {source.path} in {self.folder}; there are {known or 'none'}")
        text = path.read_text(encoding="utf-8")
        checks = "".join(struct.layout_check() for struct in source.structs)
        text = f"{text}\n// Added by raymoe/cuda/params.py: checks of the layouts.\n{checks}"
        folders = [self.folder / "include"]
        headers = included(text, folders)
        if headers.missing and (toolkit := _toolkit_headers()) is not None:
            folders.append(toolkit)
            headers = included(text, folders)
        version = nvrtc_version()
        identity = hashlib.sha256()
        for part in (
            _SCHEME,
            f"{source.stem}.cu",
            text,
            *(part for named in sorted((path.name, each) for path, each in headers.texts.items()) for part in named),
            repr((arch, version, source.defines, _FLAGS)),
        ):
            encoded = part.encode("utf-8", errors="surrogateescape")
            identity.update(len(encoded).to_bytes(8, "little") + encoded)
        return _Unit(source, arch, identity.hexdigest(), path, text, tuple(folders))


@dataclass(frozen=True)
class _Unit:
    """The input of NVRTC."""

    source: KernelSource
    arch: str
    key: str
    path: Path
    text: str
    folders: tuple[Path, ...]


_FAULT = re.compile(r"\berror\b.*:|\bfatal\b")

# lineinfo: profilers and compute-sanitizer can name lines; free at run time. -v: logs registers, stack and spills.
_FLAGS = {"std": "c++17", "lineinfo": True, "ptxas_options": ["-v"]}


_IMPORTING = threading.Lock()
"""Held by a thread that imports modules of CUDA: they import one another, and a second thread could get half of one."""


def compile_unit(unit: _Unit) -> Compiled:
    """Run NVRTC on a unit."""
    with _IMPORTING:
        from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=str(unit.path),
        arch=unit.arch,
        include_path=[str(folder) for folder in unit.folders],
        define_macro=list(unit.source.defines) or None,
        **_FLAGS,
    )
    flags = " ".join(flag.decode() for flag in options.as_bytes("nvrtc"))
    command = f"nvrtc {'.'.join(map(str, nvrtc_version()))} {flags} {unit.path}"
    log = io.StringIO()
    program = None
    try:
        program = Program(unit.text, "c++", options)
        cubin = bytes(program.compile("cubin", logs=log).code)
        ptx = _ptx(program)
    except Exception as error:  # cuda.core's error classes have no public names
        output = f"{log.getvalue()}{error}".rstrip("\0 \n")
        first = next((line.strip() for line in output.splitlines() if _FAULT.search(line)), output)
        raise CompileError(
            f"{unit.path} does not compile for {unit.arch}: {first}; the log and the command are in the notes of this "
            "error and in its attributes",
            output,
            command,
        ) from error
    finally:
        if program is not None:
            program.close()
    return Compiled(unit.source, unit.arch, unit.key, cubin, log.getvalue(), ptx)


def nvrtc_version() -> tuple[int, int]:
    """Return the version of the NVRTC that this process loads."""
    try:
        with _IMPORTING:
            from cuda.bindings import nvrtc

        code, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise CudaMissing(
            f"kernels are compiled by NVRTC, which cannot be loaded ({error}); pip install 'cuda-python>=13,<14' "
            "'nvidia-cuda-nvrtc>=13,<14'"
        ) from error
    if int(code) != 0:
        raise CudaMissing(f"nvrtcVersion failed: {code.name}; install another nvidia-cuda-nvrtc")
    return int(major), int(minor)


def _ptx(program: Any) -> str:
    """Return the program's PTX, which NVRTC keeps beside the machine code; empty if it cannot be had."""
    from cuda.bindings import nvrtc

    code, nbytes = nvrtc.nvrtcGetPTXSize(program.handle)
    text = bytes(nbytes)
    if int(code) == 0:
        (code,) = nvrtc.nvrtcGetPTX(program.handle, text)
    return text.rstrip(b"\0").decode() if int(code) == 0 else ""


def _toolkit_headers() -> Path | None:
    """Return the folder of CUDA's headers (cuda_bf16.h), of nvidia-cuda-runtime or of a toolkit; None if missing."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return None
    folder = find_nvidia_header_directory("cudart")
    return Path(folder) if folder else None


_SHARED_LOCK = threading.Lock()
_shared: Compiler | None = None


def shared_compiler() -> Compiler:
    """Return the compiler that all callers in this process share, so that each kernel is compiled once.

    It reads RAYMOE_CACHE_DIR only when it is made.
    """
    global _shared
    with _SHARED_LOCK:
        if _shared is None:
            _shared = Compiler()
        return _shared
