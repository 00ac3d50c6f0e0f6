"""Make this process a Ray driver, on an existing cluster or on a local Ray."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import ray

from raymoe.errors import ClusterError, printable
from raymoe.gang import local_ray
from raymoe.gang.address import reachable
from raymoe.gang.messages import Bounded
from raymoe.home import home

CONNECT_S = 20.0  # to connect to an existing cluster, after its port has answered
START_S = 90.0  # to start a local Ray, which takes 5 s on an idle machine
OBJECT_STORE_BYTES = 100 * 2**20  # it carries only descriptors and result lines


@dataclass(frozen=True)
class Cluster:
    """The Ray to run on. If `address` is None: a local Ray with `cpus` CPUs."""

    address: str | None
    cpus: int

    def bound(self) -> Bounded:
        """Return the time limit of `connect` and its message. `ray.init` can hang in C++, where no signal ends it."""
        if self.address is None:
            logs = f"see {local_ray.temporary_directory()}/session_latest/logs"
            return Bounded(START_S, 3, f"asked for a local Ray, and it was not up after {START_S:g} s; {logs}")
        late = f"asked for the Ray cluster at {self.address}, and ray.init did not connect within {CONNECT_S:g} s"
        return Bounded(CONNECT_S, 3, f"{late}; check that a head of Ray {ray.__version__} runs there{_token_hint()}")

    def connect(self) -> None:
        """Call `ray.init`; keep the SIGTERM handler that this process had."""
        handler = signal.getsignal(signal.SIGTERM)  # ray.init replaces it
        options: dict[str, Any] = {
            "namespace": "raymoe",
            "logging_level": "error",
            "log_to_driver": False,  # ranks return their results; `ray logs` has what they print
        }
        _describe_command()
        try:
            if self.address is None:
                local_ray.check_machine()
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
        except Exception as error:  # Ray raises Exception itself where its processes do not come up
            where = f"the Ray cluster at {self.address}{_token_hint()}" if self.address else "a local Ray"
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ClusterError(f"asked for {where}, and ray.init failed: {reason}") from error
        finally:
            signal.signal(signal.SIGTERM, handler)


def _describe_command() -> None:
    """Give Ray the command line of this driver with escapes, where it is no UTF-8: `ray.init` then fails to send it.

    A name may hold any bytes, and an ASCII locale makes any other letter such bytes.
    """
    try:
        "".join(sys.argv).encode()
    except UnicodeEncodeError:
        command = " ".join(map(printable, sys.argv))
        utils: Any = ray._private.utils  # no public name; Ray 2.60 calls it in ray.init
        utils.get_entrypoint_name = lambda: command


def _token_hint() -> str:
    """Explain a refusal that Ray does not explain: the head asks for a token, and this process sends none."""
    if "RAY_AUTH_MODE" in os.environ or (folder := home()) is None:
        return ""
    token = folder / ".ray" / "auth_token"
    if not token.exists():
        return ""
    return f" (if that cluster asks for a token, set RAY_AUTH_MODE=token to send the one in {token})"
