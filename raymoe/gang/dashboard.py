"""The Grafana dashboard of raymoe, made from the table of metrics: `raymoe dashboard` writes it. Imports no Ray.

Grafana needs no plug-in for it. The variables at its top choose the data source, the Ray session and the runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raymoe.errors import ConfigError
from raymoe.gang import metrics
from raymoe.gang.address import ADDRESS_FILE
from raymoe.gang.metrics import OPS, Metric, OpMetrics

FILE = "raymoe_grafana_dashboard.json"
FOLDER_VARIABLE = "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"  # Ray's head reads it too, at its start
SELECTED = 'SessionName=~"$SessionName",run=~"$run"'
WINDOW = "$__rate_interval"  # Grafana fills in four scrape intervals or more

# Queries.


def now(metric: Metric) -> str:
    """Return the query for the series of a metric as they are."""
    return f"{metric.exported}{{{SELECTED}}}"


def rate(metric: Metric, suffix: str = "") -> str:
    """Return the query for the gain of a counter, or of a part of a histogram, each second."""
    return f"rate({metric.exported}{suffix}{{{SELECTED}}}[{WINDOW}])"


def by(labels: str, query: str) -> str:
    return f"sum by ({labels}) ({query})"


def ratio(over: Metric, under: Metric, labels: str) -> str:
    """Return the query for the gain of one counter divided by the gain of another, while there is any."""
    return f"{by(labels, rate(over))} / ({by(labels, rate(under))} > 0)"


def or_zero(query: str) -> str:
    """Return a query that answers 0 where nothing was ever counted: a counter has no series before its first event."""
    return f"({query}) or vector(0)"


# Panels.


@dataclass(frozen=True)
class Query:
    """A query of a panel, and how its series are named."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A panel. `unit` is Grafana's name of a unit; `kind` its type of panel."""

    title: str
    meaning: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 12


def unit_of(metric: Metric) -> str:
    """Return Grafana's name of the unit of a metric; counts have none."""
    return {"seconds": "s", "bytes": "bytes"}.get(metric.unit, "none")


def _op_panels(op: str, labels: str, legend: str) -> tuple[Panel, Panel]:
    """Return the panels of a timed operation: seconds of a run, and bytes a second while it runs."""
    of: OpMetrics = OPS[op]
    return (
        Panel(
            f"Seconds of a {op}",
            f"{of.seconds.name} divided by {of.runs.name}. A rank above the others is the slow one.",
            unit_of(of.seconds),
            (Query(ratio(of.seconds, of.runs, labels), legend),),
        ),
        Panel(
            f"Bandwidth of a {op}",
            f"{of.nbytes.name} divided by {of.seconds.name}. {of.nbytes.meaning}",
            "Bps",
            (Query(ratio(of.nbytes, of.seconds, labels), legend),),
        ),
    )


def _count(metric: Metric, title: str) -> Panel:
    """Return the panel of a counter of rare events: its value, because `rate` misses an event that makes the series."""
    return Panel(
        title, metric.meaning, unit_of(metric), (Query(or_zero(f"sum({now(metric)})"), title),), "stat", width=6
    )


