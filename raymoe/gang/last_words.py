"""What a process that died left where its standard error went."""

from __future__ import annotations

import os
import re
from pathlib import Path

READ_BYTES = 1 << 20
LONGEST = 200
SAYS = (
    r"what\(\): +(?P<why>.+)",  # a C++ exception that nobody caught
    r"Fatal Python error: (?P<why>.+)",
    r"\*\*\* (?P<why>SIG\w+) received",
)
"""Lines that say why a process ends, those that say more first."""


def standard_error() -> str | None:
    """The file that this process's goes to; None where it is a terminal or a pipe."""
    path = Path("/proc/self/fd/2").readlink()
    return str(path) if path.is_file() else None


def cause_in(text: str) -> str | None:
    """Why the process that printed this ended, if it said so.

    >>> cause_in("*** SIGABRT received at time=17 ***\\nFatal Python error: Aborted\\n")
    'Aborted'
    >>> cause_in("loading shards\\n") is None
    True
    """
    for pattern in SAYS:
        found = re.search(pattern, text)
        if found:
            why = found["why"].strip()
            return why if len(why) <= LONGEST else f"{why[: LONGEST - 3]}..."
    return None


def last_words(path: str) -> str | None:
    """The cause in the end of a file; None where there is none, or no such file here."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            return cause_in(file.read().decode(errors="replace"))
    except FileNotFoundError:
        return None
