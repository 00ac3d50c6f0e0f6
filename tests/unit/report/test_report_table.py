"""The table at the end of a run, and `raymoe report`."""

import pytest

from raymoe.errors import ConfigError
from raymoe.report.columns import columns_of, shares_of_push, speedups
from raymoe.report.compare import overview
from raymoe.report.directory import RunDirectory
from raymoe.report.environment import commit, environment
from raymoe.report.results import Line, Record, Summary
from raymoe.report.tables import render
from tests.unit.report.lines import complete_line, copy_case, exchange_case, gpu_exchange

COMPARED = [line for backend, us in (("host", 500.0), ("collective", 1000.0)) for line in exchange_case(backend, us)]


def cells(row: str) -> list[str]:
    return row.split()


def test_a_plain_table_compares_backends():
    text = render(COMPARED)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    rows = [row for row in text.splitlines() if row.startswith("backend=")]
    assert len(rows) == len(COMPARED), "one row for each line"
    assert cells(rows[0]) == [*("backend=host", "dispatch", "200.0", "400.0", "1.177", "MiB", "3.21", "yes", "2.00x")]
    assert cells(rows[3])[-1] == "1.00x"
    assert "tokens 512" in text.splitlines()[0], "values that all lines share are above the table"
    assert "imbalance 2.00, max error 1.3e-03" in " ".join(text.split())
    assert text.splitlines()[3] == "exchange: host is 2.00x as fast as collective at 512 tokens a rank"


def test_an_imbalance_that_differs_has_a_column():
    lines = [*exchange_case("host", 1.0), *(line | {"case": "kind=hot"} for line in exchange_case("host", 1.0))]
    for line in lines[3:]:
        line["expert_load_imbalance"] = 7.5
    rows = render(lines).splitlines()
    assert any("imbalance" in row and "p50 us" in row for row in rows) and "imbalance 2.00" not in rows[0]
    assert sum("7.50" in row for row in rows) == 3


def test_errors_that_differ_have_a_column():
    lines = [*exchange_case("host", 1.0), *exchange_case("collective", 1.0)]
    lines[0]["max_error"] = 9e-3
    text = render(lines)
    assert "max error" in text.splitlines()[3] and "9.0e-03" in text and "max error" not in text.splitlines()[0]


def test_the_limit_of_the_links_is_beside_each_rate():
    """The limit of the same run counts. Older lines have the highest rate that was measured on such links."""
    lines = gpu_exchange("fused", 10.0, (4096,))
    rows = render([line | {"gbps_link": 400.0} for line in lines]).splitlines()
    assert "of link GB/s" in next(row for row in rows if "p50 us" in row)
    dispatch = next(row for row in rows if row.startswith("dispatch") and "cold" in row)
    assert dispatch.endswith(f"{float(str(lines[0]['gbps_wire'])) / 400:.0%} of 400.00")
    assert f"{float(str(lines[0]['gbps_wire'])) / 381:.0%}\n" in render(lines) and "link GB/s" not in render(lines)
    both = [*gpu_exchange("fused", 10.0), *gpu_exchange("collective", 20.0)]
    assert "p50 / p99 (GB/s, of the links)" in render([line | {"gbps_link": 400.0} for line in both])
    assert "p50 / p99 (GB/s, of 381)" in render(both)


def test_long_times_have_no_decimals_and_a_first_comparison_fits_a_terminal():
    """As `raymoe run host_exchange` prints it on a slow machine."""
    lines = [*exchange_case("collective", 152052.1), *exchange_case("allgather", 241542.8)]
    text = render([line | {"gbps_link": 0.982, "gbps_wire": 0.123} for line in lines])
    assert "152,052" in text and "152,052.1" not in text and "13% of 0.982" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "1,000.0" in render([*exchange_case("host", 1000.0)]), "shorter times in the same column have decimals"


def test_rows_of_the_busiest_rank_are_beside_its_capacity():
    lines = [line | {"rows_busiest": 2304, "rows_capacity": 8320} for line in exchange_case("host", 1.0)]
    assert "busiest rank 2,304 of 8,320 rows" in " ".join(render(lines).split())
    lines += [line | {"case": "kind=hot", "rows_busiest": 8000} for line in lines]
    text = render(lines)
    assert "busiest rank's rows" in text and "2,304 of 8,320" in text and "8,000 of 8,320" in text


def test_numbers_are_aligned_to_the_right():
    rows = render(COMPARED).splitlines()
    head = next(row for row in rows if row.startswith("case"))
    end = head.index("p50 us") + len("p50 us")
    body = rows[rows.index(head) + 2 :]
    assert all(row[end - 1] == "0" and row[end : end + 1] == " " for row in body)


def test_copies_show_size_and_ends_and_no_comparison():
    text = render(copy_case())
    assert "vs slowest" not in text
    assert "case" not in text, "a job without a matrix has one case, which needs no column"
    assert "256 MiB" in text
    assert cells(text.splitlines()[1])[:4] == ["op", "src", "dst", "size"]


