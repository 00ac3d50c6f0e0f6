"""What nvidia-smi prints, read: the way left where no binding of NVML works."""

from __future__ import annotations

import csv
import re

_FIELDS = ("name", "uuid", "memory.total", "compute_cap", "mig.mode.current", "driver_version")
QUERY = (f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def machine_of(gpus: str, topology: str) -> dict[str, object]:
    """What `nvidia-smi` says to QUERY and to `topo -m`, in the form in which NVML's bindings tell it.

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
    found = []
    for index, (name, uuid, mebibytes, capability, mig, _) in enumerate(rows):
        links = [_links(word) for word in matrix[index]] if index < len(matrix) else []
        found.append(
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
    return {"driver": rows[0][-1], "gpus": found, "topology": matrix}


def matrix_of(printed: str) -> list[list[str]]:
    r"""The part of `nvidia-smi topo -m` that is about pairs of GPUs.

    >>> matrix_of("\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV18\tPIX\t0-47\nGPU1\tNV18\t X \tSYS\t0-47\n")
    [['X', 'NV18'], ['NV18', 'X']]
    """
    rows = [re.split(r"\t+", line.strip()) for line in _COLOUR.sub("", printed).splitlines()]
    rows = [[word.strip() for word in row] for row in rows if re.fullmatch(r"GPU\d+", row[0].strip()) and len(row) > 1]
    # The header's first cell is empty, so it begins with GPU0 too; its second cell is then GPU1 or a title.
    rows = [row for row in rows if any(word == "X" for word in row)]
    return [row[1 : len(rows) + 1] for row in rows]


def _links(word: str) -> int:
    return int(word[2:]) if re.fullmatch(r"NV\d+", word) else 0
