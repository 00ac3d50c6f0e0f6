"""The probe of NVML: by one of its Python bindings, else by nvidia-smi."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from raymoe.cuda.nvml import BINDINGS, Library

# Reading nvidia-smi's output, where no binding of NVML works.

_FIELDS = ("name", "uuid", "memory.total", "compute_cap", "mig.mode.current", "driver_version")
QUERY = (f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def machine_of(gpus: str, topology: str) -> dict[str, object]:
    """Convert what `nvidia-smi` prints for QUERY and for `topo -m` into the values that NVML's bindings give.

    >>> machine_of("NVIDIA H200, GPU-1, 143771, 9.0, Disabled, 580.95.05", "")["driver"]
    '580.95.05'
    """
    rows = [row for row in csv.reader(gpus.splitlines(), skipinitialspace=True) if row]
    wrong = next((row for row in rows if len(row) != len(_FIELDS)), None)
    if wrong is not None:
        raise ValueError(f"it printed {', '.join(wrong)!r}, which is not {len(_FIELDS)} values")
    if not rows:
        raise ValueError("it printed no GPU")
    matrix = matrix_of(topology)
    described = []
    for index, (name, uuid, mebibytes, capability, mig, _) in enumerate(rows):
        links = [_links(word) for word in matrix[index]] if index < len(matrix) else []
        described.append(
            {
                "name": name,
                "uuid": uuid,
                "memory_bytes": int(mebibytes) * 2**20 if mebibytes.isdigit() else 0,
                "capability": [int(part) for part in capability.split(".")] if "." in capability else None,
                "mig": mig == "Enabled",
                "links": max(links, default=0),
                "nvlink": None,
            }
        )
    return {"driver": rows[0][-1], "gpus": described, "topology": matrix}


def matrix_of(printed: str) -> list[list[str]]:
    r"""Return the rows and columns of `nvidia-smi topo -m` that are GPUs.

    >>> matrix_of("\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV18\tPIX\t0-47\nGPU1\tNV18\t X \tSYS\t0-47\n")
    [['X', 'NV18'], ['NV18', 'X']]
    """
    rows = [re.split(r"\t+", line.strip()) for line in _COLOUR.sub("", printed).splitlines()]
    rows = [[word.strip() for word in row] for row in rows if re.fullmatch(r"GPU\d+", row[0].strip()) and len(row) > 1]
    # The stripped header begins with GPU0 too, since its first cell is empty. It is the one row without an X.
    rows = [row for row in rows if any(word == "X" for word in row)]
    return [row[1 : len(rows) + 1] for row in rows]


def _links(word: str) -> int:
    return int(word[2:]) if re.fullmatch(r"NV\d+", word) else 0


_SMI_S = 20.0


def probe(doing: Callable[[str], None]) -> dict[str, object]:
    """Return `source`, `driver`, `gpus` and `topology` (rows of NV18, PIX, …); or `missing`, with all reasons."""
    reasons = []
    for way in BINDINGS:
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
    """Count the driver's GPUs in /proc, also those that a device cgroup or the container runtime hides from CUDA."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else None
