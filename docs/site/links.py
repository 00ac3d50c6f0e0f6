"""A hook of mkdocs: files outside docs/ that pages link to become a part of the site, below `source/`.

So the site is whole without the repository. Pages outside docs/ are shown as pages, all other files as text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "kernels/README.md")
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
_CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


def outside(target: str, page: str) -> str | None:
    """The path, from the repository's root, of a file outside docs/ that a page of `docs/` or a root page links to."""
    if "://" in target:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return path if not path.startswith("docs/") and (ROOT / path).exists() else None


def place(path: str) -> str:
    """Where a file of the repository is in the site's sources."""
    if path == "README.md":
        return "README.md"  # the first page of the site says the same
    return f"source/{path}" if path in PAGES else f"source/{path}.txt"


def _targets(page: str) -> set[str]:
    text = _CODE.sub("", (ROOT / page).read_text())
    found = {outside(match[2], page) for match in _LINK.finditer(text)}
    return {path for path in found if path and (ROOT / path).is_file()}


def on_files(files: Files, config: Any) -> Files:
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for path in sorted({*PAGES, *(path for page in [*pages, *PAGES] for path in _targets(page))} - {"README.md"}):
        files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    origin = uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"

    def link(match: re.Match[str]) -> str:
        target, anchor = match[2], match[3] or ""
        if "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if path.startswith("docs/"):
            there = path.removeprefix("docs/")
        elif (ROOT / path).is_file():
            there = place(path)
        else:
            return match[0]
        return f"{match[1]}{posixpath.relpath(there, posixpath.dirname(uri) or '.')}{anchor}{match[4]}"

    # The tests read a second word after `python`, which fences of this site do not know.
    parts = _CODE.split(re.sub(r"^```python \w+$", "```python", markdown, flags=re.MULTILINE))
    # `heads[source][k]` is an index, and no link.
    parts[::2] = [_LINK.sub(link, part).replace("][", "]\\[") for part in parts[::2]]
    return "".join(parts)
