"""A config's text off the disk, with every way in which a path can be something else."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from raymoe.job.errors import ConfigError
from raymoe.job.packaged import packaged_config, packaged_names
from raymoe.job.problem import Problem, shown

MAX_BYTES = 64 * 1024


def find_config(config: str) -> Path:
    """A path that exists is a file; anything else is the name of a packaged config."""
    path = Path(config)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        found = packaged_config(config)
        if found is None:
            raise _unknown(config) from None
        return found
    except (OSError, ValueError) as error:
        raise _unreadable(shown(config), _reason(error)) from error
    return path


def read_config(path: Path, name: str) -> str:
    """The text of a config, of which `name` is how the user knows it."""
    try:
        # Not blocking: a FIFO without a writer would hang here, before it is known not to be a file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _unreadable(name, _reason(error)) from error
    try:
        data = _read(descriptor, name)
    except OSError as error:
        raise _unreadable(name, _reason(error)) from error
    finally:
        os.close(descriptor)
    if b"\0" in data:
        raise _unreadable(name, "is binary, not YAML")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reason = f"not UTF-8: the byte {data[error.start]:#04x} starts no character"
        raise refused(Problem(name, line, "", None, reason)) from error


def _read(descriptor: int, name: str) -> bytes:
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise _unreadable(name, "is a directory, not a config")
    if not stat.S_ISREG(status.st_mode):
        raise _unreadable(name, "is not a regular file")
    if status.st_size > MAX_BYTES:
        raise _unreadable(name, f"has {status.st_size} bytes, a config has at most {MAX_BYTES}")
    data = b""
    while block := os.read(descriptor, MAX_BYTES):
        data += block
        if len(data) > MAX_BYTES:  # it grew since, or (below /proc) never told its size
            raise _unreadable(name, f"has more than {MAX_BYTES} bytes, the most that a config has")
    return data


def refused(problem: Problem) -> ConfigError:
    """The error of a config that cannot be read any further."""
    return ConfigError(str(problem), [problem])


def _unreadable(name: str, reason: str) -> ConfigError:
    return refused(Problem(name, None, "", None, reason))


def _reason(error: OSError | ValueError) -> str:
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def _unknown(config: str) -> ConfigError:
    from raymoe.job.nearest import nearest

    names = packaged_names()
    near = nearest(Path(config).name.removesuffix(".yaml"), names)
    choice = f"did you mean '{near}'?" if near else f"packaged are {_listed(names) or 'none'}"
    return _unreadable(shown(config) or "''", f"neither a file nor a packaged config, {choice}")


def _listed(names: Sequence[str]) -> str:
    """Names in a row, without those that extend another.

    >>> _listed(["p2p", "p2p_host", "p2p_host_large", "quickstart"])
    'p2p, quickstart, and 2 variants of these'
    """
    first = [name for name in names if not any(name.startswith(f"{other}_") for other in names)]
    more = len(names) - len(first)
    variants = f", and {more} variant{'s' * (more > 1)} of these" if more else ""
    return ", ".join(first) + variants
