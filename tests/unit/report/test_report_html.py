"""The page of a run: what it says first, what it shows, and that `raymoe run` writes it."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

import raymoe.report.page
from raymoe import run as run_module
from raymoe.config import load_job
from raymoe.errors import CannotWrite, ConfigError
from raymoe.gang.messages import CaseDone, RunOutcome
from raymoe.report.directory import RunDirectory
from raymoe.report.figure import style_sheet
from raymoe.report.page import page, write_page
from raymoe.report.results import Record
from raymoe.report.svg import FULL, Heat, heat_map
from tests.python_path import REPOSITORY
from tests.unit.report.lines import copy_case, exchange_case, gpu_exchange
from tests.unit.report.run_directories import make, report

CSS = style_sheet("page.css")


class Text(HTMLParser):
    """Collects the text of a page, a line for each piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)


def text_of(document: str) -> str:
    parser = Text()
    parser.feed(re.sub(r"<style>.*?</style>", "", document, flags=re.DOTALL))
    return "\n".join(parser.pieces)


def page_of(*runs: Path) -> str:
    return page([Record.read(run) for run in runs])


@pytest.mark.parametrize(
    ("code", "message", "kind", "words"),
    [
        (0, "done", "good", "✓ Done"),
        (4, "rank 1 died: <killed>", "bad", "✕ Failed"),
        (143, "stopped by SIGTERM; finished cases are kept", "warn", "■ Stopped"),
    ],
)
def test_the_verdict_comes_first(tmp_path, code, message, kind, words):
    document = page_of(make(tmp_path / "run", exchange_case("host", 500.0), code, message))
    assert document.index(f'<header class="verdict {kind}">') < document.index("<h2>")
    text = text_of(document)
    head = text[: text.index("What was run on what")]
    assert words in head and f"exit code\n{code}\n" in head
    assert (message in head) == (message != "done")
    assert "3 of 3 results right, largest error 1.3e-03" in head
    assert "cases finished\n1 of 1\n" in head and "restarts\n1\n" in head and "gang ready after\n3.5 s, 3.2 s\n" in head


def test_wrong_results_and_a_run_that_has_not_ended_are_seen_at_once(tmp_path):
    wrong = make(tmp_path / "wrong", [line | {"verified": False} for line in exchange_case("host", 5.0)], 6, "wrong")
    document = page_of(wrong)
    assert '<header class="verdict bad">' in document and "3 WRONG" in text_of(document)
    going = make(tmp_path / "going", exchange_case("host", 5.0))
    (going / "summary.json").unlink()
    document = page_of(going)
    assert '<header class="verdict ">' in document and "… Not ended" in document


def test_a_run_without_results_has_a_page(tmp_path):
    document = page_of(make(tmp_path / "run", [], 3, "the cluster has 0 GPUs, 4 are needed"))
    text = text_of(document)
    assert "the cluster has 0 GPUs, 4 are needed" in text and "no results" in text
    assert "<figure" not in document and "What was run on what" in text


def test_config_environment_and_ranks_are_there_and_what_is_no_default_is_bold(tmp_path):
    document = page_of(make(tmp_path / "run"))
    text = text_of(document)
    for words in (
        "hidden\n1024",
        "packages.ray\n2.60.0",
        "cpu.model\nSome CPU",
        "memory.total_bytes\n16 GiB",
        "node-1",
    ):
        assert words in text, words
    assert "2 ranks: processes and places" in text and "GPU-1" in text and "node-1" in text
    assert "rank 1 died" in text and "2 generations" in text
    run = make(tmp_path / "other", exchange_case("host", 5.0))
    (run / "config.yaml").write_text("# raymoe run a\nname: a\nworkload: exchange\nshape: {tokens: 7, hidden: 1024}\n")
    document = page_of(run)
    assert '<dt>tokens</dt><dd class="set">7</dd>' in document
    assert "<dt>hidden</dt><dd>1024</dd>" in document


