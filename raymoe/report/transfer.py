"""Brings the directory of a run that a Ray job wrote to this machine.

If this machine can read the directory, it is copied. Otherwise a second job on the driver's node prints it as text
(`python -m raymoe.report.transfer OUT JOB`), because Ray's Jobs API moves text only. That text comes from another
machine, so it is checked: its hash, each name, and the sizes.

An earlier copy and files of the user may be at the destination. `.copied.json` there has the SHA-256 of each file that
a copy wrote. Only files that still have it are replaced or removed: all others are the user's.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import sys
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import BinaryIO

from raymoe.errors import CannotWrite, RaymoeError, one_line, shown
from raymoe.report.directory import cannot_write
from raymoe.report.ray_job import run_of
from raymoe.report.storage import MOST_BYTES, MOST_FILES, fetch, is_url

MOST_TEXT_BYTES = 64 * 2**20  # of an archive that is printed
DEFAULT_OUT = "~/raymoe_runs/{run}"
RECORD = ".copied.json"
_FOREIGN = "no file"  # instead of a digest: no regular file, or reached through a link
_BEGIN, _END, _NONE = "raymoe-run-begins", "raymoe-run-ends", "raymoe-run-missing"


class TransferError(RaymoeError):
    """A job has no run directory, or it cannot be read from here."""


def run_path(out: str | None, job: str) -> Path:
    """Give the directory of a job's run on the node of its driver. With a URL that is the copy that was written first.

    Raises TransferError if it is in a home directory that this machine lacks.

    >>> str(run_path("/results/{run}", "quick-1")), str(run_path("s3://bucket/x", "quick-1"))[-20:]
    ('/results/quick-1', '/raymoe_runs/quick-1')
    """
    template = DEFAULT_OUT if out is None or is_url(out) else out
    path = Path(template.replace("{run}", run_of(job)))
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise TransferError(f"they are in {shown(str(path))}, a home directory that this machine lacks") from error


# On the machine that asked for the results.


def copy_if_readable(out: str | None, job: str, destination: Path) -> bool:
    """Copy a job's run from a directory or URL that this machine can read; False if there is no such run here."""
    try:
        source = run_path(out, job)
    except TransferError:  # the node of the driver may have that home
        source = None
    if source is not None and source.absolute() == destination.absolute():
        return _belongs_to(destination, job)
    with _complete_at(destination, job) as partial:
        if out is not None and is_url(out):
            if fetch(out.replace("{run}", run_of(job)), partial) and _belongs_to(partial, job):
                return True
            shutil.rmtree(partial)
            return False
        if source is None or not _belongs_to(source, job):
            return False
        for file, name in _files(source):
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(read_file(file))
    return True


def unpack(text: str, job: str, destination: Path) -> None:
    """Write the run directory of a job that a second job printed.

    Raises TransferError if the text holds none, or is damaged.
    """
    if missing := re.search(rf"^{_NONE} (.*)$", text, re.MULTILINE):
        raise TransferError(one_line(missing[1]))
    printed = re.search(rf"^{_BEGIN} ([0-9]+) ([0-9a-f]{{64}})$\n(.*?)^{_END}$", text, re.MULTILINE | re.DOTALL)
    if printed is None:
        raise TransferError("the job that reads them printed no results")
    try:
        data = base64.b64decode("".join(printed[3].split()), validate=True)
    except ValueError as error:
        raise TransferError(f"the text with the results is damaged: {error}") from error
    if len(data) != int(printed[1]) or hashlib.sha256(data).hexdigest() != printed[2]:
        raise TransferError(
            f"the text with the results is damaged: {len(data)} bytes arrived, not {printed[1]} of that hash"
        )
    with _complete_at(destination, job) as partial:
        try:
            _extract(data, partial)
        except (tarfile.TarError, zlib.error, EOFError, ValueError, OverflowError) as error:
            raise TransferError(f"the archive with the results is damaged: {one_line(str(error))}") from error


def _extract(data: bytes, partial: Path) -> None:
    # At once and bounded, because headers of an archive may be as large as files.
    plain = zlib.decompressobj(wbits=31).decompress(data, MOST_BYTES + 1)
    if len(plain) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
    total = 0
    with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as archive:
        for count, member in enumerate(archive):
            if not member.isreg() or not is_name_inside(member.name):
                raise ValueError(f"{shown(member.name)} is not a file of a run directory")
            total += member.size
            if total > MOST_BYTES or count >= MOST_FILES:
                raise ValueError(f"more than {MOST_FILES} files or {MOST_BYTES >> 20} MiB")
            content = archive.extractfile(member)
            assert content is not None
            with _new_file(partial / PurePosixPath(member.name)) as file:
                shutil.copyfileobj(content, file)