def test_two_workloads_make_two_tables_and_no_lines_make_none():
    assert render([*COMPARED, *copy_case()]).count("p50 us") == 2
    assert render([]) == ""


def test_a_key_that_the_case_name_lacks_is_a_column():
    lines = exchange_case("auto", 5.0) + [{**line, "case": "backend=auto2"} for line in exchange_case("host", 5.0)]
    lines = [{**line, "backend": "host" if i % 2 else "collective"} for i, line in enumerate(lines)]
    assert "collective" in render(lines)


def test_a_failed_check_and_a_missing_number_are_shown():
    text = render(
        [complete_line({"case": "default", "workload": "layer", "op": "step", "verified": False, "us_p50": 5.0})]
    )
    assert "NO" in text
    text = render(
        [
            complete_line({"case": c, "workload": "layer", "op": "step", "us_p50": u})
            for c, u in (("a", 1.0), ("b", None))
        ]
    )
    assert cells(text.splitlines()[-1]) == ["b", "step", "-"]


SIDE_BY_SIDE = gpu_exchange("fused", 10.0) + gpu_exchange("collective", 100.0) + gpu_exchange("row_push", 8.0)


def test_exchanges_between_gpus_are_compared_side_by_side():
    parts = render(SIDE_BY_SIDE).split("\n\n")
    tables = [(op, l2) for op in ("dispatch", "combine", "exchange") for l2 in ("cold", "warm")]
    assert [part.splitlines()[0] for part in parts[1:]] == [
        f"{op}, {l2} L2: us, p50 / p99 (GB/s, of 381)" for op, l2 in tables
    ]
    head, _, few, many = parts[1].splitlines()[1:]
    assert head.split() == ["tokens", "on", "wire", "fused", "collective", "row_push"]
    assert few.split() == [
        *("128", "17.5", "MiB", "26.0", "(176,", "46%)", "116.0", "(40,", "10%)", "24.0", "(191,", "50%)")
    ]
    assert many.split()[3] == "522.0"
    assert parts[3].splitlines()[1].split() == ["tokens", "on", "wire", "fused", "collective"]


def test_tables_show_the_tail_and_where_a_sample_is_the_mean_of_many_runs() -> None:
    lines = [
        line | {"us_p99": 2 * float(str(line["us_p50"])), "runs": 20 if line["tokens"] == 128 else 1}
        for line in gpu_exchange("fused", 10.0) + gpu_exchange("collective", 100.0)
    ]
    results, dispatch, *_ = render(lines).split("\n\n")
    title, _, _, few, many = dispatch.splitlines()
    assert title.endswith(" (GB/s, of 381); up to 128 tokens a sample is the mean of 20 runs")
    assert few.split()[3:6] == ["26.0", "/", "52.0"] and many.split()[3:6] == ["522.0", "/", "1,044.0"]
    assert "runs a sample" in results
    one_each = render([line | {"runs": 1} for line in lines])
    assert "runs a sample" not in one_each and "mean of" not in one_each


def test_lines_are_compared_with_the_baseline_which_shows_what_it_leaves_out():
    rows = render(SIDE_BY_SIDE).split("\n\n")[0].splitlines()
    head = cells(next(row for row in rows if row.startswith("case")))
    assert head[-8:] == ["of", "push", "of", "link", "vs", "slowest", "leaves", "out"]
    fused = next(cells(row) for row in rows if row.startswith("backend=fused,tokens=128"))
    assert fused[-4:] == ["92%", "46%", "4.46x", "-"]
    push = next(row for row in rows if row.startswith("backend=row_push,tokens=128"))
    assert cells(push)[-5:] == ["-", "50%", "4.83x", "routing,", "counts"]


def test_a_combine_of_larger_rows_is_not_compared_with_row_push():
    lines = [line | {"wire": "float8_e4m3/bfloat16"} for line in SIDE_BY_SIDE]
    by_op = dict(zip(((line["op"], line["backend"]) for line in lines), shares_of_push(lines), strict=True))
    assert by_op["dispatch", "fused"] and by_op["combine", "fused"] is None


def test_lines_are_compared_only_where_their_cases_name_the_same_settings():
    """No key of a line has routing.masked or exchange.capacity; the name of the case has them."""

    def line(backend: str, setting: str, **measured: object) -> Line:
        case = {"case": f"backend={backend},{setting}", "workload": "exchange", "op": "dispatch", "backend": backend}
        return complete_line(case | measured)

    lines = [
        line(backend, f"masked={masked}", us_p50=us * (1 - masked))
        for backend, us in (("host", 100.0), ("collective", 200.0))
        for masked in (0.0, 0.75)
    ]
    assert speedups(lines) == [2, 2, 1, 1]
    copies = [line("none", f"protocol={way}", transport=way, us_p50=us) for way, us in (("put", 1.0), ("get", 2.0))]
    assert speedups(copies) == [2, 1], "push and pull of the same bytes are compared"
    rates = (("row_push", 400.0), ("fused", 380.0), ("row_push", 100.0), ("fused", 90.0))
    alphas = ("alpha=0.5", "alpha=0.5", "alpha=2.0", "alpha=2.0")
    pushed = [line(backend, alpha, gbps_wire=gbps) for alpha, (backend, gbps) in zip(alphas, rates, strict=True)]
    assert shares_of_push(pushed) == [None, 0.95, None, 0.9]


