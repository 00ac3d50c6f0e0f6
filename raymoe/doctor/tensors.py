"""torch: check that it loads, and that its build fits the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Callable

from raymoe.doctor.finding import EVERY_RANK, Finding, Machine, fail, gpus_of, ok, warn


def probe(doing: Callable[[str], None]) -> dict[str, object]:
    doing("importing torch")
    import torch

    doing("asking torch for GPUs")
    gpus = torch.cuda.device_count() if torch.version.cuda else 0
    return {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}


def judge_torch(machine: Machine) -> Finding:
    name = "torch"
    outcome = machine.probes["torch"]
    if outcome.trouble:
        return fail(name, f"no: {outcome.trouble}", "pip install 'torch>=2.9'", EVERY_RANK)
    values = outcome.values
    built = f"built for CUDA {values['cuda']}" if values["cuda"] else "built without CUDA"
    found = f"{values['version']}, {built}"
    gpus = len(gpus_of(machine))
    if gpus and not values["cuda"]:
        return fail(name, found, "GPU ranks need torch with CUDA: pip install 'torch>=2.9' from the default index")
    if gpus > values["gpus"]:
        return warn(name, f"{found}; it sees {values['gpus']} of {gpus} GPUs", "install a torch built for this driver")
    return ok(name, found)
