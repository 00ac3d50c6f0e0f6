"""Becoming a Ray driver: of a cluster that somebody runs, or of a Ray of our own."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from raymoe.errors import ClusterError
from raymoe.gang.address import reachable
from raymoe.gang.messages import Bounded

CONNECT_S = 20.0  # reaching a cluster that exists, once its port has answered
START_S = 90.0  # starting a Ray of our own; 5 s on an idle machine
OBJECT_STORE_BYTES = 100 * 2**20  # descriptors and result lines are all that goes through it


@dataclass(frozen=True)
class Cluster:
    """Where to run. `address` None: a Ray of our own with at least `cpus` CPUs."""

    address: str | None
    cpus: int

    def bound(self) -> Bounded:
        """How long `connect` may take, and what to say past that: it can hang in C++, out of reach of any signal."""
        if self.address is None:
            logs = "see /tmp/ray/session_latest/logs"
            return Bounded(START_S, 3, f"asked for a Ray of our own, and it was not up after {START_S:g} s; {logs}")
        asked = f"asked for the Ray cluster at {self.address}, and was not let in within {CONNECT_S:g} s"
        return Bounded(CONNECT_S, 3, f"{asked}; is a Ray head of this Ray's version there?{_hint()}")

    def connect(self) -> None:
        """Be this process's Ray driver from here on."""
        handler = signal.getsignal(signal.SIGTERM)  # ray.init puts its own in this place
        options: dict[str, Any] = {
            "namespace": "raymoe",
            "logging_level": "error",
            "log_to_driver": False,  # ranks answer in values; their files are under `ray logs`
        }
        try:
            if self.address is None:
                ray.init(
                    address="local",
                    num_cpus=self.cpus,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    **options,
                )
            else:
                ray.init(address=reachable(self.address), **options)
        except ClusterError:
            raise
        except (RuntimeError, OSError, ValueError, RayError) as error:
            where = f"the Ray cluster at {self.address}{_hint()}" if self.address else "a Ray of our own"
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ClusterError(f"asked for {where}, and ray.init said: {reason}") from error
        finally:
            signal.signal(signal.SIGTERM, handler)


def _hint() -> str:
    """The way out of the one refusal that Ray does not name: a head that asks for a token, a client that sends none."""
    token = Path.home() / ".ray" / "auth_token"
    if "RAY_AUTH_MODE" in os.environ or not token.exists():
        return ""
    return f" (there is a token in {token}: if that cluster asks for one, set RAY_AUTH_MODE=token)"
