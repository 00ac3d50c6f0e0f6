"""Compiles the kernels and the machine for this CPU: once for each source, cached in the temporary folder."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from raymoe.cuda.jit import KernelSource

HERE = Path(__file__).parent
KERNELS = HERE.parent.parent / "kernels"
_HEADERS = KERNELS / "include" / "raymoe"
_SHADOWS = HERE / "include" / "raymoe"
_INCLUDE = re.compile(r'^#include "raymoe/(.+)"', re.MULTILINE)
_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-fno-gnu-unique", "-ffp-contract=off", "-fno-strict-aliasing")
_RUNTIME_FLAGS = (*_FLAGS, "-O2", "-fno-semantic-interposition", "-Wl,-Bsymbolic", "-Wall", "-Wextra")
_KERNEL_FLAGS = (
    *_FLAGS,
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-invalid-offsetof",
)
# The compiler puts a call to runtime/plain.cpp before every plain access; the sanitizer's own library is not linked.
_ACCESS_FLAGS = ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0")


class BuildError(Exception):
    """The sources differ from what this module or a `Change` expects. No test looks for this error."""


@dataclass(frozen=True)
class Change:
    """An injected bug: `old` in that file becomes `new`. Kernels without that file stay as they are."""

    file: str
    """Such as "dispatch.cu" or "ring.cuh"."""
    old: str
    new: str
    which: int | None = None
    """The occurrence to change, counted from 0; None: there must be exactly one."""

    def made_in(self, text: str) -> str:
        """Return the text with the change made.
        >>> Change("a.cuh", "f();", "", which=1).made_in("f(); g(); f(); h(); f();")
        'f(); g();  h(); f();'
        """
        parts = text.split(self.old)
        found = len(parts) - 1
        if found <= (self.which or 0) or (self.which is None and found != 1):
            raise BuildError(
                f"{self.file} has {found} times the text {self.old!r}; the change needs {self.which or 'one'}"
            )
        end = (self.which or 0) + 1
        return self.old.join(parts[:end]) + self.new + self.old.join(parts[end:])


_MOST_CACHED = 3000  # a run of all tests builds more than 500, of about 30 KiB each


@cache
def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


@dataclass(frozen=True)
class Built:
    """A compiled kernel that can be enqueued on a machine."""

    name: str
    entry: int
    """The address of a function that takes the address of the parameters."""


@cache
def runtime() -> ctypes.CDLL:
    """Load the machine."""
    return ctypes.CDLL(str(_runtime_path()))


@cache
def built(source: KernelSource, changes: tuple[Change, ...] = ()) -> Built:
    """Compile and load the kernel of that source. The compiler checks the layout of its Python twins."""
    library = ctypes.CDLL(str(_kernel_path(source, changes)))
    entry = ctypes.cast(getattr(library, f"emulated_{source.stem}"), ctypes.c_void_p).value
    assert entry is not None
    return Built(source.stem, entry)


def _kernel_path(source: KernelSource, changes: tuple[Change, ...]) -> Path:
    main = f"{source.stem}.cu"
    texts = _texts(source.path, main)
    changed = False
    for change in changes:
        named = [name for name in texts if Path(name).name == change.file]
        for name in named:
            changed = True
            texts[name] = change.made_in(texts[name])
        if not named and not [*KERNELS.rglob(change.file)]:
            raise BuildError(f"there is no {change.file} to change")
    # An injected bug needs only a few runs, which do not repay -O1 (dispatch.cu compiles in 0.34 s, with -O0 in 0.18).
    flags = (*_KERNEL_FLAGS, *_ACCESS_FLAGS, "-O0" if changed else "-O1")
    numbers = iter(range(1000))
    texts = {name: _without_cuda(text, numbers.__next__) for name, text in sorted(texts.items())}
    texts[main] += _entry(source.stem, texts[main]) + "".join(map(_layout, source.structs))
    defines = [f"-D{name}={value}" for name, value in source.defines]
    shadows = {str(path.relative_to(_SHADOWS)): path.read_text() for path in _shadow_files()}
    runtime_path = _runtime_path()  # part of the cache key, because the kernel is linked to it

    def compile_into(folder: Path, library: Path) -> None:
        for name, text in (texts | shadows).items():
            path = folder / name if name == main else folder / "raymoe" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        unit, compiled = ["-x", "c++", "-c", str(folder / main)], str(folder / "unit.o")
        _run([*flags, f"-I{folder}", *defines, *unit, "-o", compiled])
        _run([*_KERNEL_FLAGS, compiled, str(runtime_path), "-o", str(library)])

    return _cached(source.stem, [*texts.items(), *shadows.items(), *defines, *flags, runtime_path], compile_into)


def _texts(path: str, main: str) -> dict[str, str]:
    """Read the kernel's file and every header that it includes, except those that a CPU cannot run."""
    shadows = {str(path.relative_to(_SHADOWS)) for path in _shadow_files()}
    texts, waiting = {}, [main]
    while waiting:
        name = waiting.pop()
        if name not in texts and name not in shadows:
            file = KERNELS / f"{path}.cu" if name == main else _HEADERS / name
            texts[name] = file.read_text()
            waiting += _INCLUDE.findall(texts[name])
    return texts


