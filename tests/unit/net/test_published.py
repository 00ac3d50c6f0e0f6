"""The numbers that ranks of several domains publish in a store which any program of the machine can write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raymoe.memory.world import SpanningWorld, World
from raymoe.net.published import PublishedNumbers
from tests.unit.memory.test_world_of import error_of, groups

Groups = Callable[..., list[Any]]
__all__ = ["groups"]  # a fixture


def forge(rank: int, key: str, record: bytes) -> Any:
    """Let a program that knows no secret write a record into the store. Return what a long wait of rank 1 raises."""
    with World.of(domain=1, timeout_s=5) as world:
        assert isinstance(world, SpanningWorld)
        numbers = PublishedNumbers(world)
        numbers.lagging(1)
        if rank == 0:
            world.store.ask("set", key, record, timeout_s=5)
        world.barrier("forged")
        said = error_of(lambda: numbers.lagging(1))[1] if rank == 1 else ""
        world.barrier("read")
        return said, world.store.address


@pytest.mark.parametrize("record", [b"not a number", b"999999", b""])
def test_a_number_that_its_rank_did_not_write_is_refused(groups: Groups, record: bytes) -> None:
    said, address = groups(2, forge, "entered by 0", record)[1]
    assert said == (
        "the number of operations of rank 0 is not one that it wrote; another program writes into this world's store "
        f"at 127.0.0.1:{address.port}: make a new world"
    )
    assert repr(address.secret) not in repr(address)


def test_a_reason_that_no_rank_wrote_is_refused(groups: Groups) -> None:
    said, _ = groups(2, forge, "failed", b"rank 1 is bad")[1]
    assert said.startswith("the reason of a rank that failed is not one that it wrote; another program writes")


def put_an_old_number_back(rank: int) -> Any:
    """Return the numbers of rank 0 that rank 1 finds: after its 3rd operation, its 7th, and when the 3rd is back."""
    answers = []
    with World.of(domain=1, timeout_s=5) as world:
        assert isinstance(world, SpanningWorld)
        numbers, old = PublishedNumbers(world), b""
        for number in (3, 7, 0):
            if rank == 0 and number:
                numbers.lagging(number)
                numbers.lagging(number)  # the second question publishes
                old = old or world.store.ask("get", "entered by 0", timeout_s=5)
            elif rank == 0:
                world.store.ask("set", "entered by 0", old, timeout_s=5)
            world.barrier("written")
            if rank == 1:
                operation = 10 + len(answers)
                numbers.lagging(operation)
                answers.append(numbers.lagging(operation))
            world.barrier("read")
    return answers


def test_an_old_record_that_is_put_back_is_not_believed(groups: Groups) -> None:
    assert groups(2, put_an_old_number_back)[1] == [(0, 3), (0, 7), (0, 7)]