def test_every_figure_stands_beside_its_numbers(tmp_path):
    document = page_of(make(tmp_path / "run"))
    figures = re.findall(r"<figure.*?</figure>", document, re.DOTALL)
    assert len(figures) > 15
    for figure in figures:
        assert "<svg" in figure and "<h3>" in figure and re.search(" ranks? on ", figure)
        table = figure[figure.index("<details>") :]
        assert re.search(r"<td[^>]*>[\d,.]+", table), figure[:200]
    titles = [re.sub(r"<.*?>", "", re.findall(r"<h3>(.*?)</h3>", figure)[0]) for figure in figures]
    for title in (
        "Copies, one pair at a time",
        "256 MiB between all pairs, GB/s",
        "Dispatch over SMs, 16 tokens a rank",
        "Where the time of dispatch goes",
        "Where the time of combine goes",
        "Dispatch beside a matrix product",
        "Load of experts",
    ):
        assert title in titles, (title, titles)
    for start in ("Dispatch over tokens,", "Time of combine,", "Time split of an exchange, 8192 tokens"):
        assert any(title.startswith(start) for title in titles), (start, titles)


def test_curves_have_a_point_for_each_line_and_the_limits_of_the_link(tmp_path):
    tokens = (128, 1024, 4096)
    lines = gpu_exchange("fused", 10.0, tokens) + gpu_exchange("row_push", 8.0, tokens)
    document = page_of(make(tmp_path / "run", lines))
    figures = re.findall(r"<figure.*?</figure>", document, re.DOTALL)
    dispatch, combine = (
        next(figure for figure in figures if f"<h3>{op} over tokens<" in figure) for op in ("Dispatch", "Combine")
    )
    legend, time_of, bandwidth = re.split(r'<svg class="chart"', dispatch)
    assert legend.count('<g class="mark"><circle') == 1 and legend.count('class="grey dash"') == 1
    for chart in (time_of, bandwidth):
        assert chart.count('<g class="mark"><circle') == len(tokens), "a mark for each point"
        assert chart.count('class="grey dash"') == 1, "the baseline is no result of its own"
    assert "fused, 128: 26 µs, slowest rank" in time_of
    assert "450 GB/s, NVLink 4 ×18" in bandwidth and "381 GB/s, most measured" in bandwidth
    table = bandwidth[bandwidth.index("<details>") :]
    assert re.findall(r"<th(?: [^>]*)?>([^<]*)", table) == [
        *("tokens", "fused us", "row_push us", "fused GB/s", "row_push GB/s"),
    ]
    assert ">522<" in table, "the table beside the curve"
    assert combine.count('class="grey dash"') == 3, "the rows of a combine are those of the dispatch"


def test_backends_with_one_number_of_tokens_are_bars_with_their_spread(tmp_path):
    document = page_of(make(tmp_path / "run", exchange_case("host", 500.0) + exchange_case("collective", 1000.0)))
    dispatch = next(
        each for each in re.findall(r"<figure.*?</figure>", document, re.DOTALL) if "Time of dispatch" in each
    )
    # The scale ends at 800 us, the p99 of collective.
    assert '<rect class="c0" x="0.0" y="1" width="25.00"' in dispatch and 'width="50.00"' in dispatch
    assert 'd="M12.5 5H50.0' in dispatch and 'd="M25.0 5H100.0' in dispatch, "from the fastest sample to p99"
    assert "Time split of an exchange, 512 tokens" in document


def test_heat_maps_say_the_number_in_each_cell(tmp_path):
    lines = [line for line in copy_case() if line["bytes"] == 4096]
    figure = next(
        each
        for each in re.findall(r"<figure.*?</figure>", page_of(make(tmp_path / "run", lines)), re.DOTALL)
        if "between all pairs" in each
    )
    assert figure.count('<rect class="cell"') == 2 and figure.count('<rect class="empty"') == 2
    assert "0 to 1: 10 GB/s" in figure and ">0.410 µs<" in figure