def _shadow_files() -> list[Path]:
    """List the headers that replace those that a CPU cannot run."""
    return sorted(path for path in _SHADOWS.rglob("*") if path.is_file())


def _runtime_path() -> Path:
    files = sorted((HERE / "runtime").iterdir())
    shadows = _shadow_files()

    def compile_into(folder: Path, library: Path) -> None:
        units = [str(path) for path in files if path.suffix == ".cpp"]
        _run([*_RUNTIME_FLAGS, f"-I{HERE / 'include'}", *units, "-o", str(library)])

    texts = [path.read_text() for path in (*files, *shadows)]
    return _cached("machine", [*texts, *_RUNTIME_FLAGS], compile_into)


def _cached(name: str, identity: Sequence[object], compile_into: Callable[[Path, Path], None]) -> Path:
    """Return the path of the cached library; build it in a temporary folder first if there is none."""
    key = hashlib.sha256(repr((_version(), *identity)).encode()).hexdigest()[:24]
    kept = Path(tempfile.gettempdir()) / f"raymoe-emulator-{os.getuid()}"
    kept.mkdir(mode=0o700, exist_ok=True)
    path = kept / f"{name}-{key}.so"
    if path.exists():
        path.touch()  # the cache deletes the libraries that were used longest ago
    else:
        with _only_one(path.with_suffix(".lock")):
            if path.exists():
                return path
            with tempfile.TemporaryDirectory(dir=kept) as folder:
                library = Path(folder) / "made.so"
                compile_into(Path(folder), library)
                library.rename(path)
        for old in sorted(kept.glob("*.so"), key=_used_at)[:-_MOST_CACHED]:
            old.unlink(missing_ok=True)  # processes that have loaded it keep it
    return path


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Let one thread of all processes build at a time. The others wait for it, and find its library."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # those that wait have it open


def _used_at(path: Path) -> float:
    """Return the time of last use; 0 if another process has just deleted the file."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


@cache
def _version() -> str:
    return subprocess.run([_required_compiler(), "--version"], capture_output=True, text=True, check=True).stdout


def _required_compiler() -> str:
    found = compiler()
    if found is None:
        raise BuildError("no C++ compiler: install g++, or name one by CXX")
    return found


def _run(arguments: Sequence[str]) -> None:
    done = subprocess.run([_required_compiler(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{_required_compiler()} {' '.join(arguments)}\n{done.stderr}")


_STATIC = re.compile(r"^( *)__shared__ ([\w:]+) ([^;=]+);", re.MULTILINE)
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
_PARAMETER = re.compile(r"const __grid_constant__ ([\w:]+) (\w+)")
_KERNEL = re.compile(r'extern "C" __global__ void[^{]*?\b(\w+)\(const ([\w:]+)& \w+\)')


def _without_cuda(text: str, next_number: Callable[[], int]) -> str:
    """Turn declarations of shared memory into references to the block's, and a parameter into one for all threads.

    >>> print(_without_cuda("    __shared__ bool may, last[WARPS];", iter(range(9)).__next__))
        bool& may = emulator::static_variable<bool>(0); auto& last = emulator::static_variable<bool[WARPS]>(1);
    """

    def static(found: re.Match[str]) -> str:
        indent, kind, names = found.groups()
        made = []
        for declared in names.split(","):
            name, bracket, size = declared.strip().partition("[")
            type_ = f"{kind}{bracket}{size}"
            made.append(f"{'auto' if bracket else kind}& {name} = emulator::static_variable<{type_}>({next_number()});")
        return indent + " ".join(made)

    text = _DYNAMIC.sub(r"\1* \2 = reinterpret_cast<\1*>(emulator::dynamic_shared());", text)
    text = _PARAMETER.sub(r"const \1& \2", _STATIC.sub(static, text))
    code = re.sub(r"//.*", "", text)
    if "__shared__" in code or "__grid_constant__" in code:
        raise BuildError(f"cannot translate a declaration of shared memory or of a parameter in:\n{text}")
    return text


def _entry(stem: str, text: str) -> str:
    kernels: dict[str, str] = dict(_KERNEL.findall(text))
    if stem not in kernels:
        raise BuildError(f"{stem}.cu has no kernel {stem}; it has {sorted(kernels)}")
    return (
        f'\nextern "C" __attribute__((visibility("default"))) void emulated_{stem}(const void* params) {{\n'
        f"    {stem}(*static_cast<const {kernels[stem]}*>(params));\n}}\n"
    )


def _layout(struct: type) -> str:
    name = f"raymoe::{struct.__name__}"
    checks = [f'static_assert(sizeof({name}) == {struct.nbytes()}, "");']
    for field, offset in struct.offsets().items():
        checks.append(f'static_assert(__builtin_offsetof({name}, {field}) == {offset}, "{name}.{field}");')
    return "\n".join(checks) + "\n"
