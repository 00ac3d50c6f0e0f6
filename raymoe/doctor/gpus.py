"""The driver, the GPUs, the links between them, and whether they have TMA."""

from __future__ import annotations

from collections import Counter
from typing import Any

from raymoe.doctor.finding import (
    CUDA_NEEDED,
    NO_DRIVER,
    Finding,
    Machine,
    count,
    cuda_version,
    fail,
    gpus_of,
    no_driver,
    nothing_to_check,
    ok,
    too_old,
    warn,
)

INSTALL = "install NVIDIA driver 580 or newer"
# CUDA's errors at its start, and what to do.
START_ERRORS = {
    802: "the NVSwitch fabric is not up: start the service nvidia-fabricmanager in the driver's version",
    803: "libcuda does not match the loaded driver: reboot after an update, or correct LD_LIBRARY_PATH",
    804: "libcuda is from a cuda-compat package that this GPU does not support: remove it from LD_LIBRARY_PATH",
    46: "another process has exclusive use of the GPU: end it, or run `nvidia-smi -c DEFAULT`",
    2: "the GPU's memory is full: nvidia-smi lists the processes that use it",
}
GBPS_PER_LINK = {1: 20, 2: 25, 3: 25, 4: 25, 5: 50}
"""GB/s per direction, by NVLink version: 18 links of NVLink 4 have 450 GB/s."""


def judge_driver(machine: Machine) -> Finding:
    name = "driver"
    nvml, cuda = machine.probes["nvml"], machine.probes["cuda"]
    if no_driver(machine):
        on_bus = machine.probes["host"].values.get("nvidia_on_pci", 0)
        if on_bus:
            state = f"{NO_DRIVER}, and {count(on_bus, 'NVIDIA device')} on the PCI bus"
            return warn(name, state, f"{INSTALL}; a container needs `--gpus all` and the NVIDIA container toolkit")
        return ok(name, f"{NO_DRIVER}; CPU ranks need none")
    version = cuda_version(machine)
    driver = nvml.values.get("driver")
    state = f"{driver or 'of unknown version'}{'' if version is None else f', CUDA {version[0]}.{version[1]}'}"
    source = f"NVML by {nvml.values['source']}" if "source" in nvml.values else f"no NVML: {_reason(nvml)}"
    state += f" ({source})"
    if too_old(machine):
        needed = ".".join(map(str, CUDA_NEEDED))
        way_out = f"{INSTALL}, or the package cuda-compat-13-0 on a data-centre GPU"
        return fail(name, f"{state}, too old for kernels of CUDA {needed}", way_out)
    if "missing" in cuda.values:
        return fail(
            name,
            f"{state}; {cuda.values['missing']}",
            "a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility; elsewhere install the driver's libcuda.so.1",
        )
    trouble = cuda.trouble or cuda.values.get("error")
    if trouble:
        unknown = "`nvidia-smi` and `dmesg | grep -i nvrm` may show why; reboot"
        way_out = START_ERRORS.get(cuda.values.get("code", 0), unknown)
        return fail(name, f"{state}; CUDA does not start: {trouble}", way_out)
    if "source" not in nvml.values:
        return warn(name, state, "CUDA works, but without NVML the links between GPUs are unknown")
    return ok(name, state)


def _reason(outcome: Any) -> str:
    return str(outcome.trouble or outcome.values.get("missing") or "it returned nothing")


