"""The public names are the same at run time and for a type checker, and their types catch mistakes."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import raymoe

PACKAGE = Path(raymoe.__file__).parent
PROGRAM = Path(__file__).with_name("typed_program.py")
MISUSES = {
    'world = raymoe.World.open("0", 2)': "arg-type",
    "spec = raymoe.ExchangeSpec(tokens=8, hidden=64, expert=4, topk=2)": "call-arg",
    "spec = raymoe.ExchangeSpec(tokens=8, hidden=64, experts=4, topk=2, dtype=8)": "arg-type",
    "raymoe.Channel(world, 1)": "call-arg",
    'raymoe.Channel(world, peer="left", nbytes=8)': "arg-type",
    "y: int = raymoe.Exchange(world, spec).combine(x, got)": "assignment",
    "got.rows": "attr-defined",
    "raymoe.Workspace(spec, world)": "arg-type",
    "raymoe.join('experts', 0, 2, timeout_s='soon')": "arg-type",
    "raymoe.errors.Timeout": "attr-defined",
    "raymoe.Exchang": "attr-defined",
    "raymoe.pointwise(x, x=x)": "arg-type",
    'values, scales = raymoe.moe.rms_norm(x, x, output="float8")': "call-overload",
    "y = raymoe.moe.rms_norm(x, x, scale='row')": "call-overload",
}
"""Lines that mypy must refuse, each with mypy's name of the error."""

PREAMBLE = """
import torch
import raymoe
import raymoe.moe

def program(world: raymoe.World, spec: raymoe.ExchangeSpec, got: raymoe.Dispatched, x: torch.Tensor) -> None:
"""


def test_the_stub_and_the_package_have_the_same_names() -> None:
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    imported = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name, "only `import X as X` exports a name from a stub"
                imported[alias.name] = str(node.module)
    listed = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    assert sorted(listed) == sorted(raymoe.__all__) == sorted({*imported, "__version__"})
    for name, module in imported.items():
        if name == "errors":
            assert raymoe.errors is importlib.import_module("raymoe.errors")
        else:
            assert getattr(raymoe, name) is getattr(importlib.import_module(module), name)


def test_every_error_class_is_public() -> None:
    for name, kind in inspect.getmembers(raymoe.errors, inspect.isclass):
        if issubclass(kind, raymoe.errors.RaymoeError):
            assert name in raymoe.errors.__all__, name
    assert sorted(raymoe.errors.__all__) == raymoe.errors.__all__


def test_public_errors_survive_pickling() -> None:
    for error in (
        raymoe.errors.ConfigError("no"),
        raymoe.errors.CaptureError("no", 900),
        raymoe.errors.RankDied(1, "no"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_public_names_have_docstrings_and_examples() -> None:
    for name in raymoe.__all__:
        public = getattr(raymoe, name)
        if name != "__version__":
            assert public.__doc__, name
    finder = doctest.DocTestFinder()
    for name in (
        "Channel",
        "Dispatched",
        "Exchange",
        "ExchangeSpec",
        "MoELayer",
        "World",
        "pointwise",
    ):  # a Workspace needs a GPU, `join` Ray
        public = getattr(raymoe, name)
        tests = finder.find(public) + finder.find(sys.modules[public.__module__], globs={})
        assert any(test.examples for test in tests), f"raymoe.{name} has no example"


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Mypy's output for a correct program and for one with all the misuses, both checked as a user's program."""
    folder = tmp_path_factory.mktemp("typed")
    for program in (PROGRAM, PACKAGE.parent / "examples" / "channel.py"):
        (folder / program.name).write_text(program.read_text())
    (folder / "wrong.py").write_text(PREAMBLE + "".join(f"    {line}\n" for line in MISUSES))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]
    command += ["--follow-imports=silent", "--cache-dir", str(PACKAGE.parent / ".mypy_cache" / "typed"), "."]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.mark.thorough
@pytest.mark.timeout(420)
def test_a_program_that_uses_every_public_name_passes_mypy(checked: str) -> None:
    assert [line for line in checked.splitlines() if not line.startswith("wrong.py")] == []
    used = set(re.findall(r"raymoe\.(\w+)", PROGRAM.read_text()))
    assert {*raymoe.__all__} - used == set(), "typed_program.py does not use these public names"


@pytest.mark.thorough
@pytest.mark.timeout(420)
def test_mypy_reports_every_misuse(checked: str) -> None:
    first = PREAMBLE.count("\n") + 1
    found = dict(re.findall(r"wrong\.py:(\d+): error: .*\[([\w-]+)\]$", checked, re.MULTILINE))
    assert {int(line): kind for line, kind in found.items()} == {
        first + place: kind for place, kind in enumerate(MISUSES.values())
    }, checked
