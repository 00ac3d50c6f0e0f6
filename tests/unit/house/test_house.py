"""Rules of this code base that no linter checks."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import raymoe

PACKAGE = Path(raymoe.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
LIBRARY = {
    "errors": 0,
    "home": 0,
    "packaged": 0,
    "fp8": 0,
    "cuda": 1,
    "rows": 2,
    "memory": 2,
    "net": 3,
    "transport": 4,
    "exchange": 4,
    "moe": 5,
    "integrations": 6,
}
"""The parts that a user's program imports."""
HARNESS = {
    "shell": 7,
    "config": 7,
    "workload": 8,
    "gang": 9,
    "doctor": 9,
    "report": 9,
    "run": 10,
    "submit": 10,
    "program": 10,
    "cli": 11,
    "__main__": 12,
}
"""The parts that `raymoe run` needs. They are higher than the library, so the library cannot import them."""
HEIGHT = LIBRARY | HARNESS
EVERYWHERE = {"__version__", "__file__"}  # names of the package itself


def relative_name(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[int, str]]:
    """Return the line and full dotted name of every import in a file, also inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative_name(path)}:{node.lineno}: imports are absolute"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def test_every_part_of_the_package_has_a_height():
    assert len(SOURCES) > 10
    assert {part_of(path) for path in SOURCES} <= {*HEIGHT, "__init__"}, "a new folder needs its place in HEIGHT"


def test_imports_point_down_only():
    wrong = []
    for path in SOURCES:
        part = part_of(path)
        for line, name in imports(path):
            words = name.split(".")
            if words[0] != "raymoe" or len(words) == 1 or words[1] in EVERYWHERE:
                continue
            where = f"{relative_name(path)}:{line} imports {name}"
            if words[1] not in HEIGHT:
                wrong.append(f"{where}: from the package, not from its module")
            elif words[1] != part and HEIGHT.get(part, 0) <= HEIGHT[words[1]]:
                wrong.append(f"{where}: {words[1]} is not below {part}")
    assert wrong == []


def test_no_modules_import_one_another():
    """Imports in functions, and those under TYPE_CHECKING, count too: a reader follows them all the same."""
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in SOURCES}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    below = {
        name: {full if full in paths else full.rpartition(".")[0] for _, full in imports(path)} & set(paths)
        for name, path in paths.items()
    }
    # Take away the modules that import none of the others, again and again. Circles and what is above them stay.
    while free := {name for name, targets in below.items() if not targets - {name}}:
        below = {name: targets - free for name, targets in below.items() if name not in free}
    while top := set(below) - {target for name, targets in below.items() for target in targets - {name}}:
        below = {name: targets for name, targets in below.items() if name not in top}
    assert below == {}, "open this circle"


def test_only_gang_and_ray_actors_import_ray():
    users = {path for path in SOURCES for _, name in imports(path) if name.split(".")[0] == "ray"}
    others = {relative_name(path) for path in users if part_of(path) != "gang"}
    assert others == {"raymoe/integrations/ray_actors.py", "raymoe/integrations/ray_tensors.py"}


def test_files_have_at_most_600_lines_and_functions_6_parameters():
    long = {relative_name(path): count for path in SOURCES if (count := len(path.read_text().splitlines())) > 600}
    assert long == {}
    wide = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_command(node):
                arguments = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len([each for each in arguments if each not in ("self", "cls")]) > 6:
                    wide.append(f"{relative_name(path)}:{node.lineno} {node.name}")
    assert wide == [], "use a dataclass before the seventh parameter"


def _is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A command's parameters are its options, which Typer reads one by one."""
    return any(ast.unparse(each).startswith("app.command") for each in node.decorator_list)


def test_no_error_is_swallowed():
    wrong = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            fault = _swallows(node)
            if fault:
                wrong.append(f"{relative_name(path)}:{getattr(node, 'lineno', 0)}: {fault}")
    assert wrong == []


def _swallows(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
        return "suppresses everything" if any(map(_is_broad, node.args)) else None
    if not isinstance(node, ast.ExceptHandler):
        return None
    if node.type is None:
        return "a bare except"
    if all(isinstance(each, ast.Pass) or _is_constant(each) for each in node.body):
        return "an except that does nothing; use contextlib.suppress and give the reason"
    inside = [each for child in node.body for each in ast.walk(child)]
    reported = any(
        isinstance(each, ast.Raise) or (isinstance(each, ast.Name) and each.id == node.name) for each in inside
    )
    return "catches every error and reports none" if _is_broad(node.type) and not reported else None


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_broad(node: ast.expr) -> bool:
    kinds = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(isinstance(each, ast.Name) and each.id in ("Exception", "BaseException") for each in kinds)


def test_every_folder_is_a_package_with_a_plain_name():
    for folder in {path.parent for path in SOURCES}:
        assert (folder / "__init__.py").exists(), f"{relative_name(folder)} has no __init__.py"
    for path in SOURCES:
        assert not {"utils", "util", "helper", "helpers", "manager", "misc", "common"} & {path.stem, path.parent.name}


HEAVY = "[name for name in ('torch', 'ray', 'cuda', 'numpy') if name in sys.modules]"
LIGHT = {
    "import raymoe": "import raymoe",
    "dir(raymoe)": "import raymoe; dir(raymoe)",
    "raymoe.errors": "import raymoe; raymoe.errors.PeerTimeout",
    "raymoe validate": "from raymoe.cli import main\n"
    "try:\n    code = main(['validate', 'quickstart'])\n"
    "except SystemExit as end:\n    code = end.code\n"
    "assert not code, code",
    "the doctor": "import raymoe.doctor.examine, raymoe.doctor.probes",
    "the report": "import raymoe.report.directory, raymoe.report.environment, raymoe.report.tables\n"
    "raymoe.report.environment.environment()",
}


@pytest.mark.parametrize("code", LIGHT.values(), ids=LIGHT)
def test_loads_neither_torch_nor_ray_nor_cuda(code, tmp_path):
    program = f"import sys\n{code}\nloaded = {HEAVY}\nassert not loaded, loaded"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_lazy_name_can_be_read():
    for name in raymoe.__all__:
        assert getattr(raymoe, name) is not None
    assert dir(raymoe) == sorted(raymoe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Exchang'"):
        _ = raymoe.Exchang
