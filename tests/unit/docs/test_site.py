"""The site of docs/: `mkdocs build --strict` passes, pages load nothing from a network, every public name is there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import raymoe
import raymoe.moe
from tests.python_path import REPOSITORY

API = (REPOSITORY / "docs" / "api.md").read_text()
BUILDERS = ("mkdocs", "material", "mkdocstrings")
LOADS = re.compile(r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=\"((?:https?:)?//[^\"]+)\"")


def test_the_reference_has_every_public_name() -> None:
    named = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", API, re.MULTILINE)}
    sources = (REPOSITORY / "raymoe" / "moe" / "__init__.py").read_text()
    public = {*raymoe.__all__, *re.findall(r"import \w+ as (\w+)", sources)} - {"__version__"}
    assert public - named == set()


def test_every_name_of_the_reference_is_in_the_sources() -> None:
    missing = []
    for name in re.findall(r"^::: (\S+)$", API, re.MULTILINE):
        whole = REPOSITORY / (name.replace(".", "/") + ".py")
        module, _, last = name.rpartition(".")
        file = REPOSITORY / (module.replace(".", "/") + ".py")
        if not whole.is_file() and not re.search(
            rf"^(?:(?:class|def) {last}\b|from .* import {last} as)", file.read_text(), re.MULTILINE
        ):
            missing.append(name)
    assert missing == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    absent = [name for name in BUILDERS if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"{absent[0]} is not installed; `make setup` installs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            "http_proxy": "http://127.0.0.1:9",
            "https_proxy": "http://127.0.0.1:9",
        },
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.thorough
def test_the_site_loads_nothing_from_a_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    loaded = {page.name: LOADS.findall(page.read_text()) for page in pages}
    assert {name: links for name, links in loaded.items() if links} == {}
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"url\(\W?https?:", styles) == [] and "@import" not in styles


@pytest.mark.thorough
def test_the_reference_of_the_site_has_signatures(site: Path) -> None:
    text = (site / "api.html").read_text()
    assert 'id="raymoe.exchange.exchange.Exchange.dispatch"' in text and ":::" not in text
