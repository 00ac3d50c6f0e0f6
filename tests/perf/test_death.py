"""How soon the supervisor knows that a rank is dead."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import ray

from raymoe.config import load_job
from raymoe.gang import supervisor as sv
from raymoe.gang.driver import Driver, RunOrder
from raymoe.gang.messages import Message, Progressed
from tests.gang import configs
from tests.gang.conftest import ray_head

pytestmark = pytest.mark.perf

DEATHS = 4
MOST_S = 1.0
VICTIM = 1


class Watching(Driver):
    """A driver of which one rank is killed in each generation, and which takes down when it hears of it."""

    killed: list[float]
    noticed: list[float]

    def kill_one(self, news: Message) -> None:
        """What the main process would hear; the first progress of a generation is when its rank is killed."""
        if isinstance(news, Progressed) and self.gang is not None and len(self.killed) == self.state.generation:
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
        order = RunOrder(load_job(config), "deaths", head.address)
        driver = Watching(order, lambda news: driver.kill_one(news), lambda: None)
        driver.killed, driver.noticed = [], []
        try:
            outcome = driver.run()
        finally:
            ray.shutdown()
    took = [heard - began for began, heard in zip(driver.killed, driver.noticed, strict=True)]
    print(f"a death is noticed after {', '.join(f'{each:.3f}' for each in took)} s")
    assert (outcome.exit_code, outcome.culprit, len(took)) == (4, VICTIM, DEATHS)
    assert max(took) < MOST_S
