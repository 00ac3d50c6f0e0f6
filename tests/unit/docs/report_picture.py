"""Makes the pictures of a report page in docs/report.md, out of raw lines: `make pictures` (needs Chromium).

The page has the lines of a run of benchmarks/, its config as the packaged config gives it, and a summary that says
which cases these lines have. Nothing else is kept of that run, so the page has no environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.python_path import REPOSITORY
from tests.unit.docs.raw_lines import BENCHMARKS
from tests.unit.report.chromium import open_page

FILE, RUN, CONFIG, SETTINGS = "bench_exchange_h200x2", "csun", "bench_exchange", ("--set", "world.ranks=2")
PICTURES = {"report-desktop": (1180, 1060, False), "report-phone-dark": (430, 1060, True)}
"""By the file: width, height, whether dark."""


def run_directory(folder: Path) -> Path:
    """Write the run directory of these lines, and its page."""
    lines = [line for line in (BENCHMARKS / f"{FILE}.jsonl").read_text().splitlines() if f'{RUN}"' in line]
    run = json.loads(lines[0])["run"]
    cases = dict.fromkeys((json.loads(line)["case"] for line in lines), "done")
    summary = {"status": "done", "exit_code": 0, "message": f"{len(cases)} cases are done", "cases": cases}
    (folder / "summary.json").write_text(json.dumps({**summary, "generations": []}))
    command = [sys.executable, "-m", "raymoe"]
    config = subprocess.run([*command, "show", CONFIG, *SETTINGS], capture_output=True, text=True, check=True).stdout
    (folder / "config.yaml").write_text(f"# raymoe run {run}\n{config}")
    (folder / "results.jsonl").write_text("\n".join(lines) + "\n")
    subprocess.run([*command, "report", str(folder), "--html", str(folder / "report.html")], check=True)
    return folder / "report.html"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = run_directory(folder)
        for stem, (width, height, dark) in PICTURES.items():
            open_page(page, folder, width, dark=dark, height=height)
            shot = folder / f"shot-{width}-{'dark' if dark else 'light'}.png"
            (REPOSITORY / "docs" / "figures" / f"{stem}.png").write_bytes(shot.read_bytes())