def test_the_load_of_experts_is_drawn_once_for_each_routing(tmp_path):
    """Backends of one routing share a curve. The table names the busiest expert and the busiest rank."""
    even = [16.0] * 32
    lines = exchange_case("host", 500.0) + exchange_case("collective", 1000.0)
    lines += [
        line | {"case": "even", "expert_load": even if line["expert_load"] else None}
        for line in exchange_case("host", 500.0)
    ]
    lines.append(lines[0] | {"case": "none", "expert_load": [0.0] * 32})  # all ids are masked
    lines.append(lines[0] | {"case": "one", "expert_load": [32.0] + [0.0] * 31})
    document = page_of(make(tmp_path / "run", lines))
    figure = next(each for each in re.findall(r"<figure.*?</figure>", document, re.DOTALL) if "Load of experts" in each)
    assert figure.count('<path class="line"') == 6, "three curves, each also in the legend"
    assert "uniform, 512 tokens (backend=host), 1: 2 rows of a step / mean" in figure
    assert "uniform, 512 tokens (even), 32: 1 rows of a step / mean" in figure
    rows = [re.findall(r"<td[^>]*>([^<]*)", row) for row in re.findall(r"<tr>(.*?)</tr>", figure)]
    assert [row[1:] for row in rows if len(row) > 1] == [
        ["32", "64.0", "0", "128.0", "2.00", "1.00", "8"],
        ["32", "16.0", "0", "16.0", "1.00", "1.00", "0"],
        ["32", "1.0", "0", "32.0", "32.00", "4.00", "31"],
    ]


def test_a_run_of_an_earlier_version_has_no_load(tmp_path):
    lines = [line | {"expert_load": None, "expert_load_imbalance": None} for line in exchange_case("host", 500.0)]
    run = make(tmp_path / "run", lines)
    text = (run / "results.jsonl").read_text()
    earlier = text.replace('"expert_load_imbalance": null, "expert_load": null, ', "")
    assert earlier != text
    (run / "results.jsonl").write_text(earlier)
    assert "Time split" in page_of(run) and "Load of experts" not in page_of(run)