def test_a_skipped_system_shows_its_reason_and_changes_no_other_table():
    reason = "rank 0: torch 2.11.0 finds no NVSHMEM: libnvshmem_host.so.3 is missing"
    skipped = complete_line(
        {**SIDE_BY_SIDE[0], "case": "backend=nvshmem,tokens=128", "backend": "nvshmem", "op": "exchange"}
        | dict.fromkeys(("l2", "graph", "sms", "us_p50", "us_p99", "bytes_wire", "gbps_wire", "verified", "max_error"))
        | {"samples": 0, "skipped": reason}
    )
    parts = render([*SIDE_BY_SIDE, skipped]).split("\n\n")
    row = next(row for row in parts[0].splitlines() if row.startswith("backend=nvshmem"))
    assert row.endswith(f"skipped: {reason}")
    assert parts[1:] == render(SIDE_BY_SIDE).split("\n\n")[1:]


def test_time_against_tokens_is_fitted_for_three_large_token_counts():
    tokens = (128, 1024, 2048, 4096, 8192)
    bent = [line | {"us_p50": line["us_p50"] ** 1.3} for line in gpu_exchange("staged", 30.0, tokens)]
    text = render(gpu_exchange("fused", 30.0, tokens) + bent)
    title, head, _, *rows = text.split("\n\n")[-1].splitlines()
    assert title.startswith("time against tokens from 2048 on, cold L2")
    fused = next(cells(row) for row in rows if row.startswith("dispatch"))
    assert cells(head)[:2] == ["op", "backend"]
    assert fused[:4] + fused[5:] == ["dispatch", "fused", "30.0", "128.00", "0.0%", "yes"]
    assert [cells(row)[-1] for row in rows if "staged" in row] == ["NO"] * 3
    assert "time against tokens" not in render(gpu_exchange("fused", 30.0, (1024, 2048, 4096)))


def test_a_sweep_over_sms_has_a_column_for_each_count():
    sweep = [
        line | {"case": f"{line['case']},sms={sms}", "sms": sms}
        for sms in (12, 24)
        for line in gpu_exchange("fused", float(sms))
    ] + gpu_exchange("row_push", 8.0)
    table = render(sweep).split("\n\n")[1].splitlines()
    assert table[1].split() == ["tokens", "on", "wire", "fused", "sms=12", "fused", "sms=24", "row_push"]


def test_one_backend_or_one_token_count_gives_no_side_by_side_table():
    assert "us (GB/s)" not in render(gpu_exchange("fused", 10.0))
    assert "us (GB/s)" not in render(gpu_exchange("fused", 1.0, (8,)) + gpu_exchange("staged", 2.0, (8,)))


@pytest.mark.parametrize("width", [40, 100, 200])
def test_a_table_on_a_terminal_cuts_no_words(width):
    text = render(COMPARED, terminal=True, width=width)
    for word in ("backend=collective", "dispatch", "1,000.0", "2.00x"):
        assert word in text
    assert ("\N{BOX DRAWINGS LIGHT HORIZONTAL}" in text) == (width >= 100), "a rule is drawn only if the table fits"


def test_the_overview_shows_state_and_cases_of_each_run(tmp_path):
    for name, code in (("a", 0), ("b", 6)):
        with RunDirectory.create(tmp_path / name, name) as run:
            run.write_config({})
            run.add_case(exchange_case("host", 5.0, run.run))
            run.write_summary(Summary.of(code, "rank 1 is wrong" if code else "done", ["backend=host"], run.finished()))
    with RunDirectory.create(tmp_path / "c", "c") as run:
        run.write_config({})
        text = overview([Record.read(tmp_path / name) for name in "abc"])
    heads = text.splitlines()[:3]
    assert heads[0].endswith(": done, exit code 0, 1 finished case")
    assert heads[1].endswith(": failed, exit code 6, 1 finished case: rank 1 is wrong")
    assert heads[2].endswith(": not ended (running, or killed), 0 finished cases")
    assert [head[:2] for head in heads] == ["A ", "B ", "C "]
    assert [row.split()[0] for row in text.splitlines() if " dispatch " in row] == ["A", "B"]
    with pytest.raises(ConfigError, match="is no run directory"):
        Record.read(tmp_path)


def test_environment_lists_packages_cpu_and_memory(tmp_path):
    facts = environment()
    assert facts["packages"]["ray"] and facts["packages"]["torch"]
    assert facts["cpu"]["usable"] >= 1 and facts["load_average"] >= 0
    assert facts["memory"]["total_bytes"] > 2**28
    assert commit(tmp_path) is None, "a folder without git has no commit"


def test_rates_below_one_keep_three_digits():
    line = exchange_case("host", 5.0)[0] | {"gbps_wire": 0.00321}
    cells = {column.header: column.cells for column in columns_of([line])}
    assert cells["GB/s"] == ["0.00321"]
