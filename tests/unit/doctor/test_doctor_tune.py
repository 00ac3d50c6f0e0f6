"""`raymoe doctor --tune`: from result lines to the table of transports, and the command around it."""

from __future__ import annotations

from pathlib import Path

import pytest

import raymoe.run
from raymoe import cli
from raymoe.config import Job, load_job
from raymoe.doctor import tune
from raymoe.doctor.finding import ProbeOutcome
from raymoe.errors import PlacementError, WrongResult
from raymoe.report.directory import RunDirectory
from raymoe.report.results import Line, complete
from raymoe.run import Request
from raymoe.transport.choice import CANDIDATES, FILE, PATTERNS, Table
from raymoe.transport.spec import PROTOCOLS
from raymoe.workload.p2p.copies import copies_of

RANKS = 3
KIB, MIB = 1 << 10, 1 << 20
# Microseconds before the first byte, and bytes per microsecond.
COST = {"tma": (3.0, 340e3), "copy_engine": (9.0, 390e3)}
GPUS = ProbeOutcome({"gpus": [{"name": "NVIDIA H200"}] * RANKS})


def job() -> Job:
    """Return the job of the config, with all pairs; a table can be made from any number of pairs."""
    return load_job(tune.CONFIG, [f"world.ranks={RANKS}", "p2p.pairs=all"])


def us(transport: str, protocol: str, pattern: str, nbytes: int) -> float:
    start, speed = COST[transport]
    if transport == "copy_engine" and (protocol, pattern) == ("get", "all_to_all"):
        speed /= 2  # as measured on an H200
    return start + nbytes / speed


def lines_of(job: Job) -> list[Line]:
    """Return the result lines of a run in which the first pair is slower than the others."""
    lines = []
    for case in job.cases():
        p2p = case.job.p2p
        ranks = range(job.world.ranks)
        every = [(a, b) for a in ranks for b in ranks if a != b] if p2p.pairs == "all" else p2p.pairs
        pairs = every if p2p.pattern == "pairs" else [(None, None)]
        for transport in p2p.transports:
            for nbytes in p2p.bytes:
                for pair in pairs:
                    time = us(transport, p2p.protocol, p2p.pattern, nbytes) * (10 if pair == (0, 1) else 1)
                    known = {"case": case.name, "workload": "p2p", "op": "copy", "transport": transport}
                    known |= {"pattern": p2p.pattern, "src": pair[0], "dst": pair[1], "bytes": nbytes, "us_p50": time}
                    known |= {"device": "NVIDIA H200", "verified": True, "ranks": RANKS}
                    lines.append(complete(known, run="tune-1", generation=0, commit=None))
    return lines


def test_the_config_covers_every_protocol_pattern_and_transport() -> None:
    cases = job().cases()
    assert {(case.job.p2p.protocol, case.job.p2p.pattern) for case in cases} == {
        (protocol, pattern) for protocol in PROTOCOLS for pattern in PATTERNS
    }
    assert all(set(case.job.p2p.transports) == set(CANDIDATES) for case in cases)
    assert all(case.job.steps.verify and case.job.world.device == "cuda" for case in cases)
    cases = load_job(tune.CONFIG, ["world.ranks=8"]).cases()  # as many copies as with two ranks
    assert [len(list(copies_of(case))) for case in cases] == [44, 22, 44, 22]


def test_the_table_picks_the_faster_transport_for_every_size() -> None:
    table = tune.table_of(lines_of(job()), job())
    assert table.gpu == "NVIDIA H200"
    for case in job().cases():
        protocol, pattern = case.job.p2p.protocol, case.job.p2p.pattern
        for nbytes in case.job.p2p.bytes:
            best = min(CANDIDATES, key=lambda way: us(way, protocol, pattern, nbytes))
            assert table.pick(pattern, protocol, nbytes) == best, (pattern, protocol, nbytes)
    assert table.pick("pairs", "put", 1) == "tma"
    assert table.pick("pairs", "put", 256 * MIB) == table.pick("pairs", "get", 1 << 40) == "copy_engine"
    assert {table.pick("all_to_all", "get", nbytes) for nbytes in (1, MIB, 1 << 40)} == {"tma"}


