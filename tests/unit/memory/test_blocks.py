"""Blocks of a pool never overlap, stay in their segments, and become whole again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.memory.blocks import BLOCK_BYTES, Block, Blocks

SEGMENTS = st.lists(st.integers(1, 5000), min_size=1, max_size=3)
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=60)


@given(SEGMENTS, STEPS)
def test_blocks_are_apart_and_whole_again_when_all_are_given_back(segments: list[int], steps: list[tuple[bool, int]]):
    blocks, taken = Blocks(), []
    for nbytes in segments:
        blocks.add(nbytes)
    for take, value in steps:
        if take:
            block = blocks.take(value)
            if block is not None:
                taken.append(block)
                check(blocks, taken, segments)
                assert block.nbytes - BLOCK_BYTES < max(value, 1) <= block.nbytes
        elif taken:
            blocks.give(taken.pop(value % len(taken)))
            check(blocks, taken, segments)
    for block in taken:
        blocks.give(block)
    assert blocks.free_bytes == blocks.total_bytes
    for nbytes in sorted(blocks.segment_bytes, reverse=True):
        if nbytes:
            whole = blocks.take(nbytes)
            assert whole is not None and whole.nbytes == nbytes  # no piece is left apart


def check(blocks: Blocks, taken: list[Block], segments: list[int]) -> None:
    ends: dict[int, int] = {}
    for block in sorted(taken, key=lambda block: (block.segment, block.start)):
        assert block.start >= ends.get(block.segment, 0)
        assert block.start % BLOCK_BYTES == block.nbytes % BLOCK_BYTES == 0
        ends[block.segment] = block.start + block.nbytes
    assert all(end <= segments[segment] for segment, end in ends.items())
    assert blocks.free_bytes + sum(block.nbytes for block in taken) == blocks.total_bytes


@given(SEGMENTS, STEPS)
def test_a_block_is_refused_only_if_no_piece_has_its_bytes(segments: list[int], steps: list[tuple[bool, int]]):
    """The free pieces are counted here from the taken blocks, byte by byte."""
    blocks, taken = Blocks(), []
    for nbytes in segments:
        blocks.add(nbytes)
    for take, value in steps:
        if take:
            longest = longest_piece(blocks.segment_bytes, taken)
            block = blocks.take(value)
            assert (block is None) == (longest < -(-max(value, 1) // BLOCK_BYTES))
            taken += [] if block is None else [block]
        elif taken:
            blocks.give(taken.pop(value % len(taken)))


def longest_piece(segment_bytes: list[int], taken: list[Block]) -> int:
    longest = 0
    for segment, nbytes in enumerate(segment_bytes):
        used = [False] * (nbytes // BLOCK_BYTES)
        for block in taken:
            if block.segment == segment:
                for place in range(block.start // BLOCK_BYTES, (block.start + block.nbytes) // BLOCK_BYTES):
                    used[place] = True
        runs = "".join("x" if place else "." for place in used).split("x")
        longest = max(longest, *map(len, runs))
    return longest


def test_what_was_not_taken_cannot_be_given_back() -> None:
    blocks = Blocks()
    blocks.add(1024)
    block = blocks.take(512)
    assert block is not None
    for wrong in (Block(0, 512, 256), Block(0, 256, 512), Block(0, 0, 2048)):
        with pytest.raises(ValueError, match="never was a block"):
            blocks.give(wrong)
    blocks.give(block)
    with pytest.raises(ValueError, match="given back"):
        blocks.give(block)
