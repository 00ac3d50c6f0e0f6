"""A plugin of vLLM for tests. It runs in the processes of vLLM's workers, where it writes down raymoe's dispatches.

`RAYMOE_TEST_DISPATCHES` names a folder: the file `rank` gets a line for each dispatch, with the number of tokens.
With `RAYMOE_TEST_KILL` the worker of that rank ends itself in its first dispatch of one token: a decode step.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def register() -> None:
    """Put the writing before the dispatch."""
    folder, rank = os.environ.get("RAYMOE_TEST_DISPATCHES"), os.environ.get("VLLM_DP_RANK")
    if folder is None or rank is None:
        return
    from raymoe.integrations.vllm_rows import ExpertRowsOfLayer

    real = ExpertRowsOfLayer.send

    def send(self: Any, x: Any, *rest: Any) -> Any:
        with Path(folder, rank).open("a") as file:
            file.write(f"{len(x)}\n")
        if os.environ.get("RAYMOE_TEST_KILL") == rank and len(x) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, x, *rest)

    ExpertRowsOfLayer.send = send  # type: ignore[method-assign]