def colours(dark: bool) -> dict[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    part = CSS.split("@media (prefers-color-scheme: dark)")[1] if dark else CSS.split("@media")[0]
    for name, value in re.findall(r"--([\w-]+): #([0-9a-f]{6})", part.split("* {")[0]):
        found[name] = tuple(int(value[i : i + 2], 16) / 255 for i in (0, 2, 4))
    return found


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_have_contrast(dark):
    known = colours(dark)
    assert set(known) >= {"page", "card", "ink", "heat", "on-low", "on-high", *(f"c{i}" for i in range(6))}
    for name in ("c0", "c1", "c2", "c3", "c4", "c5", "grey"):
        assert contrast(known[name], known["page"]) >= 4.5, name
    for name in ("ink", "muted", "link", "good", "bad", "warn", "none"):
        assert min(contrast(known[name], known[under]) for under in ("page", "card")) >= 4.5, name
    for share in (0.0, 0.25, 0.5, FULL - 0.001, FULL + 0.001, 0.9, 1.0):
        svg = heat_map(Heat("", 1, {(0, 0): share}, 1.0, "GB/s")).elements
        opacity = float(re.findall(r'fill-opacity="([\d.]+)"', svg)[0])
        ink = known["on-high" if 'class="over"' in svg else "on-low"]
        cell = tuple(opacity * h + (1 - opacity) * p for h, p in zip(known["heat"], known["page"], strict=True))
        assert contrast(ink, cell) >= 4.5, (share, contrast(ink, cell))


def test_the_page_needs_nothing_from_outside(tmp_path):
    document = page_of(make(tmp_path / "a"), make(tmp_path / "b"))
    assert "default-src 'none'; style-src 'unsafe-inline'" in document
    for word in ("http:", "https:", "src=", "url(", "@import", "<script", "<link", "<object", "<iframe", ' id="c'):
        assert word not in document.replace('id="compared"', "").replace('id="cases"', ""), word
    assert len(set(re.findall(r' id="(\w+)"', document))) == document.count(' id="') == 5


OTHER_LINES = (
    "beside_products_",
    "combine_beside_product_",
    "faults_",
    "few_sms_",
    "few_tokens_",
    "few_ways_",
    "live_weights_",
    "option_costs_",
    "ray_tensors_",
    "replays_",
    "shared_fp8_",
    "sm_probe_",
    "train_losses_",
    "vllm_rows_",
)
"""Files whose lines are not those of a run."""
BENCHMARKS = sorted(
    path for path in (REPOSITORY / "benchmarks").glob("*.jsonl") if not path.name.startswith(OTHER_LINES)
)


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_measured_runs_have_small_pages(tmp_path, path):
    run = make(tmp_path / "run", [])
    (run / "results.jsonl").write_text(path.read_text())
    began = time.process_time()
    document = page_of(run)
    assert time.process_time() - began < 5, "seconds of the processor; 0.1 to 0.5 on an AMD EPYC"
    assert 15_000 < len(document) < 1_000_000
    assert "<figure" in document and "left out" not in document


def test_two_runs_are_compared(tmp_path):
    a, b = make(tmp_path / "a"), make(tmp_path / "b", exit_code=6, message="rank 2 is wrong")
    lines = [json.loads(line) for line in (b / "results.jsonl").read_text().splitlines()]
    slower = [line | {key: line[key] and 3 * line[key] for key in ("us_p50", "us_min", "us_p99")} for line in lines]
    (b / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in slower))
    document = page_of(a, b)
    text = text_of(document)
    assert document.count('<header class="verdict') == 2 and "A: quick" in text and "B: quick" in text
    assert re.search(r"B against A: \d+ operations in both: \d+ slower", text)
    assert '<rect class="slower"' in document and "+200.0%" in text
    assert "A: fused" in text and "B: fused" in text, "curves of both runs"
    assert text.count("** slower") == 6, "the exchanges between CPU ranks: copies have a wide spread, others no minimum"


# Writing it.


def test_the_page_replaces_no_file_of_a_run_and_praises_no_wrong_result(tmp_path):
    made = make(tmp_path / "a", [line | {"verified": False} for line in exchange_case("collective", 10.0)])
    with pytest.raises(ConfigError, match=r"the page would replace .*results.jsonl"):
        write_page(made / "results.jsonl", [Record.read(made)])
    lines = [*exchange_case("host", 100.0), *(line | {"verified": False} for line in exchange_case("collective", 10.0))]
    cards = list(raymoe.report.page._cards(lines, several=False))
    assert cards and all("collective" not in where for *_, where in cards)


def test_html_takes_a_file_or_a_directory(tmp_path):
    run = make(tmp_path / "run", exchange_case("host", 5.0))
    assert not (run / "report.html").exists()
    ended = report(run, "--html", run)
    assert (ended.code, ended.out.splitlines()[-1]) == (0, f"the page is {run / 'report.html'}")
    assert report(run, "--html", tmp_path / "mine.html").code == 0
    assert (tmp_path / "mine.html").read_text() == (run / "report.html").read_text()
    ended = report(run, "--html", tmp_path / "none" / "x.html")
    assert ended.code == 8 and "cannot write" in ended.err[-1]


