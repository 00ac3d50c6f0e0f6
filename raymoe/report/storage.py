"""Copies a run directory to a URL and back: `python -m raymoe.report.storage put DIR URL` (or `get URL DIR`).

pyarrow opens file, s3, gs and hdfs, as Ray Train does; fsspec opens what pyarrow does not. They start threads and may
wait for a network without bound. So they run in a process of their own, which `Mirror` and `fetch` end in time.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raymoe.errors import CannotWrite, ClusterError, one_line, shown

PUT_S, GET_S = 120.0, 120.0
MOST_FILES, MOST_BYTES = 10_000, 256 * 2**20  # of one run directory
NOTHING = 4  # the exit code of `get` where there is no run


def is_url(out: str) -> bool:
    """Tell a URL from a path.

    >>> is_url("s3://bucket/runs/{run}"), is_url("/results"), is_url("C:/x")
    (True, False, False)
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", out) is not None


# In this process.


@dataclass
class Mirror:
    """Keeps the copy of a run directory at a URL. `start` returns at once; `finish` waits for the last copy."""

    directory: Path
    url: str
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Begin to copy, unless one runs. The next one or `finish` copies the files that it misses."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                _command("put", str(self.directory), self.url),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def finish(self) -> None:
        """Copy everything. Raises CannotWrite if that fails or takes longer than PUT_S."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        code, reason = _run("put", str(self.directory), self.url, PUT_S)
        if code != 0:
            raise CannotWrite(
                f"cannot write the results to {shown(self.url)}: {reason}; they are in {self.directory}, copy them"
            )


def fetch(url: str, directory: Path) -> bool:
    """Copy the run at a URL into a directory; False if there is none. Raises ClusterError if the URL cannot be read."""
    code, reason = _run("get", url, str(directory), GET_S)
    if code not in (0, NOTHING):
        raise ClusterError(f"cannot read {shown(url)}: {reason}; check the URL and the credentials for it")
    return code == 0


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "raymoe.report.storage", *words]


def _run(verb: str, source: str, target: str, seconds: float) -> tuple[int, str]:
    """Run a copy to its end, and give its exit code and the last line of its errors."""
    began = time.monotonic()
    process = subprocess.Popen(
        _command(verb, source, target),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return 1, f"no end after {time.monotonic() - began:.0f} s"
    finally:
        process.kill()
        process.wait()
    lines = errors.decode(errors="replace").strip().splitlines()
    return process.returncode, one_line(lines[-1]) if lines else f"exit code {process.returncode}"


# In the process of a copy.


def _file_system(url: str) -> tuple[Any, str]:
    """Open the file system of a URL, and give it with the path there."""
    try:
        from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem
    except ImportError:
        raise SystemExit("pyarrow is not installed; pip install pyarrow, or name a directory") from None
    try:
        opened, path = FileSystem.from_uri(url)
        return opened, str(path)
    except OSError as error:  # pyarrow has this kind of storage, and its words say what failed there
        raise SystemExit(str(error)) from None
    except (ValueError, NotImplementedError) as error:
        import fsspec

        try:
            opened, path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as also:
            raise SystemExit(f"{also} (pyarrow: {error})") from None
        return PyFileSystem(FSSpecHandler(opened)), path


def _put(directory: Path, url: str) -> int:
    files, root = _file_system(url)
    names = [path.relative_to(directory) for path in sorted(directory.rglob("*")) if _is_result(path, directory)]
    # summary.json last: where it is, the run has ended and everything else is there.
    for name in sorted(names, key=lambda name: name.name == "summary.json"):
        target = f"{root.rstrip('/')}/{name.as_posix()}"
        files.create_dir(target.rpartition("/")[0], recursive=True)
        with files.open_output_stream(target) as stream:
            stream.write((directory / name).read_bytes())
    if Path("summary.json") not in names:  # an earlier attempt's: this run has not ended
        _remove(files, f"{root.rstrip('/')}/summary.json")
    return 0


def _remove(files: Any, path: str) -> None:
    from pyarrow.fs import FileType

    if files.get_file_info(path).type == FileType.File:
        files.delete_file(path)


def _is_result(path: Path, directory: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
    return path.is_file() and not path.is_symlink() and not hidden


def _get(url: str, directory: Path) -> int:
    from pyarrow.fs import FileSelector, FileType

    files, root = _file_system(url)
    root = root.rstrip("/")
    infos = files.get_file_info(FileSelector(root, allow_not_found=True, recursive=True))
    infos = [info for info in infos if info.type == FileType.File]
    if not any(info.path == f"{root}/config.yaml" for info in infos):
        return NOTHING
    if len(infos) > MOST_FILES or sum(info.size or 0 for info in infos) > MOST_BYTES:
        raise SystemExit(f"more than {MOST_FILES} files or {MOST_BYTES >> 20} MiB, the limits of a run directory")
    for info in infos:
        name = Path(info.path.removeprefix(f"{root}/"))
        if name.is_absolute() or ".." in name.parts:
            raise SystemExit(f"the name {shown(str(name))} leads out of the directory")
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.open_input_stream(info.path) as stream:
            target.write_bytes(stream.read())
    return 0


if __name__ == "__main__":
    verb, first, second = sys.argv[1:]
    sys.exit(_put(Path(first), second) if verb == "put" else _get(first, Path(second)))
