"""Workload overlap on GPU ranks: complete lines, exchange and product both right. Nothing here is about speed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from raymoe.errors import WrongResult
from raymoe.workload.overlap.run import OPS, Product
from tests.gpu.ranks import GPUS, NEEDS_GPU
from tests.gpu.test_exchange_workload import RANKS, job, lines_of, run

pytestmark = NEEDS_GPU

PRODUCT = {"rows": 256, "columns": 384}
ALONE = pytest.mark.skipif(GPUS < 2, reason=f"ranks that share a GPU leave none of it to one another; {GPUS} here")


def overlap(size: int, exchange: dict[str, object]):
    return job(size, exchange=exchange) | {"workload": "overlap", "overlap": PRODUCT}


@pytest.mark.parametrize("backend", ["fused", "staged"])
def test_every_line_is_complete_and_verified(ranks, backend):
    lines = lines_of(ranks, overlap(RANKS, {"backend": backend}))
    assert [(line["op"], line["beside"]) for line in lines] == list(OPS)
    for line in lines:
        assert (line["verified"], line["samples"], line["graph"], line["l2"]) == (True, 2, False, "cold")
        assert (line["bytes_wire"] > 0) == (line["op"] in ("dispatch", "combine"))


@ALONE
def test_the_product_is_right_beside_an_exchange_of_some_sms(ranks):
    lines = lines_of(ranks, overlap(RANKS, {"backend": "fused", "sms": 16}))
    assert all(line["verified"] and line["sms"] <= 16 for line in lines)


def spoilt(world, given):
    """Rank 1's products go wrong after the first."""
    real = Product.error

    def wrong(self: Product) -> float:
        self.out[3, 5] += 100
        return real(self)

    Product.error = wrong if world.rank == 1 else real
    try:
        return run(world, given)
    finally:
        Product.error = real


def test_a_product_that_went_wrong_stops_every_rank(ranks):
    errors = ranks.outcomes(2, spoilt, overlap(2, {"backend": "fused"}))
    assert {type(error) for error in errors} == {WrongResult}
