"""Opens a page in a headless Chromium, and asks it what it shows."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 90.0
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--no-default-browser-check", "--disable-extensions", "--enable-logging=stderr", "--v=0"),
)
DARK = "--blink-settings=preferredColorScheme=0"


def chromium() -> str:
    """The program; without it the test is skipped, or fails in CI."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found:
        return found
    missing = "Chromium is missing (Debian: apt-get install --no-install-recommends chromium)"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{missing}; CI=true needs it")
    pytest.skip(missing)


@dataclass(frozen=True)
class Opened:
    dom: str
    console: list[str]
    """Errors and messages of the page, such as a refused request."""


def open_page(page: Path, folder: Path, width: int, *, dark: bool = False, height: int = 900) -> Opened:
    """Open a page in a new profile and wait until it is loaded. Nothing of the browser is left."""
    profile = folder / f"profile-{width}-{dark}"
    screenshot = folder / f"shot-{width}-{'dark' if dark else 'light'}.png"
    command = [chromium(), *QUIET, *([DARK] if dark else []), f"--user-data-dir={profile}"]
    command += [f"--window-size={width},{height}", f"--screenshot={screenshot}", "--dump-dom", page.as_uri()]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"}
    environment |= {key: value for key, value in os.environ.items() if key.startswith("RAYMOE_TEST")}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    ) as browser:
        try:
            dom, log = browser.communicate(timeout=DEADLINE_S)
        finally:
            if browser.poll() is None:
                os.killpg(browser.pid, signal.SIGKILL)
    assert browser.returncode == 0, log[-2000:]
    shutil.rmtree(profile, ignore_errors=True)
    return Opened(dom, [line for line in log.splitlines() if ":CONSOLE" in line])


# A script that measures a copy of the page. The page itself has no script, and forbids scripts.
MEASURE = """
const root = document.documentElement;
const luminance = ([r, g, b]) => [r, g, b].map(c => c / 255)
  .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const numbers = text => text.match(/[\\d.]+/g).map(Number);
const background = e => {
  for (; e; e = e.parentElement) {
    const c = numbers(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c.slice(0, 3);
  }
  return [255, 255, 255];
};
const faint = [], outside = [], small = [];
for (const e of document.body.querySelectorAll('*')) {
  const box = e.getBoundingClientRect();
  if (!box.width || !box.height) continue;
  if (box.right > innerWidth + 1 && !e.closest('.table')) outside.push(e.tagName + '.' + e.getAttribute('class'));
  const said = [...e.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join('');
  if (!said || e.tagName.toLowerCase() === 'title' || e.closest('.heat')) continue;
  const style = getComputedStyle(e);
  const ink = numbers(e instanceof SVGElement ? style.fill : style.color).slice(0, 3);
  const [a, b] = [ink, background(e)].map(luminance);
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < 4.5) faint.push(contrast.toFixed(1) + ' ' + said.slice(0, 40));
  const size = parseFloat(style.fontSize) * (e.ownerSVGElement ? e.getScreenCTM().a : 1);
  if (size < 9.5) small.push(size.toFixed(1) + ' ' + said.slice(0, 40));
}
parent.document.documentElement.dataset.found = JSON.stringify({
  inner: innerWidth, scroll: root.scrollWidth, faint, outside, small,
  dark: luminance(background(document.body)) < 0.1,
  headings: [...document.querySelectorAll('h2')].map(e => e.textContent),
  figures: document.querySelectorAll('figure svg').length,
  sheets: document.styleSheets.length,
});
"""


def measure(page: Path, folder: Path, width: int, *, dark: bool = False) -> dict[str, Any]:
    """Open a copy of the page that a script measures. Folded tables are open in it.

    The copy is in a frame of this width, because a window of Chromium is at least 500 pixels wide.
    """
    text = page.read_text()
    assert text.count("default-src 'none';") == 1
    text = text.replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';")
    text = text.replace("<details>", "<details open>").replace("</body>", f"<script>{MEASURE}</script></body>")
    outer = folder / f"frame-{width}-{dark}.html"
    outer.write_text(
        '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><body style="margin: 0">'
        f'<iframe style="border: 0; width: {width}px; height: 3000px" srcdoc="{html.escape(text)}"></iframe>'
    )
    opened = open_page(outer, folder, max(width, 800), dark=dark)
    found = re.search(r'<html[^>]* data-found="([^"]*)"', opened.dom)
    assert found, opened.console or opened.dom[:500]
    result: dict[str, Any] = json.loads(html.unescape(found[1]))
    return result
