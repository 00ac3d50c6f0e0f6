"""Measure how soon the supervisor notices that a rank is dead."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import ray

from raymoe.config import load_job
from raymoe.gang import supervisor as sv
from raymoe.gang.driver import Driver, DriverSettings
from raymoe.gang.messages import Message, Progressed
from tests.gang import configs
from tests.gang.conftest import ray_head

pytestmark = pytest.mark.perf

DEATHS = 4
MAX_DELAY_S = 1.0
VICTIM = 1


class KillingDriver(Driver):
    """A driver that kills one rank in each generation, and records when it notices each death."""

    killed: list[float]
    noticed: list[float]

    def kill_one(self, message: Message) -> None:
        """Take a message in place of the main process; kill the rank at the first progress of a generation."""
        if isinstance(message, Progressed) and self.gang is not None and len(self.killed) == self.state.generation:
            os.kill(self.gang.locations[VICTIM].process[0], signal.SIGKILL)
            self.killed.append(time.monotonic())

    def _on(self, event: sv.Event) -> None:
        if isinstance(event, sv.Lost) and event.rank == VICTIM and len(self.noticed) < len(self.killed):
            self.noticed.append(time.monotonic())
        super()._on(event)


@pytest.mark.timeout(200)
def test_a_death_is_noticed_within_a_second(tmp_path: Path) -> None:
    config = configs.write(tmp_path, world__restarts=DEATHS - 1, world__wait_timeout_s=20, steps__count=configs.LONG)
    with ray_head(tmp_path, env={"HOME": str(tmp_path)}) as head:
        order = DriverSettings(load_job(config), "deaths", head.address)
        driver = KillingDriver(order, lambda message: driver.kill_one(message), lambda: None)
        driver.killed, driver.noticed = [], []
        try:
            outcome = driver.run()
        finally:
            ray.shutdown()
    delays = [noticed_at - killed_at for killed_at, noticed_at in zip(driver.killed, driver.noticed, strict=True)]
    print(f"a death is noticed after {', '.join(f'{delay:.3f}' for delay in delays)} s")
    assert (outcome.exit_code, outcome.culprit, len(delays)) == (4, VICTIM, DEATHS)
    assert max(delays) < MAX_DELAY_S
