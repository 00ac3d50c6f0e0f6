"""The table of transport `auto`, and the specs of channels."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from raymoe.errors import CannotWrite, ConfigError
from raymoe.transport.choice import (
    BUILT_IN,
    FILE,
    PATTERNS,
    GpuFacts,
    Table,
    TransportRule,
    choose_transport,
    pattern_of,
    table_from_results,
)
from raymoe.transport.spec import PROTOCOLS, ChannelSpec

PAIR = ((0, 1),)
MINE = Table(
    "NVIDIA H100", (TransportRule("pairs", "put", 0, "copy_engine"), TransportRule("pairs", "put", 4096, "tma"))
)


def test_the_built_in_table_covers_every_pattern_and_protocol():
    for pattern in PATTERNS:
        for protocol in PROTOCOLS:
            assert BUILT_IN.pick(pattern, protocol, 4096) == "tma"
    assert BUILT_IN.pick("pairs", "put", 256 << 20) == "copy_engine"
    assert BUILT_IN.pick("all_to_all", "get", 16 << 20) == "tma"
    assert BUILT_IN.pick("all_to_all", "get", 256 << 20) == "copy_engine"


def test_a_saved_table_is_loaded_and_the_built_in_one_fills_its_gaps(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RAYMOE_CACHE_DIR", str(tmp_path / "cache"))
    assert Table.load() is None
    path = MINE.save()
    assert path == tmp_path / "cache" / FILE
    assert [path_inside.name for path_inside in path.parent.iterdir()] == [FILE]
    assert Table.load() == MINE
    picked = [MINE.pick("pairs", "put", size) for size in (0, 4095, 4096, 1 << 30)]
    assert picked == ["copy_engine", "copy_engine", "tma", "tma"]
    assert MINE.pick("all_to_all", "put", 1 << 30) == BUILT_IN.pick("all_to_all", "put", 1 << 30)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        json.dumps({"format": 2, "gpu": "x", "rules": []}),
        json.dumps({"format": 1, "gpu": "x", "rules": [{"pattern": "pairs"}]}),
        json.dumps(
            {"format": 1, "gpu": "x", "rules": [vars(TransportRule("pairs", "put", 0, "tma")) | {"transport": "TMA"}]}
        ),
        json.dumps(
            {"format": 1, "gpu": "x", "rules": [vars(TransportRule("pairs", "put", 0, "tma")) | {"from_bytes": "4K"}]}
        ),
    ],
)
def test_a_damaged_table_is_an_error_that_names_the_file(tmp_path: Path, text: str):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=FILE):
        Table.load(tmp_path)


def test_a_table_that_cannot_be_written_raises(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="RAYMOE_CACHE_DIR"):
        MINE.save(tmp_path / "file")


def line(transport: str, nbytes: int, us: float, pattern: str = "pairs") -> dict[str, object]:
    return {"op": "copy", "pattern": pattern, "transport": transport, "bytes": nbytes, "us_p50": us}


def test_measured_lines_make_a_table():
    lines = [line("tma", 4096, 3), line("tma", 4096, 5), line("copy_engine", 4096, 4.5)]
    lines += [line("collective", 4096, 1), line("auto:tma", 4096, 1), line("copy_engine", 1 << 20, 9, "all_to_all")]
    table = table_from_results(lines, "get", "a GPU")
    assert table.rules == (
        TransportRule("all_to_all", "get", 1 << 20, "copy_engine"),
        TransportRule("pairs", "get", 4096, "tma"),
    )
    assert table.pick("all_to_all", "get", 1) == "copy_engine"


def test_shared_ports_decide_the_pattern():
    assert pattern_of(ChannelSpec(((0, 1), (1, 2), (2, 0)), (8,))) == "pairs"
    assert pattern_of(ChannelSpec(((0, 1), (0, 2)), (8,))) == "all_to_all"


@pytest.mark.parametrize(
    ("spec", "device", "says"),
    [
        (ChannelSpec(PAIR, (4,), transport="Tma"), "cuda", "'Tma'; between cuda ranks it is one of auto, copy_engine"),
        (ChannelSpec(PAIR, (4,), transport="tma"), "cpu", "between cpu ranks it is one of auto, host"),
        (ChannelSpec(PAIR, (4,), protocol="Put"), "cuda", "'Put'"),
        (ChannelSpec(PAIR, (4,), dtype="float64"), "cuda", "'float64'"),
        (ChannelSpec(PAIR, (-4,)), "cuda", "no dimension may be below 0"),
        (ChannelSpec(PAIR, (4,), slots=0), "cuda", "0 slots"),
        (ChannelSpec(PAIR, (4,), sms=0), "cuda", "sms is 0"),
        (ChannelSpec(PAIR, (4,), transport="copy_engine", sms=8), "cuda", "takes no number of SMs"),
    ],
)
def test_an_impossible_channel_spec_is_refused(spec: ChannelSpec, device: str, says: str):
    with pytest.raises(ConfigError, match=says):
        spec.check(2, device)


H200, A100 = GpuFacts("NVIDIA H200", (9, 0)), GpuFacts("NVIDIA A100", (8, 0))


def world_of(gpus: list[GpuFacts], rank: int) -> SimpleNamespace:
    """Return a rank of a world on these GPUs, whose swaps return the values of such ranks."""

    def swap(own: object, what: str) -> list[object]:
        return list(gpus) if what == "channels: gpus" else [own] * len(gpus)

    def agree(problem: Exception | None, what: str) -> None:
        if problem is not None:
            raise problem

    return SimpleNamespace(rank=rank, device=SimpleNamespace(type="cuda"), gpu=gpus[rank], swap=swap, agree=agree)


@pytest.mark.parametrize("rank", [0, 1])
def test_tma_is_refused_on_all_ranks_if_one_gpu_is_too_old(rank: int, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("RAYMOE_CACHE_DIR", str(tmp_path))
    says = (
        "transport tma was asked for; NVIDIA A100 of rank 1 has compute capability 8.0, and tma needs 9.0 or more: "
        "take copy_engine, collective or auto"
    )
    spec = ChannelSpec(PAIR, (4,), transport="tma")
    with pytest.raises(ConfigError) as caught:
        choose_transport(world_of([H200, A100], rank), spec)
    assert str(caught.value) == says
    with pytest.raises(ConfigError, match="sms is 8, which only transport tma takes; NVIDIA A100 of rank 1"):
        choose_transport(world_of([H200, A100], rank), ChannelSpec(PAIR, (4,), sms=8))
    assert choose_transport(world_of([H200, H200], rank), spec) == "tma"
    for transport in ("copy_engine", "collective"):
        assert choose_transport(world_of([A100, A100], rank), ChannelSpec(PAIR, (4,), transport=transport)) == transport


@pytest.mark.parametrize("gpus", [[A100, A100], [H200, A100]], ids=["both too old", "one too old"])
def test_auto_never_picks_tma_if_a_gpu_is_too_old(gpus: list[GpuFacts], monkeypatch, tmp_path: Path):
    monkeypatch.setenv("RAYMOE_CACHE_DIR", str(tmp_path))
    for nbytes in (0, 4096, 1 << 30):
        for pairs in (PAIR, ((0, 1), (1, 0))):
            for protocol in PROTOCOLS:
                spec = ChannelSpec(pairs, (nbytes,), protocol=protocol)
                assert choose_transport(world_of(gpus, 0), spec) == "copy_engine"
    Table(gpus[0].name, (TransportRule("pairs", "put", 0, "tma"),)).save(tmp_path)  # a measured table does not help
    assert choose_transport(world_of(gpus, 0), ChannelSpec(PAIR, (4096,))) == "copy_engine"
    assert choose_transport(world_of([H200, H200], 0), ChannelSpec(PAIR, (4096,))) == "tma"


def test_mailboxes_share_no_place_and_no_word():
    spec = ChannelSpec(((0, 1), (2, 1), (1, 0), (1, 1)), (3, 50), "float32", slots=3)
    spec.check(3, "cuda")
    mailboxes = spec.mailboxes
    assert [mailbox.number for mailbox in mailboxes] == list(range(12))
    assert len({(mailbox.owner, mailbox.place) for mailbox in mailboxes}) == 12
    assert max(mailbox.place for mailbox in mailboxes) + 1 == spec.places == 9
    layout = spec.layout("cuda")
    assert layout.region("buffer").shape == (9, 640) and layout.region("sends").shape[0] == 12
    with pytest.raises(ConfigError, match="slot 3 of the channel from rank 0 to rank 1; it has 3"):
        spec.mailbox(0, 1, slot=3)
    assert ChannelSpec(PAIR, (0,)).nbytes == 0
    assert ChannelSpec(PAIR, (0,)).layout("cuda").region("buffer").shape == (1, 128)
