"""Where a trace is: named relative to the config that names it, kept as an absolute path from then on."""

import os

from raymoe.job.entry import Entry


def absolute(entry: Entry, file: str) -> str:
    """The path of a trace that an entry names.

    >>> from pathlib import Path
    >>> from raymoe.job.entry import Source
    >>> absolute(Entry("ids.npy", Source("x.yaml", Path("/jobs"), 0)), "ids.npy")
    '/jobs/ids.npy'
    """
    return os.path.normpath(entry.source.folder / file)
