"""The probe of NVML: by one of its bindings, else in what nvidia-smi prints."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from raymoe.device.nvml import WAYS, Library
from raymoe.doctor.smi import QUERY, machine_of

_SMI_S = 20.0


def probe(doing: Callable[[str], None]) -> dict[str, object]:
    """`source`, `driver`, `gpus` and `topology` (rows of NV18, PIX, …); or `missing`, with each way's reason."""
    reasons = []
    for way in WAYS:
        doing(f"asking {way.module}")
        try:
            library = Library(way)
        except (ImportError, AttributeError) as error:
            reasons.append(f"{way.module}: {error}")
            continue
        try:
            return {"source": way.module, **library.machine(), "host_gpus": _host_gpus()}
        except (library.error, AttributeError, RuntimeError) as error:  # RuntimeError: there is no libnvidia-ml
            reasons.append(f"{way.module}: {error}")
    doing("asking nvidia-smi")
    try:
        gpus, topology = _smi(*QUERY), _smi("topo", "-m")
        return {"source": "nvidia-smi", **machine_of(gpus, topology), "host_gpus": _host_gpus()}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reasons.append(f"nvidia-smi: {error}")
    return {"missing": "; ".join(reasons)}


def _smi(*arguments: str) -> str:
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SMI_S, check=False)
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise ValueError(f"ended with code {done.returncode}{f' ({last[0]})' if last else ''}")
    return done.stdout


def _host_gpus() -> int | None:
    """GPUs of the driver, those included that a device cgroup or a container's runtime keeps from us where it tells."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else None