def _new_file(path: Path) -> BinaryIO:
    """Make a file of an archive. Raises ValueError if its name is too long, or is that of another file or folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("xb")
    except OSError as error:
        if isinstance(error, (FileExistsError, NotADirectoryError)) or error.errno == errno.ENAMETOOLONG:
            raise ValueError(f"{shown(path.name)} cannot be a file of it: {error.strerror}") from error
        raise


@contextmanager
def _complete_at(destination: Path, job: str) -> Iterator[Path]:
    """Give an empty directory beside `destination`, which takes its place if the block ends well and filled it.

    An earlier copy of the same job's results is renewed (`put_in_place`). Anything else there stays, and is an error.
    """
    destination = destination.resolve()  # through a link, and of `.`
    partial = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True, mode=0o700)
        yield partial
        if partial.is_dir() and any(partial.iterdir()):
            put_in_place(partial, destination, renew=_belongs_to(destination, job))
    except OSError as error:
        raise cannot_write(destination, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _belongs_to(directory: Path, job: str) -> bool:
    """Whether a directory has the results of this job, and not those of another run at the same path."""
    try:
        facts = json.loads(read_file(directory / "environment.json"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(facts, dict) and facts.get("ray_job") == job


def _files(directory: Path) -> Iterator[tuple[Path, Path]]:
    """Give the files of a run directory with their names in it. Links and hidden files are left out."""
    total, count = 0, 0
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder) / name
            status = path.lstat()
            if name.startswith(".") or not stat.S_ISREG(status.st_mode):
                continue
            total, count = total + status.st_size, count + 1
            if count > MOST_FILES or total > MOST_BYTES:
                raise CannotWrite(f"{directory} has more than {MOST_FILES} files or {MOST_BYTES >> 20} MiB")
            yield path, path.relative_to(directory)


# A copy takes its place.


def put_in_place(copy: Path, destination: Path, renew: bool) -> None:
    """Move the files of a copy to `destination`. `renew` says that an earlier copy of the same run is there.

    Raises CannotWrite, and moves nothing, if a file of the user has the name of one that has changed in the run.
    """
    names = [path.relative_to(copy) for path in sorted(copy.rglob("*")) if path.is_file()]
    new = {name.as_posix(): _digest(copy, name) or _FOREIGN for name in names}
    (copy / RECORD).write_text(json.dumps(new, indent=2) + "\n")
    if renew:
        _renew(copy, destination, new)
    elif destination.is_dir() and not any(destination.iterdir()):  # not replaced: it may be where a shell is
        for path in copy.iterdir():
            path.rename(destination / path.name)
    else:
        copy.chmod(0o777 & ~_umask())
        copy.rename(destination)


def _renew(copy: Path, destination: Path, new: dict[str, str]) -> None:
    before = _recorded(destination)
    moved, conflicts = [], []
    for name, digest in new.items():
        there, earlier = _digest(destination, PurePosixPath(name)), before.get(name)
        if there is None or (there == earlier and there != digest):
            moved.append(name)
        elif digest not in (there, earlier):  # neither there already nor unchanged since the earlier copy
            conflicts.append(name)
    if conflicts:
        first = shown(str(destination / conflicts[0]))
        more = f" and {len(conflicts) - 1} more" if len(conflicts) > 1 else ""
        raise CannotWrite(
            f"{first}{more} would be overwritten, which no copy of this run wrote or which was changed since; "
            "move it away, or name another place with --out"
        )
    for name in moved:
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (copy / name).replace(target)
    for name in before.keys() - new.keys():
        if _digest(destination, PurePosixPath(name)) == before[name]:
            (destination / name).unlink()
    (copy / RECORD).replace(destination / RECORD)


def _recorded(directory: Path) -> dict[str, str]:
    """Return the digests of the files that earlier copies wrote, by name."""
    try:
        record = json.loads(read_file(directory / RECORD))
    except (OSError, ValueError, RecursionError):
        return {}  # a copy that another program made: nothing in it counts as written here
    if not isinstance(record, dict):
        return {}
    return {name: digest for name, digest in record.items() if is_name_inside(name) and isinstance(digest, str)}


def is_name_inside(name: str) -> bool:
    r"""Whether this is the name of a file in a run directory: printable, not hidden, and inside of it.

    >>> [is_name_inside(name) for name in ("plots/a.png", "../a", "/a", ".ssh/a", "a\n", "")]
    [True, False, False, False, False, False]
    """
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") for part in path.parts)  # `..` too
    return bool(path.parts) and not path.is_absolute() and not hidden and name.isprintable()


def _digest(directory: Path, name: PurePath) -> str | None:
    """Return the SHA-256 of a file of a directory; None if there is none."""
    for folder in reversed((directory / name).parents[: len(name.parts) - 1]):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            return _FOREIGN
    try:
        return hashlib.sha256(read_file(directory / name)).hexdigest()
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return _FOREIGN


def read_file(path: Path) -> bytes:
    """Read a regular file: no link, and no FIFO, which would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is not a regular file")
        return file.read(MOST_BYTES)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# On the node of the driver.


def pack(directory: Path, job: str) -> str:
    """Write a run directory as text, with its length and hash."""
    if not _belongs_to(directory, job):
        return f"{_NONE} no run of this job is in {directory}\n"
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path, name in _files(directory):
            content = read_file(path)
            member = tarfile.TarInfo(name.as_posix())
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    data = archive.getvalue()
    if len(data) > MOST_TEXT_BYTES:
        return f"{_NONE} {directory} has {len(data) >> 20} MiB packed, more than the {MOST_TEXT_BYTES >> 20} to copy\n"
    text = base64.b64encode(data).decode()
    lines = [text[i : i + 1024] for i in range(0, len(text), 1024)]  # Ray's log tools read whole lines
    return "\n".join([f"{_BEGIN} {len(data)} {hashlib.sha256(data).hexdigest()}", *lines, _END, ""])


def _printed(out: str | None, job: str) -> str:
    try:
        return pack(run_path(out, job), job)
    except TransferError as error:
        return f"{_NONE} {error}\n"


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # a reader that ends early has its reason
        sys.stdout.write(_printed(sys.argv[1] or None, sys.argv[2]))
