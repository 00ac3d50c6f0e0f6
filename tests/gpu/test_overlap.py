"""Test workload overlap on GPU ranks: complete lines, exchange and product both right. No test is about speed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from raymoe.errors import WrongResult
from raymoe.workload.overlap.run_overlap import OPS, Product
from tests.gpu.ranks import GPUS, NEEDS_GPU
from tests.gpu.test_exchange_workload import RANKS, job, lines_of, run

pytestmark = NEEDS_GPU

PRODUCT = {"rows": 256, "columns": 384}
TWO_GPUS = pytest.mark.skipif(GPUS < 2, reason=f"ranks that share a GPU leave no SM of it to others; {GPUS} here")


def overlap(size: int, exchange: dict[str, object]):
    return job(size, exchange=exchange) | {"workload": "overlap", "overlap": PRODUCT}


@pytest.mark.parametrize("backend", ["fused", "staged"])
def test_every_line_is_complete_and_verified(ranks, backend):
    lines = lines_of(ranks, overlap(RANKS, {"backend": backend}))
    assert [(line["op"], line["beside"]) for line in lines] == list(OPS)
    for line in lines:
        assert (line["verified"], line["samples"], line["graph"], line["l2"]) == (True, 2, False, "cold")
        assert (line["bytes_wire"] > 0) == (line["op"] in ("dispatch", "combine"))


@TWO_GPUS
def test_the_product_is_right_beside_an_exchange_of_some_sms(ranks):
    lines = lines_of(ranks, overlap(RANKS, {"backend": "fused", "sms": 16}))
    assert all(line["verified"] and line["sms"] <= 16 for line in lines)


def run_with_wrong_product(world, given):
    """Run a job in which rank 1's products are wrong, except the first."""
    real = Product.error

    def error_of_spoilt_product(self: Product) -> float:
        self.out[3, 5] += 100
        return real(self)

    Product.error = error_of_spoilt_product if world.rank == 1 else real
    try:
        return run(world, given)
    finally:
        Product.error = real


def test_a_wrong_product_stops_every_rank(ranks):
    errors = ranks.outcomes(2, run_with_wrong_product, overlap(2, {"backend": "fused"}))
    assert {type(error) for error in errors} == {WrongResult}
