"""configs/ and kernels/ are packaged; configs are found by name from a wheel, this installation and a bare tree."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import raymoe
from tests.python_path import REPOSITORY
from tests.unit.house.packages import built_wheel

ROOT = REPOSITORY
TYPING = ("raymoe/py.typed", "raymoe/__init__.pyi")  # a type checker reads annotations only if py.typed exists
OF_AN_EXAMPLE = Path("jobs/train.yaml")  # which a wheel has not
BESIDE = ("configs", "jobs", "kernels")  # beside raymoe/ in the sources, inside it in a wheel


def sources(folder: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel, built without network: hatchling is among the `dev` extras."""
    return built_wheel(tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"raymoe", f"raymoe-{raymoe.__version__}.dist-info"}
    for folder in BESIDE:
        for path in sources(folder):
            assert (f"raymoe/{path}" in names) != (path == OF_AN_EXAMPLE)
    for path in (*sources("raymoe"), *map(Path, TYPING)):
        assert str(path) in names or "__pycache__" in path.parts
    assert f"raymoe-{raymoe.__version__}.dist-info/licenses/LICENSE" in names


def test_wheel_declares_the_command_and_its_dependencies(wheel):
    archive = zipfile.ZipFile(wheel)
    info = f"raymoe-{raymoe.__version__}.dist-info"
    assert "raymoe = raymoe.__main__:main" in archive.read(f"{info}/entry_points.txt").decode()
    metadata = archive.read(f"{info}/METADATA").decode()
    needs = [line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    needs = [need for need in needs if "extra ==" not in need]
    assert {need.partition(">")[0].split("<")[0] for need in needs} == {
        *("ray[default]", "torch", "cuda-python", "pyyaml", "pydantic", "typer", "rich", "numpy"),
        "cuda-core",
    }
    assert "Requires-Python: >=3.11" in metadata


def test_the_long_description_has_no_link_that_a_package_index_breaks():
    """Neither links nor pictures, since no address of the repository is known to the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / project["readme"]).read_text()
    assert re.findall(r"\]\((?!https://)", text) == [] and "<img" not in text
    extras = set(re.findall(r"`(\w+)`", text.partition("| extra |")[2].partition("\n\n")[0]))
    assert extras <= set(project["optional-dependencies"]) and {"transformers", "examples", "bench"} <= extras


def validate(path: Path | None, folder: Path) -> None:
    """Run `raymoe validate quickstart` in `folder`, with the package from `path` (None: this installation).

    Then print the line of the packaged job of the same name.
    """
    program = (
        "import sys, raymoe.cli; print(raymoe.__file__); code = raymoe.cli.main(['validate', 'quickstart'])\n"
        "sys.exit(code or raymoe.cli.main(['submit', 'quickstart', '--dry-run', '--address', 'http://h:1']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(path or ROOT)), "the loaded raymoe is not the one under test"


def test_configs_are_found_from_a_wheel(wheel, tmp_path):
    site = tmp_path / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)
    validate(site, tmp_path)


def test_configs_are_found_from_a_bare_source_tree(tmp_path):
    tree = tmp_path / "tree"
    for folder in ("raymoe", "configs", "jobs"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)  # it marks a source tree
    validate(tree, tmp_path)


def test_configs_are_found_from_this_installation(tmp_path):
    validate(None, tmp_path)


def test_every_tested_version_is_pinned_and_within_the_declared_range():
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in (
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["docs"],
        *project["optional-dependencies"]["examples"],
        *project["optional-dependencies"]["storage"],
    ):
        need = Requirement(text)
        version = pins.get(need.name.lower())
        assert version is not None, f"constraints.txt does not pin {need.name}"
        assert need.specifier.contains(version), f"{need.name}=={version} is outside {need.specifier}"
