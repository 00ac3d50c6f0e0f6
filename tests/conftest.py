"""Clear Ray's environment variables, set the hypothesis profile, and check that no test leaves a process behind."""

import gc
import os
import signal
import time
import uuid
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.short_folder import name_one_for_ray

MARK = "RAYMOE_TEST_SESSION"
GRACE_S = 10.0

# Idle threads of torch would spin on CPUs that other processes of a test need. Torch reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Those of NumPy's products spin too, in every process that a test starts.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Tests start some hundred processes. Each would compile raymoe's sources where no bytecode may be kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# torch.compile starts processes that live until the interpreter ends, which looks like something left behind.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

name_one_for_ray()  # before Ray or raymoe is imported

# An example has no deadline, because the machine may be shared. CI runs the same examples every time.
settings.register_profile(
    "raymoe", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("raymoe")


def pytest_sessionstart() -> None:
    """Let SIGTERM, by which `make unit` stops its parts, end what tests have started, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave cases of a test with the mark one_in to `make test-all`.

    A value of a parameter has a number, from 0 in the order of the test's list. `make test` runs a case if n divides
    the sum of its numbers. Where parameters are crossed, it runs each value of one if another one has n values. A case
    that the command line names is the only one, so it has the sum 0.
    """
    numbers: defaultdict[tuple[object, int], dict[str, int]] = defaultdict(dict)
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            total = 0
            for place, value in enumerate(item.callspec._idlist):  # type: ignore[attr-defined] # its name in each list
                known = numbers[item.function, place]  # type: ignore[attr-defined]
                total += known.setdefault(value, len(known))
            if total % mark.args[0]:
                item.add_marker("thorough")


def pytest_collection_finish() -> None:
    """Leave all that was imported out of later garbage collections: it lives until the end."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind():
    """Fail the session if a process that the tests started, directly or not, is alive at its end.

    A variable in their environment marks these processes. Orphaned children inherit it too.
    """
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_AUTH_MODE"):
        os.environ.pop(name, None)
    mark = f"{MARK}={uuid.uuid4().hex}"
    os.environ[MARK] = mark.partition("=")[2]
    yield
    deadline = time.monotonic() + GRACE_S
    while (left := _processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "tests left processes behind (now killed): " + "; ".join(
        f"{pid} {line}" for pid, line in left.items()
    )


def _processes_with(mark: str) -> dict[int, str]:
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            environment = (directory / "environ").read_bytes().split(b"\0")
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended, or belongs to another user
        # Python's resource tracker and this process's fork server serve multiprocessing until this process ends.
        serves = "resource_tracker" in command or ("forkserver" in command and parent == os.getpid())
        if mark.encode() in environment and int(directory.name) != os.getpid() and not serves:
            found[int(directory.name)] = command[:200]
    return found
