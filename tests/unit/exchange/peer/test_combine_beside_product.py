"""A combine that sends pieces of columns while the real product beside it stores others, on the emulator."""

from __future__ import annotations

import pytest
import torch

from raymoe.errors import DataRefused, PeerTimeout, RaymoeError
from raymoe.exchange.peer import column_pieces
from raymoe.moe.products import Product
from tests.emulator.beside import run_beside, steps_beside
from tests.emulator.build import Change, compiler
from tests.emulator.machine import EmulatorError

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")


@pytest.fixture(autouse=True)
def pieces_of_one_tile(monkeypatch):
    monkeypatch.setattr(column_pieces, "LEAST_TILES", 1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hidden": 768, "padding": "zero", "alignment": 8},
        {"ranks": 3, "tokens": 5, "topk": 3},
        {"ranks": 1},
        {"routings": ("one_expert", "masked", "uniform")},
        {"dtype": "float16", "hidden": 528},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_rows_return_summed_while_the_product_stores_others(seed, options):
    run_beside(seed, **options)


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_no_product_stores_in_pieces_are_awaited_whole(seed):
    """On some ranks and in some steps the combine does not know of pieces, also where the product stores some."""
    run_beside(seed, ("uniform",) * 3, told=lambda step, rank: ((step + rank) % 3 > 0, (step + rank) % 3 > 1))


@pytest.mark.parametrize("seed", range(3))
def test_a_product_that_does_not_come_is_named_and_the_ranks_give_up(seed):
    with steps_beside(seed, ("uniform",), timeout_s=2e-2) as steps:
        steps.lost = (0, 1)
        steps.enqueue(0)
        steps.emulator.run(seed)
        with pytest.raises(PeerTimeout, match="for the product of its own experts in combine") as late:
            steps.backends[1].check()
        assert (late.value.rank, late.value.peer) == (1, 1)
        with pytest.raises(PeerTimeout, match="for rank 1 in combine"):
            steps.backends[0].check()
        assert all(y.isnan().all() for y in steps.results[0])


@pytest.mark.parametrize("seed", range(3))
def test_a_refused_step_gives_nan_and_the_next_is_right(seed):
    def spoil(step, rank, batch):
        if (step, rank) == (0, 1):
            batch.ids[0, 0] = 99

    with steps_beside(seed, ("uniform",) * 2) as steps:
        steps.change = spoil
        steps.enqueue(0)
        steps.emulator.run(seed)
        for owner in steps.backends:
            with pytest.raises(DataRefused, match="rank 1"):
                owner.check()
        assert all(y.isnan().all() for y in steps.results[0])
        steps.enqueue(1)
        steps.emulator.run(seed + 100)
        steps.judge(1)


TELLING = """        if constexpr (TELLS) {
            tell_stored(product, memory, tile);
        }
"""
RECORD = "        if (tile.rows == 0) {\n            return;\n        }\n"
INJECTED_BUGS = {
    "no wait for a piece": Change(
        "combine.cuh",
        "wait_for_epoch(&p.stored->ready[piece], number, Waiting{p.op, p.peers.rank, number}, p.watch)",
        "number != 0",
    ),
    "a wait for the first piece only": Change("combine.cuh", "ready[piece]", "ready[0]"),
    "pieces of the first step are enough": Change(
        "combine.cuh", "number = ptx::load_8(&p.summary->number)", "number = 1"
    ),
    "a wait for one piece is one for all": Change("combine.cuh", "piece == known_", "known_ != ~0u"),
    "the other threads of the warp acquire nothing": Change(
        "combine.cuh",
        "__syncwarp();  // hands what was acquired to the other threads of the warp\n        known_",
        "known_",
    ),
    "the final reduction does not wait": Change(
        "final_reduction.cuh",
        "if (hits != 0 && begin < last && !stored_.await(p_, number % p_.pieces)) {",
        "if (false) {",
    ),
    "the local reduction does not wait": Change(
        "local_reduction.cuh", "if (!stored_.await(p_, number % p_.pieces)) {", "if (false) {"
    ),
    "rows that are told of nowhere are not awaited": Change(
        "combine.cu", "BESIDE_PRODUCT && p.stored == nullptr", "false"
    ),
    "a tile is counted by one warp for all": Change("multiplying.cuh", "tiles * MULTIPLYING_WARPS - 1", "tiles - 1"),
    "a count releases nothing": Change(
        "multiplying.cuh", "atomic_increment_wrapping(&p.pieces", "atomic_increment_wrapping_relaxed(&p.pieces"
    ),
    "a warp's other stores are not handed on": Change(
        "multiplying.cuh", "__syncwarp();  // hands the stores of the warp to the thread below", ""
    ),
    "a tile is told before it is stored": (
        Change("multiplying.cuh", TELLING, ""),
        Change("multiplying.cuh", RECORD, RECORD + TELLING),
    ),
    "a piece has the tiles of all pieces": Change("multiplying.cuh", "output_tiles(p, tile.piece)", "output_tiles(p)"),
    "the last piece has as many tiles as others": Change(
        "product.cuh", "min(p.piece_tiles, output_tiles(p) - piece * p.piece_tiles)", "p.piece_tiles"
    ),
    "an expert's search goes on in the next piece": Change(
        "loading.cuh", "piece == last.piece ? last.expert : 0", "last.expert"
    ),
}


@pytest.mark.parametrize("bug", INJECTED_BUGS)
def test_an_injected_bug_is_found(bug, monkeypatch):
    changes = INJECTED_BUGS[bug] if isinstance(INJECTED_BUGS[bug], tuple) else (INJECTED_BUGS[bug],)
    if "last piece" in bug:
        monkeypatch.setattr(column_pieces, "LEAST_TILES", 2)
    for seed in range(24):
        try:
            run_beside(seed, changes=changes, told=lambda _step, _rank: (True, "nowhere" not in bug))
        except (EmulatorError, AssertionError, RaymoeError):
            return
    pytest.fail("24 interleavings are all right with it")


@pytest.mark.parametrize("least", [1, 2, 4, 8])
def test_pieces_have_all_columns_and_each_has_some(least, monkeypatch):
    monkeypatch.setattr(column_pieces, "LEAST_TILES", least)
    for tiles in range(1, 200):
        columns = tiles * column_pieces.TILE_OUTPUTS
        pieces, of_each = column_pieces.pieces_of(columns), column_pieces.tiles_of_piece(columns)
        assert pieces <= column_pieces.MOST_PIECES and (pieces - 1) * of_each < tiles <= pieces * of_each


@pytest.mark.parametrize("seed", range(3))
def test_the_last_piece_may_be_smaller(seed, monkeypatch):
    monkeypatch.setattr(column_pieces, "LEAST_TILES", 2)
    run_beside(seed, hidden=784)


def test_all_that_a_product_reads_is_kept_until_its_combine_is_enqueued():
    """Its memory must not become the combine's results, which are written while the product reads."""
    made = {name: torch.empty(1) for name in ("x", "weight", "offsets", "counts", "y", "bias", "row_weights")}
    product = Product(**made)
    pieces = column_pieces.ColumnPieces(torch.zeros(column_pieces.WORDS), 0, 1, piece_tiles=1, sms=8)
    with column_pieces.telling(pieces):
        y = torch.empty(1, 1, dtype=torch.bfloat16)
        assert column_pieces.pieces_to_tell(y, product.reads) is pieces
    assert {id(each) for each in pieces.reads} == {id(each) for name, each in made.items() if name != "y"}
