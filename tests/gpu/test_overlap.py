"""Workload overlap on GPU ranks: complete lines, exchange and product both right. Nothing here is about speed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from raymoe.errors import ConfigError, WrongResult
from raymoe.workload.overlap.run import OPS, Product
from tests.gpu.ranks import GPUS, NEEDS_GPU
from tests.gpu.test_exchange_workload import RANKS, job, lines_of, run

pytestmark = NEEDS_GPU

PRODUCT = {"rows": 256, "columns": 384}
ALONE = pytest.mark.skipif(GPUS < 2, reason=f"ranks that share a GPU leave none of it to one another; {GPUS} here")


def overlap(size: int, exchange: dict[str, object], **asked: object):
    return job(size, exchange=exchange) | {"workload": "overlap", "overlap": {**PRODUCT, **asked}}


@pytest.mark.parametrize("form", ["whole", "halves"])
@pytest.mark.parametrize("backend", ["fused", "staged"])
def test_every_line_is_complete_and_verified(ranks, backend, form):
    lines = lines_of(ranks, overlap(RANKS, {"backend": backend}, form=form))
    assert [(line["op"], line["beside"]) for line in lines] == list(OPS)
    for line in lines:
        assert (line["verified"], line["samples"], line["graph"], line["l2"]) == (True, 2, False, "cold")
        assert (line["bytes_wire"] > 0) == (line["op"] in ("dispatch", "combine"))


@ALONE
@pytest.mark.parametrize("keep_off", ["priority", "carveout", "green_context"])
def test_the_product_is_right_however_it_is_kept_off(ranks, keep_off):
    lines = lines_of(ranks, overlap(RANKS, {"backend": "fused", "sms": 16}, keep_off=keep_off))
    assert all(line["verified"] and line["sms"] <= 16 for line in lines)


def test_a_product_that_is_left_nothing_is_refused(ranks):
    for error in ranks.outcomes(2, run, overlap(2, {"backend": "fused", "sms": 1024}, keep_off="carveout")):
        assert isinstance(error, ConfigError) and "are left to a product" in str(error)


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