class Outcome:
    """Replaces the driver of a run: it finishes the case and ends with a given exit code."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code

    def __call__(self, _work, receive, **_options):
        line = {key: value for key, value in exchange_case("host", 5.0)[0].items() if value is not None}
        lines = [{key: value for key, value in line.items() if key not in ("run", "generation", "commit")}]
        receive(CaseDone("default", 0, tuple(each | {"case": "default"} for each in lines)))
        return RunOutcome(self.exit_code, "done" if self.exit_code == 0 else "rank 1 died")


def execute(monkeypatch, out: Path, exit_code: int = 0) -> int:
    return outcome_of(monkeypatch, out, exit_code).exit_code


def outcome_of(monkeypatch, out: Path, exit_code: int) -> RunOutcome:
    monkeypatch.setattr(run_module, "run_in_child", Outcome(exit_code))
    with RunDirectory.create(out, "quick") as directory:
        job = load_job("host_exchange", ["world.ranks=2"])
        directory.write_config(job.resolved())
        return run_module._run(job, directory, run_module.Request("host_exchange", quiet=False), None)


@pytest.mark.parametrize(("code", "words"), [(0, "✓ Done"), (4, "✕ Failed")])
def test_a_run_writes_its_page_at_its_end(monkeypatch, tmp_path, capsys, code, words):
    assert execute(monkeypatch, tmp_path / "run", code) == code
    assert words in (tmp_path / "run" / "report.html").read_text()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"the report is {tmp_path / 'run' / 'report.html'}", "below the table"


@pytest.mark.parametrize(("code", "ends"), [(0, 8), (4, 4)])
def test_a_disk_that_refuses_the_page_fails_a_run_that_was_done(monkeypatch, tmp_path, capsys, code, ends):
    (tmp_path / "run" / "report.html" / "in the way").mkdir(parents=True)
    monkeypatch.setattr("raymoe.report.directory.PAGE", "nothing")  # else it could not be removed at the start
    outcome = outcome_of(monkeypatch, tmp_path / "run", code)
    assert outcome.exit_code == ends
    message = outcome.message if code == 0 else capsys.readouterr().err  # `run` prints the message of the outcome last
    assert "cannot write" in message


def test_a_bug_of_the_page_is_told_and_changes_no_exit_code(monkeypatch, tmp_path, capsys):
    def broken(*_: object) -> Path:
        raise KeyError("x")

    monkeypatch.setattr(raymoe.report.page, "write_page", broken)
    assert execute(monkeypatch, tmp_path / "run") == 0
    assert "report.html or plots/ is missing, a bug in raymoe: KeyError: 'x'" in capsys.readouterr().err


def test_figures_come_before_the_config_and_one_sentence_compares_the_backends(tmp_path):
    """On a phone the config takes several screens."""
    record = Record.read(make(tmp_path / "run", [*exchange_case("host", 5.0), *exchange_case("collective", 8.5)]))
    html = page([record])
    assert html.index("<figure") < html.index('id="what"')
    assert html.index("exchange: host is 1.70x as fast as collective at 512 tokens a rank") < html.index("<figure")


def test_a_busy_machine_is_told_before_the_run_and_on_the_page(monkeypatch, tmp_path):
    """Times of a busy machine say little; a comparison of backends may even turn around."""
    busy_facts = {"load_average": 14.4, "cpu": {"usable": 2}}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    notice = run_module._busy_notice(busy_facts, run_module.Request("quickstart"))
    assert notice is not None and "load average 14.4 on 2 CPUs" in notice
    assert run_module._busy_notice(busy_facts, run_module.Request("quickstart", address="head:1")) is None
    assert run_module._busy_notice(busy_facts | {"load_average": 0.5}, run_module.Request("quickstart")) is None
    path = make(tmp_path / "run", exchange_case("host", 5.0))
    assert "machine was busy" not in page([Record.read(path)])
    (path / "environment.json").write_text(json.dumps(busy_facts))
    assert "<dt>machine was busy</dt><dd>load average 14.4 on 2 CPUs</dd>" in page([Record.read(path)])


def test_a_resumed_run_has_no_page_of_its_earlier_end(tmp_path):
    run = make(tmp_path / "run", exchange_case("host", 5.0), 4, "rank 1 died")
    write_page(run, [Record.read(run)])
    with RunDirectory.resume(run) as directory:
        directory.write_environment({})
    assert not (run / "report.html").exists()
    (run / "report.html").mkdir()
    with RunDirectory.resume(run) as directory, pytest.raises(CannotWrite, match=r"report\.html"):
        directory.write_environment({})
