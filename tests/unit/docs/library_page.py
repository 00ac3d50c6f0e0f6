"""The code blocks of docs/library.md and of other pages, as programs."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from tests.python_path import REPOSITORY

PAGE = REPOSITORY / "docs" / "library.md"


def blocks(page: Path = PAGE) -> list[tuple[str, str]]:
    """Return each Python block's requirement ("", `gpu` or `ray`) and its text with the page's line numbers."""
    text = page.read_text()
    found = []
    for block in re.finditer(r"^```python ?(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        found.append((block[1], "\n" * text.count("\n", 0, block.start(2)) + block[2]))
    return found


def run(needs: set[str], page: Path = PAGE) -> tuple[list[str], str]:
    """Run the blocks whose requirement is met, in order; return the names they defined and their output."""
    names: dict[str, object] = {"__name__": "library_page"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for need, text in blocks(page):
            if not need or need in needs:
                exec(compile(text, str(page), "exec"), names)
    return sorted(names), printed.getvalue()
