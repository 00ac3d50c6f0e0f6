"""The page in a real browser: on a phone and a desktop, light and dark, with all it has and without a request."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.unit.report.chromium import measure, open_page
from tests.unit.report.run_directories import make, report

PHONE, DESKTOP = 390, 1280
HEADINGS = ["What changed", "Figures", "All results", "What was run on what", "Cases and generations"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything: two runs, each with every kind of figure, and long names."""
    folder = tmp_path_factory.mktemp("page")
    message = "rank 1 died: " + "a-word-without-a-place-to-break" * 5
    runs = [make(folder / "a"), make(folder / "b", exit_code=4, message=message)]
    assert report(*runs, "--html", folder / "report.html").code == 0
    return folder / "report.html"


@pytest.mark.parametrize(("width", "dark"), [(PHONE, True), (DESKTOP, False)])
def test_the_page_fits_and_can_be_read(page, tmp_path, width, dark):
    found = measure(page, tmp_path, width, dark=dark)
    assert found["inner"] == width
    assert found["scroll"] <= width, "the page scrolls to the side"
    assert found["outside"] == []
    assert found["faint"] == [], "contrast below 4.5"
    assert found["small"] == []
    assert found["dark"] == dark
    assert found["headings"] == HEADINGS
    assert found["figures"] > 20
    assert found["sheets"] == 1


def test_the_page_itself_has_no_error_on_the_console(page, tmp_path):
    opened = open_page(page, tmp_path, DESKTOP)
    assert opened.console == []
    assert opened.dom.count("<h2>") == len(HEADINGS)
    assert (tmp_path / "shot-1280-light.png").stat().st_size > 20_000


def test_a_script_in_the_page_would_be_refused_and_seen(page, tmp_path):
    """The policy of the page works, and the console of the browser is read."""
    bad = tmp_path / "bad.html"
    injected = "<script>document.title = 'taken'</script><img src='https://127.0.0.1:9/x.png'></body>"
    bad.write_text(page.read_text().replace("</body>", injected))
    began = time.monotonic()
    opened = open_page(bad, tmp_path, DESKTOP)
    assert "<title>taken" not in opened.dom
    assert len(opened.console) >= 2 and all("Content Security Policy" in line for line in opened.console)
    assert time.monotonic() - began < 60
