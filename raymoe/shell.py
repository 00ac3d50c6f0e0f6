"""Prepares the process of a command for its shell: signals that stop it, and standard streams that may be gone.

- A stop signal raises `Interrupted`, from before the first slow import. `cli.main` turns it into one sentence.
- Writing to stdout or stderr never raises. A stderr that is closed, full or stalled loses text, not exit codes.
- File descriptors 0, 1 and 2 are open, so that no file of results gets one of these numbers.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import stat
import sys
from types import FrameType
from typing import Any, TextIO

from raymoe.errors import CannotWrite, Stopped

STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
STALL_S = 5.0  # until a reader of stderr that takes nothing counts as gone


class Interrupted(KeyboardInterrupt):
    """A signal asked the command to stop. Not an `Exception`, because handlers of errors must not catch it."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.stopped = Stopped(signum)


def prepare() -> None:
    """Install the signal handlers and replace the standard streams. A second call changes nothing."""
    if not isinstance(signal.getsignal(signal.SIGTERM), _Handler):
        handler = _Handler()
        for number in stop_signals():
            signal.signal(number, handler)
    if _stream(sys.stdout) is None:
        for fd in (0, 1, 2):
            _open_if_closed(fd)
        sys.stdout = _replace(sys.stdout, _Stream(1))
        sys.stderr = _replace(sys.stderr, _Stream(2, STALL_S))


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a command: STOP_SIGNALS, without SIGHUP under nohup."""
    return [n for n in STOP_SIGNALS if n is not signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


def check_stdout() -> None:
    """Raise CannotWrite if output was lost. It is no failure if the reader closed the pipe or nobody gave a stdout."""
    stream = _stream(sys.stdout)
    sys.stdout.flush()
    if stream is not None and stream.lost is not None and stream.lost.errno not in (errno.EPIPE, errno.EBADF):
        raise CannotWrite(f"the output cannot be written: {stream.lost.strerror}") from stream.lost


def ignore_stops() -> None:
    """Ignore stop signals from now on: the exit code is decided, and Python would report an exception at its exit."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class _Handler:
    """Raises `Interrupted` at the first signal, and exits at the second: the first exception may have been lost."""

    def __init__(self) -> None:
        self.called = False

    def __call__(self, signum: int, _: FrameType | None) -> None:
        if not self.called:
            self.called = True
            raise Interrupted(signum)
        stopped = Stopped(signum)
        with contextlib.suppress(OSError):
            os.write(2, f"{stopped}\n".encode())
        os._exit(stopped.exit_code)


class _Stream(io.FileIO):
    """A standard stream whose writes never fail. `lost` is the reason why text was lost, if any was.

    With `stall_s`, a pipe whose reader takes nothing for that time loses text too. A terminal may be held by Ctrl-S for
    any time, and a file is always ready.
    """

    def __init__(self, fd: int, stall_s: float | None = None) -> None:
        super().__init__(fd, "w", closefd=False)
        self.lost: OSError | None = None
        self._stall_s = stall_s if stat.S_ISFIFO(os.fstat(fd).st_mode) else None

    def write(self, data: Any) -> int:
        """Write some of the bytes. The caller is the buffer above, which then writes the others."""
        try:
            if self._stall_s is not None:
                self._wait(0.0 if self.lost else self._stall_s)
                data = data[: select.PIPE_BUF]  # a pipe that is ready takes PIPE_BUF bytes without blocking
            while (written := super().write(data)) is None:  # another process made it non-blocking
                self._wait(self._stall_s)
        except OSError as error:
            self.lost = self.lost or error
            return len(data)
        return written

    def _wait(self, seconds: float | None) -> None:
        """Wait until the stream takes data."""
        ready = select.poll()
        ready.register(self.fileno(), select.POLLOUT)
        if not ready.poll(None if seconds is None else seconds * 1000):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


def _stream(text: TextIO | None) -> _Stream | None:
    raw = getattr(getattr(text, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Stream) else None


def _replace(old: TextIO | None, stream: _Stream) -> TextIO:
    """Make the text stream. Characters that its encoding lacks are escaped, because a report may hold any."""
    if old is not None:
        old.flush()
    encoding = "utf-8" if old is None else old.encoding
    line_buffering = stream.fileno() == 2 or stream.isatty()
    return io.TextIOWrapper(io.BufferedWriter(stream), encoding, "backslashreplace", line_buffering=line_buffering)


def _open_if_closed(fd: int) -> None:
    """Open /dev/null as `fd` if the shell closed it (`>&-`)."""
    try:
        os.fstat(fd)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != fd:
            os.dup2(null, fd)
            os.close(null)
        os.set_inheritable(fd, True)