_EXCHANGE = ("run, rank, backend, l2, beside", "rank {{rank}} {{backend}} {{l2}} {{beside}}")
PANELS: tuple[Panel, ...] = (
    Panel(
        "Cases done",
        "Cases of a run that are done, and all cases of it.",
        unit_of(metrics.CASES),
        (
            Query(by("run", now(metrics.CASES_DONE)), "{{run}}: done"),
            Query(by("run", now(metrics.CASES)), "{{run}}: of"),
        ),
        "stat",
    ),
    Panel(
        "State of each rank",
        "placing, starting, wiring, running, done, failed (it reported an error), or lost (its process died or does "
        "not answer).",
        unit_of(metrics.RANK_STATE),
        (Query(f"{by('run, rank, state', now(metrics.RANK_STATE))} == 1", "rank {{rank}} {{state}}"),),
    ),
    Panel(
        "Steps a second",
        f"{metrics.STEPS.meaning} All ranks do the same steps. A line at 0: the rank stopped, or sets up a case.",
        "ops",
        (Query(by("run, rank", rate(metrics.STEPS)), "rank {{rank}}"),),
    ),
    Panel(
        "Seconds of a step, mean",
        f"{metrics.STEPS_SECONDS.name} divided by {metrics.STEPS.name}. A verified step takes longer.",
        unit_of(metrics.STEPS_SECONDS),
        (
            Query(
                ratio(metrics.STEPS_SECONDS, metrics.STEPS, "run, rank, verified"),
                "rank {{rank}}, verified: {{verified}}",
            ),
        ),
    ),
    Panel(
        "Seconds of a step, over blocks",
        f"{metrics.STEP_SECONDS.meaning} Percentiles are coarse: they come from buckets.",
        unit_of(metrics.STEP_SECONDS),
        tuple(
            Query(f"histogram_quantile({share}, {by('run, le', rate(metrics.STEP_SECONDS, '_bucket'))})", f"p{percent}")
            for share, percent in ((0.5, 50), (0.99, 99))
        ),
    ),
    Panel(
        "Share of time in steps",
        "Seconds of steps in each second. The rest is set-up, and the meeting of all ranks after each block.",
        "percentunit",
        (Query(by("run, rank", rate(metrics.STEPS_SECONDS)), "rank {{rank}}"),),
    ),
    *_op_panels("dispatch", *_EXCHANGE),
    *_op_panels("combine", *_EXCHANGE),
    *_op_panels("copy", "run, rank, transport", "rank {{rank}} {{transport}}"),
    Panel(
        "Tokens a second",
        f"{metrics.TOKENS.meaning} A step counts its tokens once, however often it times an operation.",
        "ops",
        (Query(by("run, rank", rate(metrics.TOKENS)), "rank {{rank}}"),),
    ),
    Panel(
        "Expert load imbalance",
        f"{metrics.IMBALANCE.meaning} At 1 all are even. The rank with the largest value has the busiest expert.",
        unit_of(metrics.IMBALANCE),
        (Query(f"max by (run, rank) ({now(metrics.IMBALANCE)})", "rank {{rank}}"),),
    ),
    Panel(
        "Rank load",
        f"{metrics.RANK_LOAD.meaning} At 1 all are even. The rank with the largest value multiplies the most rows.",
        unit_of(metrics.RANK_LOAD),
        (Query(f"max by (run, rank) ({now(metrics.RANK_LOAD)})", "rank {{rank}}"),),
    ),
    _count(metrics.RESTARTS, "Restarts"),
    _count(metrics.PEER_TIMEOUTS, "Peer timeouts"),
    _count(metrics.REFUSED_STEPS, "Refused steps"),
    _count(metrics.VERIFY_FAILURES, "Verify failures"),
)


# The document.


def dashboard() -> dict[str, object]:
    """Return the dashboard as Grafana's JSON model."""
    return {
        "uid": "raymoeDashboard",
        "title": "raymoe",
        "description": "Runs of raymoe on this Ray cluster. docs/monitoring.md says what each panel tells.",
        "tags": ["raymoe", "ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one cross-hair for all panels
        "refresh": "10s",
        "timezone": "browser",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": _placed(PANELS),
    }


def _placed(panels: Sequence[Panel]) -> list[dict[str, object]]:
    """Place panels in rows of 24 columns."""
    placed: list[dict[str, object]] = []
    x = y = 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > 24:
            x, y = 0, y + 8
        placed.append(_panel_json(panel, number) | {"gridPos": {"h": 8, "w": panel.width, "x": x, "y": y}})
        x += panel.width
    return placed


def _panel_json(panel: Panel, number: int) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    options: dict[str, object] = {"legend": {"displayMode": "list", "placement": "bottom"}}
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "none"}
    return {
        "id": number,
        "title": panel.title,
        "description": panel.meaning,
        "type": panel.kind,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": options,
        "targets": [
            {"refId": letter, "datasource": source, "expr": query.expression, "legendFormat": query.legend}
            for letter, query in zip("ABCDEFGH", panel.queries, strict=False)
        ],
    }


def _variables() -> list[dict[str, object]]:
    """Return the variables: the data source, and the sessions and runs of the range of time."""
    runs = metrics.CASES.exported
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "refresh": 1},
        _choice("SessionName", f"label_values({runs}, SessionName)"),
        _choice("run", f'label_values({runs}{{SessionName=~"$SessionName"}}, run)'),
    ]


def _choice(name: str, query: str) -> dict[str, object]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # when the range of time changes
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "sort": 2,
    }


def default_folder() -> Path:
    """Return the folder from which Grafana reads Ray's dashboards: the variable's, else that of this machine's head."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named)
    folder = ADDRESS_FILE.parent / "session_latest" / "metrics" / "grafana" / "dashboards"
    if not folder.is_dir():
        raise ConfigError(
            f"asked for the dashboards' folder of this machine's Ray head, and there is no {folder}; "
            f"start a head with its dashboard (`ray start --head`), set {FOLDER_VARIABLE}, or name a folder with --out"
        )
    return folder