def judge_gpus(machine: Machine) -> Finding:
    name = "GPUs"
    if no_driver(machine):
        return ok(name, NO_DRIVER)
    installed: list[Any] = machine.probes["nvml"].values.get("gpus", [])
    visible = gpus_of(machine)
    if installed and not visible and (not machine.probes["cuda"].trouble and not too_old(machine)):
        setting = machine.probes["host"].values.get("visible")
        why = "" if setting is None else f" (CUDA_VISIBLE_DEVICES={setting!r})"
        return warn(name, f"{_describe(installed)}; none is visible to CUDA{why}", "unset CUDA_VISIBLE_DEVICES")
    if finding := nothing_to_check(machine, name):
        return finding if not installed else Finding(finding.level, name, f"{_describe(installed)}; {finding.state}")
    all_visible = len(installed) == len(visible)
    state = _describe(installed) if all_visible else f"{_describe(visible)}, of {len(installed)} on this machine"
    hidden = int(machine.probes["nvml"].values.get("host_gpus") or 0) - len(installed)
    if installed and hidden > 0:
        state += f"; {hidden} more of this host {'is' if hidden == 1 else 'are'} hidden by a device cgroup"
    return ok(name, state)


def _describe(gpus: Any) -> str:
    """
    >>> _describe([{"name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 150754820096}] * 4)
    '4 × NVIDIA H200 (sm_90, 140 GiB)'
    """
    kinds = Counter((gpu["name"], _details(gpu)) for gpu in gpus)
    return ", ".join(f"{number} × {name}{details}" for (name, details), number in kinds.items())


def _details(gpu: Any) -> str:
    details = []
    if gpu.get("capability"):
        details.append("sm_" + "".join(map(str, gpu["capability"])))
    if gpu.get("memory_bytes"):
        details.append(f"{gpu['memory_bytes'] / 2**30:.0f} GiB")
    if gpu.get("mig"):
        details.append("MIG on")
    return f" ({', '.join(details)})" if details else ""


def judge_nvlink(machine: Machine) -> Finding:
    name = "NVLink"
    if no_driver(machine):
        return ok(name, NO_DRIVER)
    values = machine.probes["nvml"].values
    if "topology" not in values:
        return warn(name, f"unknown, since NVML does not answer: {_reason(machine.probes['nvml'])}", "see driver")
    rows: list[list[str]] = values["topology"]
    words = Counter(word for gpu, row in enumerate(rows) for other, word in enumerate(row) if other > gpu)
    if not words:
        return ok(name, f"one GPU{_links(values['gpus'])}, so there is no peer")
    slow = {word: number for word, number in words.items() if not word.startswith("NV")}
    if not slow and len(words) == 1:
        (word,) = words
        return ok(name, f"{word} between every two of {len(rows)} GPUs{_speed(values['gpus'], word)}")
    state = ", ".join(f"{word} between {count(number, 'pair')}" for word, number in sorted(words.items()))
    if not slow:
        return ok(name, state)
    way_out = "pairs without NVLink use PCIe, at a tenth of its speed; select other GPUs with CUDA_VISIBLE_DEVICES"
    return warn(name, state, way_out)


def _links(gpus: Any) -> str:
    return f" with {count(gpus[0]['links'], 'link')}" if gpus and gpus[0].get("links") else ""


def _speed(gpus: Any, word: str) -> str:
    """
    >>> _speed([{"nvlink": 4, "capability": [9, 0]}], "NV18")
    ', 18 links of NVLink 4, 450 GB/s a direction'
    """
    versions = {gpu.get("nvlink") for gpu in gpus}
    version = versions.pop() if len(versions) == 1 else None
    if version not in GBPS_PER_LINK:
        return ""
    links = int(word.removeprefix("NV"))
    return f", {count(links, 'link')} of NVLink {version}, {links * GBPS_PER_LINK[version]} GB/s a direction"


def judge_tma(machine: Machine) -> Finding:
    name = "TMA"
    if finding := nothing_to_check(machine, name):
        return finding
    gpus = gpus_of(machine)
    without = [index for index, gpu in enumerate(gpus) if tuple(gpu["capability"]) < (9, 0)]
    if not without:
        return ok(name, f"sm_90 or newer, on {count(len(gpus), 'GPU')}")
    first = gpus[without[0]]
    state = f"GPU {', '.join(map(str, without))} cannot: {first['name']} is sm_{''.join(map(str, first['capability']))}"
    return warn(name, state, "use the transports copy_engine and collective there; the tma kernels need sm_90 or newer")
