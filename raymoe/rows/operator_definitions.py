"""Define raymoe's operators of `torch.library`, and keep torch's compile caches apart by raymoe's sources.

torch keeps compiled graphs on disk. Its key has the names of the operators that a function calls, but neither their
schemas nor their fake kernels and gradients. So another version of raymoe would run graphs that call operators with the
arguments of the earlier one, or with sizes that no longer hold. `torch.compiler.config.cache_key_tag` is a part of
every key, and torch has it for this. A program that sets the tag itself does so before it imports raymoe, or appends.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config as compiler_config
from torch._library.custom_ops import CustomOpDef

_FOLDERS = ("exchange", "moe", "rows")
"""The folders whose sources define what a graph computes: operators, their gradients, and sizes of their results."""


def define(schemas: Mapping[str, str]) -> None:
    """Define operators by their names and schemas, without `torch.library.custom_op`.

    That would load torch's compiler at the first call, which takes a second.
    """
    _tag_compile_caches()
    for name, schema in schemas.items():
        torch.library.define(f"raymoe::{name}", schema, tags=torch.Tag.pt2_compliant_tag)


def operator(name: str, function: Callable[..., Any], schema: str | None = None) -> CustomOpDef:
    """Define an operator by a function that changes none of its arguments. `schema` None: its annotations give it."""
    _tag_compile_caches()
    return torch.library.custom_op(f"raymoe::{name}", function, mutates_args=(), schema=schema)


@functools.cache
def _tag_compile_caches() -> None:
    compiler_config.cache_key_tag += f"raymoe-{source_digest(Path(__file__).parents[1])}"


def source_digest(package: Path) -> str:
    """Return a digest of the sources that decide what a compiled graph calls. It takes about 2 ms."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _FOLDERS for path in (package / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
