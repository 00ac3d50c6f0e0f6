"""Run directories that somebody else made: each is read, or refused with exit code 2 and one sentence."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe import cli
from raymoe.config import job_from_resolved
from raymoe.errors import CannotWrite, ConfigError
from raymoe.report.directory import RunDirectory, write_atomically
from raymoe.report.plots import write_plots
from raymoe.report.reading import MOST_LINES
from raymoe.report.results import KEYS
from tests.unit.report.lines import copy_case, exchange_case, gpu_exchange, traced_exchange
from tests.unit.report.run_directories import EVERY_KIND, Ended, make, report
from tests.unit.report.test_plots import SHAPES

ESCAPE = "\x1b[2J\x1b]0;title\x07"
HEAD = "# raymoe run quick-1\n"
FILES = ("config.yaml", "environment.json", "results.jsonl", "summary.json")


def refused(ended: Ended, *words: str) -> None:
    assert (ended.code, ended.out) == (2, ""), ended
    assert len(ended.err) == 1, ended.err
    for word in words:
        assert word in ended.err[0], ended.err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make(tmp_path / "run", exchange_case("host", 500.0))


def change_line(run: Path, row: int, **changed: object) -> None:
    lines = (run / "results.jsonl").read_text().splitlines()
    lines[row] = json.dumps(json.loads(lines[row]) | changed)
    (run / "results.jsonl").write_text("\n".join(lines) + "\n")


# Values of the wrong kind.


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("us_p50", "fast", "a number"),
        ("us_p50", [1], "a number"),
        ("us_p50", True, "a number"),
        ("us_min", 10**400, "a number"),
        ("gbps_wire", {}, "a number"),
        ("bytes_wire", 1.5, "a whole number"),
        ("tokens", -1, "a whole number"),
        ("ranks", 10**9, "a number of ranks"),
        ("src", 5000, "a rank"),
        ("verified", "yes", "true or false"),
        ("case", None, "it has no case"),
        ("op", 7, "text"),
        ("backend", "x" * 70_000, "text of at most"),
        ("timeline", [["start", 1]], "points and times"),
        ("timeline", [["start", 1, 2, -3]], "points and times"),
        ("timeline", "long", "points and times"),
        ("expert_load", [1.0, -1.0], "the rows of at most 1024 experts"),
        ("expert_load", [1.0] * 1025, "the rows of at most 1024 experts"),
        ("expert_load", [[1.0]], "the rows of at most 1024 experts"),
        ("expert_load_imbalance", "even", "a number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_file_and_line(run, key, value, wanted):
    change_line(run, 1, **{key: value})
    refused(report(run), f"{run}/results.jsonl, line 2 is damaged", key, wanted)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"us_p50": 200.0', '"us_p50": NaN', "NaN is not a JSON number"),
        ('"us_p50": 200.0', '"us_p50": 1e999', "us_p50 = Infinity"),
        ('"us_p50": 200.0', '"us_p50": -Infinity', "-Infinity is not a JSON number"),
        ('"us_p50": 200.0', '"us_p50": ' + "9" * 5000, "digits"),
        ('"timeline": null', '"timeline": ' + "[" * 100_000 + "]" * 100_000, "nested more than 64 deep"),
        ('"timeline": null', '"timeline": ' + "[" * 70 + "]" * 70, "nested more than 64 deep"),
        ('"timeline": null', '"timeline": "' + "x" * 2**20 + '"', "more than 1,048,576 characters"),
    ],
    ids=["nan", "overflow", "infinity", "digits", "very deep", "deep", "long"],
)
def test_json_that_is_none_is_refused(run, old, new, reason):
    text = (run / "results.jsonl").read_text()
    assert old in text
    (run / "results.jsonl").write_text(text.replace(old, new, 1))
    refused(report(run), "results.jsonl, line 1 is damaged", reason)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.yaml", HEAD + "x: &a [1]\n" + "y: !!python/object/apply:os.system [id]\n", ["config.yaml", "line 3"]),
        ("config.yaml", HEAD + "a: {b: [\n", ["config.yaml is damaged"]),
        ("config.yaml", HEAD + "a: \x1b[31m\n", ["config.yaml is damaged", "line 2"]),
        ("config.yaml", HEAD + "x: " + "[" * 500 + "]" * 500, ["config.yaml is damaged", "nested more than 20 deep"]),
        ("config.yaml", HEAD + "a: " + "b" * (9 * 2**20), ["cannot read", "config.yaml", "more than 8,388,608 bytes"]),
        ("summary.json", "{}", ["summary.json is damaged"]),
        ("summary.json", '{"cases": {}, "generations": [{"ready_s": "x"}]}', ["summary.json", "ready_s"]),
        ("summary.json", '{"cases": 3, "generations": []}', ["summary.json", "cases"]),
        ("summary.json", '{"status": [], "cases": {}, "generations": []}', ["summary.json", "status"]),
        ("summary.json", b"\xff\xfe", ["summary.json", "line 1 is not UTF-8"]),
    ],
)
def test_a_damaged_document_is_named(run, name, content, words):
    (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(report(run), *words)


def test_a_damaged_environment_matters_where_it_is_shown(run, tmp_path):
    (run / "environment.json").write_text("[" * 100_000)
    assert report(run).code == 0
    ended = report(run, "--html", tmp_path / "page.html")
    assert ended.code == 2 and "environment.json is damaged" in ended.err[0] and len(ended.err) == 1
    refused(report(run, run), "environment.json is damaged")


# Files that are no files, and files that are too large. A symbolic link may name a file that its author may not read.


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "directory", "socket"])
def test_something_other_than_a_file_is_refused_at_once(run, tmp_path, name, kind):
    (run / name).unlink()
    if kind == "link":
        shutil.copy("/etc/hostname", tmp_path / "secret")
        (run / name).symlink_to(tmp_path / "secret")
    elif kind == "dangling link":
        (run / name).symlink_to(tmp_path / "none")
    elif kind == "fifo":
        os.mkfifo(run / name)
    elif kind == "directory":
        (run / name).mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(os.path.relpath(run / name))  # a socket's path is short
    began = time.monotonic()
    refused(report(run, run), str(run / name))
    assert time.monotonic() - began < 5


def test_files_over_the_limits_are_refused_without_being_read_whole(run):
    with (run / "results.jsonl").open("ab") as file:
        file.truncate(2**40)  # sparse
    refused(report(run), "results.jsonl: it has more than 67,108,864 bytes")
    (run / "results.jsonl").write_text("{}\n" * (MOST_LINES + 1))
    refused(report(run), "results.jsonl has 200,001 lines, at most 200,000")


@pytest.mark.parametrize("path", ["x" * 300, "\x1b[31m", "a\nb", "/proc/self/mem", "\udcff"])
def test_a_path_that_leads_nowhere_is_told_in_one_line(path):
    ended = report(path)
    refused(ended)
    assert ended.err[0].isprintable()


# YAML bombs, and a matrix that nobody could run.


def test_a_merge_bomb_is_refused_at_once(run):
    levels = ["a0: &a0 {" + ", ".join(f"k{i}: 1" for i in range(10)) + "}"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    merges = ["m0: &m0 {k: 1}"] + [
        f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 60)}], k{i}: 1}}" for i in range(1, 30)
    ]
    for bomb in (levels, merges):
        (run / "config.yaml").write_text(HEAD + "\n".join(bomb) + "\n")
        began = time.monotonic()
        refused(report(run), "config.yaml is damaged", "more than 20000 values")
        assert time.monotonic() - began < 10


MATRIX = {
    "10^9 cases": ({f"shape.{key}": list(range(1, 1001)) for key in ("tokens", "hidden", "ffn")}, "1000000000 cases"),
    "no such key": ({"shape.x": [1]}, "matrix.shape.x: no such key"),
    "inside a text": ({"name.x": [1]}, "matrix.name.x: no such key"),
    "the world": ({"world.ranks": [1, 2]}, "matrix.world.ranks: no such key"),
    "no list": ({"shape.tokens": 7}, "matrix"),
    "wrong values": ({"shape.tokens": [0]}, "tokens"),
}


@pytest.mark.parametrize(("matrix", "reason"), MATRIX.values(), ids=MATRIX)
def test_resume_refuses_a_matrix_that_no_run_wrote(run, capsys, matrix, reason):
    resolved = {"name": "x", "workload": "layer", "matrix": matrix}
    (run / "config.yaml").write_text(HEAD + json.dumps(resolved))
    began = time.monotonic()
    assert cli.main(["run", "--resume", str(run)]) == 2
    assert time.monotonic() - began < 20
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and reason in err[0], err
    with pytest.raises(ConfigError, match="not a resolved job"):
        job_from_resolved(resolved)


# Text for the terminal and the page.


def test_control_characters_never_reach_the_terminal(run, tmp_path):
    hostile = f"{ESCAPE}\r\n\u202eevil\ud800"
    for row in range(3):
        change_line(run, row, case=hostile, backend=hostile, device=hostile, skipped=hostile, routing=f"{row}{ESCAPE}")
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"message": hostile, "status": hostile, "cases": {hostile: hostile}}
    summary["generations"][0]["cause"] = hostile
    (run / "summary.json").write_text(json.dumps(summary))
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(config.splitlines()[0], "# raymoe run a\u202eb"))
    other = tmp_path / f"other{ESCAPE}"
    shutil.copytree(run, other)
    ended = report(run, other, "--html", other, "--plots")
    assert ended.code == 0, ended.err
    assert all(line.isprintable() for line in ended.out.splitlines()), "an escape sequence on the terminal"
    assert "\\x1b[2J" in ended.out and "\\u202e" in ended.out
    page = (other / "report.html").read_text()
    assert "\x1b" not in page and "\u202e" not in page and "\r" not in page


def test_an_error_names_a_hostile_path_without_obeying_it(tmp_path):
    there = tmp_path / f"a{ESCAPE}b\nc"
    there.mkdir()
    ended = report(there)
    refused(ended, "\\x1b[2J")
    assert ended.err[0].isprintable()


class Tags(HTMLParser):
    """Collects the tags and attributes of a page, and checks that they are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def tags_of(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    assert page.replace("\n", "").isprintable()
    return tags


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def known(whole_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Tags:
    """The tags and attributes of the page of a good run."""
    page = tmp_path_factory.mktemp("page") / "page.html"
    assert report(whole_run, whole_run, "--html", page).code == 0
    return tags_of(page.read_text())


def check_page(page: str, known: Tags) -> None:
    """Nothing in the data has become a tag or an attribute."""
    tags = tags_of(page)
    assert tags.tags <= known.tags | {"code"}, tags.tags - known.tags
    assert tags.attributes <= known.attributes, tags.attributes - known.attributes
    assert not tags.attributes & {"src", "onerror", "srcset", "action"}


INJECTED = "\"><script>alert(1)</script><img src=x onerror=alert(1)>'</style></svg><!--"


def test_everything_from_the_data_is_escaped_in_the_page(run, tmp_path, known):
    first = json.loads((run / "results.jsonl").read_text().splitlines()[0])
    texts = [key for key, value in first.items() if isinstance(value, str) and key not in ("op", "run")]
    for row in range(3):
        change_line(run, row, **{key: f"{INJECTED}{key}" for key in texts})
    ranks = [{"rank": INJECTED, "pid": [INJECTED], "node": {INJECTED: 1}, "gpu": INJECTED}, INJECTED, None]
    environment = {
        "raymoe": INJECTED,
        "packages": {INJECTED: INJECTED},
        "cpu": [INJECTED],
        "host": None,
        "ranks": ranks,
    }
    (run / "environment.json").write_text(json.dumps(environment))
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"message": INJECTED, "status": INJECTED, "cases": {INJECTED: INJECTED}}
    summary["generations"][0]["cause"] = INJECTED
    (run / "summary.json").write_text(json.dumps(summary))
    name = json.dumps(INJECTED)
    (run / "config.yaml").write_text(f"# raymoe run {INJECTED}\nname: {name}\n{name}: 1\n")
    ended = report(run, "--html", tmp_path / "page.html")
    assert ended.code == 0, ended.err
    page = (tmp_path / "page.html").read_text()
    check_page(page, known)
    assert page.count("&lt;script&gt;") > 10 and "<script" not in page


# Writing into a directory in which somebody else has put links and FIFOs.


def test_planted_links_are_never_followed_by_a_write(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    for name in (".config.yaml.tmp", ".environment.json.tmp", ".results.jsonl.tmp", ".summary.json.tmp"):
        (run / name).symlink_to(victim)
    make(run, exchange_case("host", 5.0))
    (run / "report.html").symlink_to(victim)
    assert report(run, "--html", run).code == 0
    assert victim.read_text() == "precious"
    assert not (run / "report.html").is_symlink() and "<!doctype html>" in (run / "report.html").read_text()


@pytest.mark.parametrize("kind", ["symbolic", "hard", "fifo"])
@pytest.mark.parametrize("how", ["create", "resume"])
def test_a_planted_lock_is_refused_and_its_target_stays(tmp_path, kind, how):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = make(tmp_path / "run", exchange_case("host", 5.0)) if how == "resume" else tmp_path / "run"
    run.mkdir(exist_ok=True)
    (run / ".lock").unlink(missing_ok=True)
    if kind == "symbolic":
        (run / ".lock").symlink_to(victim)
    elif kind == "hard":
        (run / ".lock").hardlink_to(victim)
    else:
        os.mkfifo(run / ".lock")
    with pytest.raises(ConfigError, match=r"\.lock is .*remove it or name another directory"):
        (RunDirectory.resume(run) if how == "resume" else RunDirectory.create(run, "x")).close()
    assert victim.read_text() == "precious"


def test_a_lock_of_any_bytes_is_no_reason_to_fail(run):
    (run / ".lock").write_bytes(b"\xff\x00\x1b[31m")
    RunDirectory.resume(run).close()


@pytest.mark.parametrize("make_target", [os.mkfifo, os.mkdir], ids=["fifo", "directory"])
def test_a_write_replaces_only_files(tmp_path, make_target):
    make_target(tmp_path / "target")
    with pytest.raises(CannotWrite, match=r"target: something other than a file is there"):
        write_atomically(tmp_path / "target", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert not (tmp_path / "target").is_file()


def test_plots_stay_inside_the_run_directory(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    run = make(tmp_path / "run", copy_case())
    (run / "plots").symlink_to(outside)
    ended = report(run, "--plots")
    assert ended.code == 8 and "plots" in ended.err[-1]
    assert list(outside.iterdir()) == []
    (run / "plots").unlink()
    away = {"pattern": "../../outside/p", "routing": "../../outside/r", "l2": "cold"}
    named = [each | away | {"op": "/../../outside/x"} for each in (*copy_case(), *gpu_exchange("fused", 8.0))]
    copies = [each | {"op": "copy"} for each in named if each["bytes"]]
    exchanges = [each | away for each in gpu_exchange("fused", 8.0)]
    written = write_plots(run, [*named, *copies, *exchanges])
    assert len(written) > 6 and {path.parent for path in written} == {run / "plots"}
    assert list(outside.iterdir()) == []
    assert all(path.exists() for path in written)


def test_everything_from_the_data_is_escaped_in_plots(tmp_path):
    """A file with markup in its names would be no well-formed XML, or have further elements."""
    lines = [
        {key: f"{INJECTED}\x00{key}" if isinstance(value, str) and key not in NOT_SHOWN else value
         for key, value in line.items()}
        for line in EVERY_KIND
    ]  # fmt: skip
    written = write_plots(tmp_path, lines)
    assert len(written) > 8
    for path in written:
        root = ElementTree.fromstring(path.read_text())
        assert {each.tag.rpartition("}")[2] for each in root.iter()} <= SHAPES
        assert not {name for each in root.iter() for name in each.attrib} & {"src", "href", "onerror", "id"}
        assert "alert(1)</script>" in "".join(root.itertext())


NOT_SHOWN = ("op", "workload", "l2", "device")
"""Lines with other values have no figure, or fewer."""


# Many lines: time grows with their number, not with its square.

MANY = 4_000
ONE, GPU, COPY = exchange_case("host", 100.0)[0], gpu_exchange("fused", 8.0, (128,))[0], copy_case()[0]
TRACED = next(each for each in traced_exchange((64,)) if each["timeline"])
KINDS_OF_MANY = {
    "cases": lambda i: ONE | {"case": f"c{i}"},
    "workloads": lambda i: ONE | {"workload": f"w{i}"},
    "backends": lambda i: GPU | {"backend": f"b{i}", "tokens": i + 1},
    "caches": lambda i: GPU | {"l2": f"l{i}", "tokens": i + 1},
    "sizes": lambda i: COPY | {"bytes": i + 1, "src": i % 64, "dst": (i + 1) % 64},
    "transports": lambda i: COPY | {"transport": f"t{i}"},
    "timelines": lambda i: TRACED | {"case": f"c{i}"},
    "loads": lambda i: ONE | {"case": f"c{i}", "expert_load": [i + 1.0] * 63 + [5e-324]},
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS_OF_MANY)
def test_many_lines_take_seconds(run, tmp_path, kind):
    with (run / "results.jsonl").open("w") as file:
        for i in range(2 * MANY if kind == "cases" else MANY):
            file.write(json.dumps(KINDS_OF_MANY[kind](i)) + "\n")
    began = time.process_time()
    runs = [run, run] if kind == "cases" else [run]
    assert report(*runs, "--html", tmp_path / "page.html").code == 0
    assert time.process_time() - began < 20, "seconds of the processor; 1 to 7 on an AMD EPYC"
    assert (tmp_path / "page.html").stat().st_size < 4_000_000


# Random damage.

VALUES: list[object] = [
    *(None, True, False, 0, -1, 1, 0.0, -0.0, 1e-300, 1e308, 2**63, 10**30, "", "x", "NaN", [], {}, [[]], {"a": 1}),
    *(ESCAPE, "\ud800", "\u202e", "\x00", "../../etc/passwd", INJECTED, "$\\frac{", "a=b,c=d,sms=0", "é" * 500),
    *(
        ["start", 1, 2, 3],
        [["start", 0, 0, 0]],
        [["?", 1, 2, 3], ["?", 3, 2, 1]],
        "copy",
        "dispatch",
        "cold",
        "exchange",
    ),
]


def damage(run: Path, chance: random.Random) -> None:
    """Change one of the files of a run directory."""
    name = chance.choice([*FILES, "results.jsonl", "results.jsonl"])
    path = run / name
    if not path.is_file() or path.is_symlink():
        return
    data = path.read_bytes()
    match chance.randrange(8):
        case 0:
            path.write_bytes(data[: chance.randrange(len(data) + 1)])
        case 1:
            at = chance.randrange(len(data) + 1)
            path.write_bytes(data[:at] + chance.randbytes(chance.randrange(1, 9)) + data[at:])
        case 2 if data:
            flipped = bytearray(data)
            for _ in range(3):
                flipped[chance.randrange(len(data))] = chance.randrange(256)
            path.write_bytes(bytes(flipped))
        case 3:
            path.unlink()
            put = (lambda: None, path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/etc/hostname"))
            chance.choice(put)()
        case 4:
            path.write_bytes(data * chance.randrange(4))
        case _ if name == "results.jsonl":
            lines = [
                json.loads(each) for each in data.decode(errors="replace").splitlines() if each.startswith('{"run"')
            ]
            for each in chance.sample(lines, min(len(lines), chance.randrange(1, 30))):
                each[chance.choice(KEYS)] = chance.choice(VALUES)
            path.write_text("".join(json.dumps(each) + "\n" for each in lines))
        case _:
            words = data.decode(errors="replace").split(" ")
            words[chance.randrange(len(words))] = json.dumps(chance.choice(VALUES))
            path.write_text(" ".join(words), errors="replace")


@settings(max_examples=120)
@given(seed=st.integers(0, 2**32), several=st.booleans())
def test_a_damaged_run_is_read_or_refused_in_one_sentence(whole_run, known, tmp_path_factory, seed, several):
    chance = random.Random(seed)
    folder = tmp_path_factory.mktemp("damaged")
    run, page = folder / "run", folder / "page.html"
    shutil.copytree(whole_run, run)
    try:
        for _ in range(chance.choice([1, 1, 2, 3])):
            try:
                damage(run, chance)
            except ValueError:  # an earlier change has left no JSON to change
                break
        ended = report(*([whole_run, run] if several else [run]), "--html", page)
        assert ended.code in (0, 2), ended.err
        assert len(ended.err) == (ended.code == 2), ended.err
        assert all(each.isprintable() for each in (*ended.out.splitlines(), *ended.err))
        if ended.code == 0:
            check_page(page.read_text(), known)
    finally:
        shutil.rmtree(folder)


def test_the_whole_run_is_read(whole_run, tmp_path):
    """The run that is damaged above is good, and its page has every kind of figure."""
    assert report(whole_run, "--html", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    figures = (
        "Copies, one pair at a time",
        "between all pairs",
        "Time of dispatch",
        "over SMs",
        "Where the time of dispatch goes",
    )
    for title in (*figures, "Time split of an exchange", "Dispatch beside a matrix product"):
        assert title in page, title
