"""NVRTC, the run-time compiler: compile a kernel, and keep nothing."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from raymoe.doctor.finding import Finding, Machine, fail, gpus_of, no_driver, ok, warn

ARCH = "sm_90a"


def probe(doing: Callable[[str], None]) -> dict[str, object]:
    """Return NVRTC's version, the architectures that it knows, and the time to compile the copy kernel."""
    doing("loading NVRTC")
    from raymoe.cuda.jit import Compiler, Cubins, nvrtc_version
    from raymoe.transport.copy_kernel import COPY

    version = nvrtc_version()
    from cuda.bindings import nvrtc

    code, known = nvrtc.nvrtcGetSupportedArchs()
    doing(f"compiling kernels/{COPY.path}.cu for {ARCH}")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        compiled = Compiler(cubins=Cubins(Path(folder))).compiled(COPY, ARCH)
        seconds = time.perf_counter() - began
    known = list(known) if int(code) == 0 else None
    return {
        "version": list(version),
        "seconds": seconds,
        "bytes": len(compiled.cubin),
        "kernel": COPY.stem,
        "known": known,
    }


def judge_nvrtc(machine: Machine) -> Finding:
    name = "NVRTC"
    outcome = machine.probes["nvrtc"]
    if outcome.trouble:
        if no_driver(machine):
            return warn(name, f"no: {outcome.trouble}", "CPU ranks do not need it")
        way_out = "pip install 'cuda-python>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'; no other NVRTC in LD_LIBRARY_PATH"
        return fail(name, f"no: {outcome.trouble}", way_out)
    values = outcome.values
    version = ".".join(map(str, values["version"]))
    known = values["known"]
    for gpu in gpus_of(machine):
        number = int("".join(map(str, gpu["capability"])))
        if known is not None and number not in known:
            found = f"{version} does not know sm_{number} of {gpu['name']}; it knows sm_{min(known)} to sm_{max(known)}"
            return fail(name, found, "pip install -U nvidia-cuda-nvrtc")
    return ok(name, f"{version}; compiled the {values['kernel']} kernel for {ARCH} in {values['seconds']:.1f} s")
