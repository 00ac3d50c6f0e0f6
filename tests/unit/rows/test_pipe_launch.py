"""A process loads each kernel once, and every launch gets the parameters of its own call. No driver is needed."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.rows import row_launch, tile_counters
from raymoe.rows.norm_kernels import RmsNorm, RmsNormBackward
from raymoe.rows.pipe_shape import Limits
from raymoe.rows.row_launch import KernelCall
from tests.unit.rows.rows_driver import Counters, Enqueued, RowsDriver

NOW = Limits()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RowsDriver:
    return RowsDriver(monkeypatch)


def norm(rows: int) -> RmsNorm:
    return RmsNorm(torch.zeros(rows, 64), torch.zeros(64), torch.zeros(rows, 64))


def norm_call(rows: int, sms: int | None = None) -> KernelCall:
    return norm(rows).kernel_call(Limits(sms))


def test_each_launch_gets_the_parameters_of_its_call(driver: RowsDriver) -> None:
    first, second = norm(300), norm(300)
    for call in (first, second, first):
        call.launch()
        driver.stream += 1
    assert [each.field("inputs[0].at") for each in driver.enqueued] == [
        first.x.data_ptr(),
        second.x.data_ptr(),
        first.x.data_ptr(),
    ]
    assert [each.stream for each in driver.enqueued] == [5, 6, 7]
    assert len(driver.loaded) == 1


def test_a_kernel_has_one_launch_for_all_numbers_of_rows(driver: RowsDriver) -> None:
    x, weight, out = torch.zeros(3000, 1024), torch.zeros(1024), torch.zeros(3000, 1024)
    for rows in range(1, 3001):
        RmsNorm(x[:rows], weight, out[:rows]).launch()
    assert len(driver.enqueued) == 3000
    assert len(driver.device.launches) == len(driver.loaded) < 10
    assert len({each.blocks for each in driver.enqueued}) > 1000
    prepared = [len(kind.launches) for kind in driver.device._kinds.values()]
    assert len(prepared) == 1 and prepared[0] < 60


def test_memory_does_not_grow_with_numbers_of_rows(driver: RowsDriver) -> None:
    x, weight, out = torch.zeros(20_000, 64), torch.zeros(64), torch.zeros(20_000, 64)

    def run(counts: Sequence[int]) -> None:
        for rows in counts:
            RmsNorm(x[:rows], weight, out[:rows]).launch()
            driver.enqueued.clear()
        gc.collect()

    run([*range(1, 20_000, 97), 20_000])  # a row in each interval that has a launch
    tracemalloc.start()
    run(range(1, 20_001, 7))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 100_000


def test_prepared_launches_of_old_kinds_are_dropped(driver: RowsDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_launch, "MOST_KINDS", 4)
    call = norm(300)
    for eps in range(1, 21):
        call.eps = float(eps)
        call.launch()
    assert len(driver.device._kinds) == 4 and len(driver.loaded) == 1 and len(driver.enqueued) == 20
    call.eps = 1.0
    driver.capturing = True  # a kind that is prepared again loads nothing
    call.launch()
    assert len({each.params for each in driver.enqueued}) == 20


@pytest.mark.parametrize("order", [(64, 0), (0, 64)])
def test_only_sums_after_another_kernel_begin_early(driver: RowsDriver, order: tuple[int, int]) -> None:
    """A backward without rows is one kernel, which has nothing before it to overlap with."""

    def backward(rows: int) -> list[tuple[str, bool]]:
        x, weight = torch.zeros(rows, 64), torch.zeros(64)
        call = RmsNormBackward(x, x, weight, torch.zeros(rows, 64), torch.zeros(64))
        return [(each.source.stem, each.early) for each in driver.launches_of(lambda: call.launch())]

    found = {rows: [backward(rows), backward(rows)] for rows in order}
    assert found == {
        64: [[("rms_norm_backward", False), ("sum_partials", True)]] * 2,
        0: [[("sum_partials", False)]] * 2,
    }


def test_threads_that_share_a_launch_get_their_own_parameters(driver: RowsDriver) -> None:
    """The driver releases the interpreter's lock before it copies the parameters."""
    calls = [norm(300) for _ in range(8)]
    calls[0].launch()
    driver.enqueued.clear()
    driver.during_launch = lambda: threading.Event().wait(0.0005)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            list(pool.map(RmsNorm.launch, calls))
    written = [(each.field("inputs[0].at"), each.field("outputs[0].at")) for each in driver.enqueued]
    assert sorted(written) == sorted([(each.x.data_ptr(), each.out.data_ptr()) for each in calls] * 5)


