"""The program of a child of the doctor: run one probe by its name, and send its values back as lines of JSON."""

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
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # if the doctor is killed, this process ends too
    os.set_inheritable(fd, False)

    def send(**message: object) -> None:
        os.write(fd, (json.dumps(message) + "\n").encode())

    try:
        send(values=PROBES[name](lambda activity: send(doing=activity)))
    except Exception as error:  # noqa: BLE001  (every error of a probe is its outcome)
        send(trouble=one_line(error))


def one_line(error: BaseException) -> str:
    """
    >>> one_line(ModuleNotFoundError("No module named 'ray'"))
    "ModuleNotFoundError: No module named 'ray'"
    """
    from raymoe.errors import RaymoeError

    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text if isinstance(error, RaymoeError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")