def test_the_printed_table_shows_medians_and_choices() -> None:
    lines = lines_of(job())
    table = tune.table_of(lines, job())
    printed = tune.report(tune.times_of(lines, job()), table).splitlines()
    assert printed[0].split() == ["pattern", "protocol", "bytes", "copy_engine", "us", "tma", "us", "auto"]
    smallest = next(row.split() for row in printed if "4KiB" in row)
    assert smallest == ["pairs", "put", "4KiB", "9.0", "3.0", "tma"]  # medians: the one slow pair does not count
    assert len(printed) == 1 + 4 * len(job().p2p.bytes) + 1 + 4
    assert printed[-4:] == [
        "all_to_all put: tma, copy_engine from 16MiB",
        "pairs put: tma, copy_engine from 16MiB",
        "all_to_all get: tma",
        "pairs get: tma, copy_engine from 16MiB",
    ]


def test_unverified_or_missing_lines_make_no_table() -> None:
    lines = lines_of(job())
    lines[5] |= {"verified": False}
    with pytest.raises(WrongResult, match="case protocol=put,pattern=pairs has a line that is not verified"):
        tune.table_of(lines, job())
    with pytest.raises(WrongResult, match="gave no lines"):
        tune.table_of([], job())


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (ProbeOutcome({"missing": "cuDriverGetVersion was called"}), "there is no NVIDIA driver here"),
        (
            ProbeOutcome({"version": [13, 0], "error": "cuInit failed", "code": 802}),
            "CUDA does not start: cuInit failed",
        ),
        (
            ProbeOutcome(trouble="no answer within 60 s while starting CUDA"),
            "no answer within 60 s while starting CUDA",
        ),
        (ProbeOutcome({"gpus": [], "peers": []}), "this process sees 0 GPUs"),
        (
            ProbeOutcome({"gpus": [{"name": "x"}]}),
            "this process sees 1 GPU; use a machine with more, or unset CUDA_VISIBLE",
        ),
    ],
)
def test_fewer_than_two_gpus_are_refused(told: ProbeOutcome, says: str) -> None:
    with pytest.raises(PlacementError, match=says) as caught:
        tune.count_gpus(told)
    assert caught.value.exit_code == 3


class FakeRun:
    """Replaces `raymoe.run.run`: writes a run directory."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.requests: list[Request] = []

    def __call__(self, request: Request) -> int:
        self.requests.append(request)
        assert request.config is not None and request.out is not None
        job = load_job(request.config, request.sets)
        with RunDirectory.create(Path(request.out), job.name) as directory:
            directory.write_config(job.resolved())
            lines = lines_of(job)
            for case in job.cases() if not self.code else ():
                directory.add_case([line for line in lines if line["case"] == case.name])
        return self.code


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYMOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "Probes", lambda _: FakeProbes())
    return tmp_path / "cache"


class FakeProbes(dict[str, ProbeOutcome]):
    def __init__(self) -> None:
        super().__init__({"cuda": GPUS})

    def close(self) -> None: ...


def test_the_command_runs_the_config_on_all_gpus_and_writes_the_table(cache, monkeypatch, capsys) -> None:
    runs = FakeRun()
    monkeypatch.setattr(raymoe.run, "run", runs)
    assert cli.main(["doctor", "--tune"]) == 0
    [request] = runs.requests
    assert (request.config, request.sets, request.address) == ("tune", (f"world.ranks={RANKS}",), "local")
    assert request.out is not None and not Path(request.out).exists()  # the run directory is removed
    out, err = capsys.readouterr()
    assert out.endswith(f"auto uses this table on every NVIDIA H200 that reads {cache / FILE}\n")
    assert "between 3 GPUs" in err
    assert Table.load() == tune.table_of(lines_of(job()), job())


def test_a_failed_run_writes_no_table(cache, monkeypatch, capsys) -> None:
    monkeypatch.setattr(raymoe.run, "run", FakeRun(code=5))
    assert cli.main(["doctor", "--tune"]) == 5
    assert capsys.readouterr().out == ""
    assert Table.load() is None and not cache.exists()


def test_a_table_that_cannot_be_written_is_printed_and_exits_8(cache, monkeypatch, capsys) -> None:
    cache.write_text("a file, not a folder")
    monkeypatch.setattr(raymoe.run, "run", FakeRun())
    assert cli.main(["doctor", "--tune"]) == 8
    out, err = capsys.readouterr()
    assert "pairs put: tma, copy_engine from 16MiB" in out
    assert "set RAYMOE_CACHE_DIR" in err.splitlines()[-1]
