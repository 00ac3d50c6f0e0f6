"""In how many chunks rows cross between domains, and on how many SMs the dispatch beside that runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raymoe.errors import ConfigError
from raymoe.exchange.choice import Choice, ExchangeRequest, RankFacts, in_chunks
from raymoe.exchange.domains.chunks import CHUNK_BYTES, MOST_CHUNKS, SMS_BESIDE, chunk_of, crossing_bytes
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8
from raymoe.net.rail import RAIL_BLOCKS

MANY = ExchangeSpec(tokens=4096, hidden=7168, experts=256, topk=8)
FACTS = [RankFacts("a", "NVIDIA H200", (9, 0), nccl=True, sms=132, bounded=True)] * 4
FUSED = Choice("fused", 132)


def chosen(
    sms: int | str = "auto",
    chunk: int | str = "auto",
    spec: ExchangeSpec = MANY,
    inside: Choice = FUSED,
    facts: list[RankFacts] = FACTS,
) -> Choice:
    limited = inside if sms == "auto" else replace(inside, sms=min(int(sms), inside.sms))
    return in_chunks(limited, spec, ExchangeRequest("auto", None, sms, chunk), facts)


def test_a_dispatch_in_chunks_leaves_nccl_its_sms() -> None:
    assert SMS_BESIDE == RAIL_BLOCKS + 1
    for sms in ("auto", 123, 64, 2):
        for chunk in ("auto", 100):
            choice = chosen(sms, chunk)
            assert choice.chunk == (512 if chunk == "auto" else 100)
            assert choice.sms == (123 if sms == "auto" else sms) <= 132 - SMS_BESIDE


@pytest.mark.parametrize("sms", [124, 132, 200])
def test_too_many_sms_mean_one_chunk_or_an_error_that_names_both_numbers(sms: int) -> None:
    assert chosen(sms) == replace(FUSED, sms=min(sms, 132))
    assert chosen(sms, 4096) == replace(FUSED, sms=min(sms, 132))  # one chunk
    with pytest.raises(ConfigError, match=f"chunk is 512, and sms is {sms} of 132, but 9 stay free .*: take sms 123"):
        chosen(sms, 512)


def test_the_smallest_gpu_of_all_ranks_decides() -> None:
    facts = [*FACTS[:3], replace(FACTS[0], sms=114)]
    assert chosen(facts=facts).sms == 114 - SMS_BESIDE
    with pytest.raises(ConfigError, match="sms is 110 of 114"):
        chosen(110, 8, facts=facts)


@pytest.mark.parametrize(
    ("inside", "facts", "says"),
    [
        (Choice("staged", 132), FACTS, "backend staged waits for all rows"),
        (Choice("allgather"), FACTS, "backend allgather waits for all rows"),
        (FUSED, [*FACTS[:1], replace(FACTS[0], bounded=False)], "the NCCL of rank 1 is older than 2.17"),
        (FUSED, [replace(FACTS[0], sms=10)], "the GPU has 10 SMs"),
    ],
)
def test_what_cannot_wait_for_chunks_has_one_or_says_why(inside: Choice, facts: list[RankFacts], says: str) -> None:
    assert chosen(inside=inside, facts=facts) == inside
    with pytest.raises(ConfigError, match=f"chunk is 512, and {says}"):
        chosen(chunk=512, inside=inside, facts=facts)


def test_few_tokens_cross_at_once_unless_chunks_are_asked_for() -> None:
    few = replace(MANY, tokens=64)
    lines = Choice("fused", 132, lines=True)
    assert chosen(spec=few, inside=lines) == lines
    assert chosen(chunk=64, spec=few, inside=lines) == lines
    assert chosen(chunk=16, spec=few, inside=lines) == Choice("fused", 123, chunk=16)
    assert chosen(spec=few) == FUSED


@pytest.mark.parametrize("wire", [None, FP8])
def test_blocks_have_4_mib_or_more_and_there_are_8_at_most(wire: str | None) -> None:
    for tokens in (1, 100, 585, 586, 1171, 1172, 3000, 4096, 5000, 16384):
        spec = replace(MANY, tokens=tokens, wire=wire)
        chunk, whole = chunk_of(spec, "auto", ()), tokens * crossing_bytes(spec)
        chunks = -(-tokens // chunk) if chunk else 1
        assert Choice("fused", chunk=chunk).chunks(tokens) == chunks <= MOST_CHUNKS
        assert (chunks == 1) == (whole < 2 * CHUNK_BYTES)
        assert chunks == 1 or chunk * crossing_bytes(spec) >= CHUNK_BYTES
        assert chunks in (1, MOST_CHUNKS) or chunk * crossing_bytes(spec) < 2 * CHUNK_BYTES
