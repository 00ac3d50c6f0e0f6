"""The comparison with transformers' own expert parallelism (tests/perf) on two CPU ranks: the outputs are the same."""

from __future__ import annotations

from pathlib import Path

from tests.perf.transformers_block import Sizes, measure
from tests.unit.ranks import RankPool


def test_the_layer_and_the_block_of_transformers_agree(pool: RankPool, tmp_path: Path) -> None:
    sizes = Sizes(tokens=7, hidden=32, ffn=16, experts=8, topk=3, groups=4, topk_groups=2)
    found = pool.run(2, measure, str(tmp_path / "store"), sizes, 2)
    assert found[0] == found[1], "the slowest rank's times"
    assert found[0].pop("error") < 1e-5
    assert list(found[0]) == ["layer", "layer_products", "block", "block_products"]
    assert all(us > 0 for us in found[0].values())
