"""The Grafana dashboard: made from the table of metrics, complete, and where Grafana finds it."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from raymoe.cli import main
from raymoe.gang import dashboard
from raymoe.gang.dashboard import FILE, FOLDER_VARIABLE, PANELS
from raymoe.gang.metrics import TABLE, Kind
from tests.python_path import REPOSITORY

MONITORING = REPOSITORY / "docs" / "monitoring.md"


def names_in(text: str) -> set[str]:
    return set(re.findall(r"ray_raymoe_\w+", text))


def exported() -> set[str]:
    """Every name under which Prometheus knows a metric of the table."""
    parts = {Kind.HISTOGRAM: ("_bucket", "_count", "_sum")}
    return {f"{metric.exported}{part}" for metric in TABLE for part in parts.get(metric.kind, ("",))}


def test_queries_use_the_table_and_every_metric_has_a_panel() -> None:
    used = names_in(json.dumps(dashboard.dashboard()))
    assert used <= exported(), "a query names a series that nobody exports"
    assert {metric.name for metric in TABLE if not any(metric.exported in name for name in used)} == set()


def test_queries_group_by_tags_that_their_metric_has() -> None:
    tags = {metric.exported: {"run", "le", *metric.tags} for metric in TABLE}
    for panel in PANELS:
        for query in panel.queries:
            labels = {label for group in re.findall(r"by \(([^)]*)\)", query.expression) for label in group.split(", ")}
            named = {name.removesuffix("_bucket") for name in names_in(query.expression)}
            assert all(labels <= tags[name] for name in named), query
            assert set(re.findall(r"{{(\w+)}}", query.legend)) <= labels, query


def test_panels_are_placed_side_by_side() -> None:
    panels = dashboard.dashboard()["panels"]
    assert isinstance(panels, list) and len({panel["id"] for panel in panels}) == len(panels) == len(PANELS)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert one["x"] + one["w"] <= 24


def test_the_page_on_monitoring_has_every_metric_and_panels_explain_themselves() -> None:
    """docs/monitoring.md: each row of the table with its tags and meaning."""
    page = MONITORING.read_text()
    for metric in TABLE:
        tags = ", ".join(f"`{tag}`" for tag in metric.tags) or "–"
        assert f"| `{metric.exported}` | {tags} | {metric.meaning} |" in page
    assert [panel["title"] for panel in dashboard.dashboard()["panels"] if len(panel.get("description", "")) < 15] == []
    assert names_in(page) - exported() - {metric.exported for metric in TABLE} == set()


def test_the_command_writes_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "boards"
    assert main(["dashboard", "--out", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / FILE}\n"
    assert json.loads((folder / FILE).read_text()) == json.loads(json.dumps(dashboard.dashboard()))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "named"))
    assert main(["dashboard"]) == 0 and (tmp_path / "named" / FILE).exists()


def test_without_a_head_the_command_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(dashboard, "ADDRESS_FILE", tmp_path / "ray_current_cluster")
    assert main(["dashboard"]) == 2
    said = capsys.readouterr().err
    assert "there is no" in said and "--out" in said and FOLDER_VARIABLE in said
    folder = tmp_path / "session_latest" / "metrics" / "grafana" / "dashboards"
    folder.mkdir(parents=True)
    assert main(["dashboard"]) == 0 and (folder / FILE).exists()


def test_a_folder_that_cannot_be_is_no_bug(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["dashboard", "--out", str(tmp_path / "file" / "inside")]) == 8
    assert capsys.readouterr().err.count("\n") == 1
