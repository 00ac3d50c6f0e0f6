"""How much memory a job needs: counted before anything starts, and refused with numbers where it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymoe.exchange.slots import slots_layout
from raymoe.job import load_job
from raymoe.job.errors import PlacementError
from raymoe.workload.room import available_memory, bytes_per_rank, check_room, spec_of


def test_the_largest_case_counts() -> None:
    small = bytes_per_rank(load_job("host_exchange"))
    large = bytes_per_rank(load_job("host_exchange", ["shape.tokens=4096"]))
    both = bytes_per_rank(load_job("host_exchange", ["matrix={shape.tokens: [512, 4096]}"]))
    assert both == large > 4 * small - 2**30


def test_the_heap_is_in_it_and_a_layer_holds_its_experts_too() -> None:
    job = load_job("quickstart")
    exchange = bytes_per_rank(load_job("host_exchange"))
    assert exchange > slots_layout(spec_of(job), 4).nbytes
    assert bytes_per_rank(job) - exchange == 8 * 3 * 1024 * 512 * 4


def test_a_job_that_fits_passes_and_one_that_does_not_says_both_numbers() -> None:
    job = load_job("quickstart")
    check_room(4, bytes_per_rank(job), available=4 * bytes_per_rank(job))
    with pytest.raises(PlacementError, match=r"4 ranks of 0\.4 GiB each, and this machine has 1\.0 GiB") as caught:
        check_room(4, bytes_per_rank(job), available=2**30)
    assert caught.value.exit_code == 3


def test_this_machine_has_some_memory_and_not_more_than_it_has() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert 2**20 < available_memory() <= int(total.split()[1]) * 1024