def test_blocks_fill_the_gpu_or_the_sms_that_are_asked(driver: RowsDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    Counters(monkeypatch, driver)
    for _ in range(2):  # anew, and prepared
        for rows, sms in ((1000, None), (100_000, None), (100_000, 48), (300, 48)):
            norm(rows).launch(Limits(sms))
        # 1000 rows are 32 tiles of 32 rows, 300 are 10. On the whole GPU many rows go without a pipeline, 4 in a block.
        assert [each.blocks for each in driver.enqueued] == [32, 25_000, 48, 10]
        driver.enqueued.clear()


def test_a_first_call_inside_a_capture_is_refused(driver: RowsDriver) -> None:
    driver.capturing = True
    with pytest.raises(ConfigError, match="call it once before the capture"):
        norm(300).launch()
    driver.capturing = False
    norm(300).launch()
    driver.capturing = True
    norm(300).launch()
    norm(290).launch()
    assert len(driver.enqueued) == 3


def counters_of(driver: RowsDriver) -> Callable[..., list[int]]:
    """A function that launches on a stream, and gives the addresses of the counters."""
    call = norm(100_000)
    assert call.kernel_call(Limits(48)).dynamic

    def counters(stream: int, launches: int, captured: bool = False) -> list[int]:
        driver.capturing, driver.stream = captured, stream

        def launch() -> None:
            for _ in range(launches):
                call.launch(Limits(48))

        return [each.field("work.taken") for each in driver.launches_of(launch)]

    return counters


def test_launches_that_may_run_at_once_have_counters_of_their_own(
    driver: RowsDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, counters = Counters(monkeypatch, driver), counters_of(driver)
    assert counters(5, 2) == [0x1000, 0x1000], "the launches of a stream run one after the other"
    assert counters(6, 1) == [0x1020]
    assert counters(5, 3, captured=True) == [0x1040, 0x2000, 0x2020], "graphs of one stream may run at once"
    assert counters(5, 1) == [0x1000]
    with ThreadPoolExecutor(1) as pool:
        assert counters(2, 1) != pool.submit(counters, 2, 1).result(), "each thread has a stream of this number"
    own = counters(0, 1)
    driver.green, driver.context_ids = 0x77, {0x77: 7}
    green = counters(0, 1)
    assert green != own, "each green context has a stream of this number"
    driver.context_ids = {0x77: 8}
    assert counters(0, 1) not in (own, green), "a new green context can have the address of an old one"
    driver.green = 0
    assert counters(0, 1) == own
    zeroed = [each[1:3] for each in words.calls if each[0] == "cuMemsetD8Async"]
    assert zeroed == [(0x1000 * number, 0) for number in range(1, 5)] and words.mode == 0


def test_a_new_stream_with_the_number_of_an_old_one_has_a_counter_of_its_own(
    driver: RowsDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches of a destroyed stream may still run."""
    Counters(monkeypatch, driver)
    counters = counters_of(driver)
    old = counters(0x5000, 1)
    driver.generation = 1
    new = counters(0x5000, 2)
    assert new[0] == new[1] != old[0]
    for driver.generation in range(2, 50):
        counters(0x5000, 1)
    assert len(driver.device._counters._of_streams) == 1, "the host keeps one for each number"


def test_blocks_without_stages_and_few_rows_take_no_counter(
    driver: RowsDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_counters, "call", lambda *_: pytest.fail("counters were allocated"))
    for rows, sms in ((100_000, None), (1000, 48)):
        assert not norm_call(rows, sms).dynamic
        norm(rows).launch(Limits(sms))
    assert [each.field("work.taken") for each in driver.enqueued] == [0, 0]


def test_no_rows_are_no_launch_and_load_no_kernel(driver: RowsDriver) -> None:
    norm(0).launch()
    assert driver.enqueued == [] == driver.loaded


def test_a_call_as_it_is_runs_too(driver: RowsDriver) -> None:
    call = norm_call(300)
    driver.device.run(call, None)
    (found,) = driver.enqueued
    assert isinstance(found, Enqueued) and found.params == bytes(call.params.packed())
