"""Where a child of the doctor begins: one probe by its name, whose values go back as lines of JSON."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Callable

from raymoe.doctor import cuda, host, ipc, local_ray, nvml, nvrtc, tensors

Doing = Callable[[str], None]
Probe = Callable[[Doing], dict[str, object]]

PROBES: dict[str, Probe] = {
    "host": host.probe,
    "nvml": nvml.probe,
    "cuda": cuda.probe,
    "ipc": ipc.probe,
    "nvrtc": nvrtc.probe,
    "torch": tensors.probe,
    "ray": local_ray.probe,
}
_PR_SET_PDEATHSIG = 1


def main(name: str, fd: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should the doctor be killed, this ends too
    os.set_inheritable(fd, False)

    def send(**message: object) -> None:
        os.write(fd, (json.dumps(message) + "\n").encode())

    try:
        send(told=PROBES[name](lambda what: send(doing=what)))
    except Exception as error:  # noqa: BLE001  (whatever a probe meets is what it has to tell)
        send(trouble=sentence(error))


def sentence(error: BaseException) -> str:
    """
    >>> sentence(ModuleNotFoundError("No module named 'ray'"))
    "ModuleNotFoundError: No module named 'ray'"
    """
    from raymoe.errors import RaymoeError

    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return said if isinstance(error, RaymoeError) and said else f"{type(error).__name__}: {said}".removesuffix(": ")
