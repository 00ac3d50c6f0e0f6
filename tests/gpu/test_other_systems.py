"""Test other systems between GPUs: torch's NVSHMEM exchange is verified, and cases it cannot run are skipped lines."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from raymoe.report.results import complete  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU  # noqa: E402
from tests.gpu.test_exchange_workload import RANKS, job, run  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(GPUS < 2, reason=f"each rank needs a GPU of its own; {GPUS} here"),
]
OPS = [(op, l2) for op in ("dispatch", "combine", "exchange") for l2 in ("cold", "warm")]


@pytest.mark.parametrize("routing", [{}, {"masked": 0.3}, {"kind": "zipf", "alpha": 1.2}], ids=str)
@pytest.mark.parametrize("tokens", [3, 200])
def test_nvshmem_moves_the_rows_that_were_sent(ranks, tokens, routing):
    given = job(RANKS, shape={"tokens": tokens}, routing=routing, exchange={"backend": "nvshmem"})
    lines = run_or_skipped_lines(ranks, given)
    assert [(line["op"], line["l2"]) for line in lines] == OPS, lines[0]["skipped"]
    for line in lines:
        assert (line["verified"], line["max_error"], line["backend"], line["skipped"]) == (True, 0.0, "nvshmem", None)
        assert line["us_p50"] > 0 and "one row a rank" in line["leaves_out"]


def test_nvshmem_skips_float8_and_the_run_goes_on(ranks):
    given = job(RANKS, exchange={"backend": "nvshmem", "wire": {"dispatch": "float8_e4m3"}, "output": "raw"})
    [line] = run_or_skipped_lines(ranks, given)
    assert "quantises nothing" in line["skipped"] and line["us_p50"] is None


def run_or_skipped_lines(ranks, given):
    """Return the lines, the same on all ranks. Lines of skipped cases, which have no times, are allowed."""

    answers = ranks.run(given["world"]["ranks"], run, given)
    assert all(lines == answers[0] for lines in answers)
    return [complete(line, run="r", generation=0, commit=None) for line in answers[0]]
