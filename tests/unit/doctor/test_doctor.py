"""The doctor's findings for probe values: of recorded machines, and of machines with faults."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from raymoe import run
from raymoe.config import load_job
from raymoe.doctor.examine import CHECKS, examine, needs_of, usable_gpus, verdict
from raymoe.doctor.finding import Finding, Machine, Needs, ProbeOutcome
from raymoe.errors import PlacementError
from raymoe.gang.local_gpus import visible_gpus

GIB = 2**30
NEEDS = Needs("quickstart", "layer", "auto", 4, GIB // 2)
P2P = Needs("p2p", "p2p", "auto", 4, GIB)
MISSING = {"missing": "cuda.bindings.nvml: not found; pynvml: No module named 'pynvml'; nvidia-smi: not found"}

ProbeValues = dict[str, dict[str, Any]]


RECORDED = Path(__file__).parent / "recorded"
"""Probe values of real machines, one file each; UUIDs are shortened."""


def recorded(name: str) -> ProbeValues:
    return json.loads((RECORDED / f"{name}.json").read_text())


def no_gpu() -> ProbeValues:
    return recorded("no_gpu")


def with_gpus(number: int, name: str = "NVIDIA H200", word: str = "NV18") -> ProbeValues:
    """Return the values recorded on two H200, changed to this number, name and link of GPUs."""
    probed = recorded("two_h200")
    for probe in ("nvml", "cuda"):
        first = probed[probe]["gpus"][0]
        probed[probe]["gpus"] = [first | {"name": name, "uuid": f"GPU-{index}"} for index in range(number)]
    probed["nvml"]["topology"] = [["X" if one == other else word for other in range(number)] for one in range(number)]
    probed["nvml"]["host_gpus"] = number
    probed["cuda"]["peers"] = [[True] * number for _ in range(number)]
    probed["ipc"] = {"gpus": number, "processes": max(2, number)}
    probed["torch"]["gpus"] = probed["ray"]["gpus"] = number
    return probed


def mig_on() -> ProbeValues:
    probed = with_gpus(1, "NVIDIA H100 80GB HBM3")
    probed["nvml"]["gpus"][0]["mig"] = True
    return probed


def driver_525() -> ProbeValues:
    probed = with_gpus(1, "NVIDIA H100 80GB HBM3")
    probed["nvml"]["driver"] = "525.147.05"
    probed["cuda"] = {"version": [12, 0], "error": "cuDeviceGetUuid failed: no such function", "code": 0}
    return probed


def no_peer_access() -> ProbeValues:
    probed = with_gpus(2, "NVIDIA L40S", "SYS")
    for gpu in (*probed["nvml"]["gpus"], *probed["cuda"]["gpus"]):
        gpu["capability"] = [8, 9]
        gpu |= {"links": 0} if "links" in gpu else {}
    probed["cuda"]["peers"] = [[True, False], [False, True]]
    error = "cuIpcOpenMemHandle failed: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (peer access is not supported)"
    probed["ipc"] |= {"failed": "mapping the next one's memory", "error": error, "code": 217}
    return probed


def tiny_shm() -> ProbeValues:
    probed = no_gpu()
    probed["host"]["shm"] |= {"total_bytes": 64 * 2**20, "free_bytes": 60 * 2**20}
    return probed


ON_GPUS = "quickstart can run here, on 2 GPU ranks; on 4 CPU ranks with --set world.device=cpu"
MACHINES = {
    "no GPU": (no_gpu, {}, "quickstart can run here, on 4 CPU ranks"),
    "two H200": (lambda: recorded("two_h200"), {}, ON_GPUS),
    "one of two H200": (lambda: recorded("one_of_two_h200"), {}, "quickstart can run here, on 4 CPU ranks"),
    "one H100": (lambda: with_gpus(1, "NVIDIA H100 80GB HBM3"), {}, "quickstart can run here, on 4 CPU ranks"),
    "four H200": (lambda: with_gpus(4), {}, ON_GPUS),
    "MIG on": (mig_on, {"CUDA IPC": "fail"}, "quickstart can run here, on 4 CPU ranks; GPU ranks cannot: CUDA IPC"),
    "driver 525": (
        driver_525,
        {
            "driver": "fail",
            "GPUs": "warn",
            "peer access": "warn",
            "CUDA IPC": "warn",
            "TMA": "warn",
            "stream memory ops": "warn",
        },
        "quickstart can run here, on 4 CPU ranks; GPU ranks cannot: driver",
    ),
    "no peer access": (
        no_peer_access,
        {"NVLink": "warn", "peer access": "fail", "CUDA IPC": "fail", "TMA": "warn"},
        "quickstart can run here, on 4 CPU ranks; GPU ranks cannot: peer access, CUDA IPC",
    ),
    "tiny /dev/shm": (tiny_shm, {"/dev/shm": "warn"}, "quickstart can run here, on 4 CPU ranks"),
}


def machine(probed: ProbeValues, needs: Needs = NEEDS, **troubles: str) -> Machine:
    return Machine({name: ProbeOutcome(values, troubles.get(name, "")) for name, values in probed.items()}, needs)


class Recorded(dict[str, ProbeOutcome]):
    """Replaces the probes of an examination."""

    def __init__(self, probed: ProbeValues) -> None:
        super().__init__({name: ProbeOutcome(values) for name, values in probed.items()})

    def close(self) -> None: ...


def findings_of(probed: ProbeValues, needs: Needs = NEEDS, **troubles: str) -> dict[str, Finding]:
    for name in troubles:
        probed[name] = {}
    findings = [check(machine(probed, needs, **troubles)) for check in CHECKS]
    assert len({finding.name for finding in findings}) == len(CHECKS)
    for finding in findings:
        assert (finding.level == "fail") == bool(finding.blocks), finding
        assert finding.level == "ok" or finding.way_out or "see driver" in finding.state, finding
        assert "\n" not in finding.line() and "  " not in finding.line()[25:]
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize("name", MACHINES)
def test_findings_and_verdict_of_each_machine(name):
    make, levels, sentence = MACHINES[name]
    findings = findings_of(make())
    assert {name: finding.level for name, finding in findings.items() if finding.level != "ok"} == levels
    assert verdict(list(findings.values()), machine(make())) == sentence


def test_without_a_driver_every_gpu_check_finds_none():
    findings = findings_of(no_gpu())
    for name in ("driver", "GPUs", "NVLink", "peer access", "CUDA IPC", "TMA", "stream memory ops"):
        assert findings[name].state.startswith("none: no NVIDIA driver")


def test_findings_of_two_recorded_h200():
    findings = findings_of(recorded("two_h200"))
    assert findings["driver"].state == "580.159.04, CUDA 13.0 (NVML by cuda.bindings.nvml)"
    assert findings["GPUs"].state == "2 × NVIDIA H200 (sm_90, 140 GiB)"
    assert findings["NVLink"].state == "NV18 between every two of 2 GPUs, 18 links of NVLink 4, 450 GB/s a direction"
    assert findings["peer access"].state == "all 2 ordered pairs"
    assert findings["CUDA IPC"].state.startswith(
        "2 processes, one a GPU, wrote into one another's memory (in this Docker"
    )
    assert findings["NVRTC"].state == "13.0; compiled the copy kernel for sm_90a in 1.3 s"
    assert findings["TMA"].state == "sm_90 or newer, on 2 GPUs"
    assert findings["Ray"].state.endswith("with 2 GPUs")


def test_findings_where_one_of_two_gpus_is_visible():
    findings = findings_of(recorded("one_of_two_h200"))
    assert findings["GPUs"].state == "1 × NVIDIA H200 (sm_90), of 2 on this machine"
    assert findings["peer access"].state == "one GPU, so there is no peer"
    assert findings["CUDA IPC"].state.startswith("two processes on one GPU wrote")


def test_p2p_needs_a_usable_gpu_for_each_rank():
    assert verdict(list(findings_of(with_gpus(4), P2P).values()), machine(with_gpus(4), P2P)).endswith("on 4 GPU ranks")
    with pytest.raises(PlacementError, match="asks for 4 GPU ranks and 1 GPU can be seen"):
        verdict(list(findings_of(with_gpus(1), P2P).values()), machine(with_gpus(1), P2P))
    with pytest.raises(PlacementError, match=r"on GPU ranks: CUDA IPC: no: MIG is on at GPU 0.*nvidia-smi -i 0 -mig 0"):
        verdict(list(findings_of(mig_on(), P2P).values()), machine(mig_on(), P2P))


BROKEN = {
    # Changed probe values, the check that must report them, its level, and a part of its line.
    "fabric": ({"cuda": {"version": [13, 0], "error": "x", "code": 802}}, "driver", "fail", "nvidia-fabricmanager"),
    "container without compute": ({"cuda": {"missing": "no libcuda"}}, "driver", "fail", "NVIDIA_DRIVER_CAPABILITIES"),
    "NVML gone": ({"nvml": MISSING}, "driver", "warn", "no NVML: cuda.bindings.nvml: not found"),
    "hidden GPUs": (
        {"cuda": {"version": [13, 0], "gpus": [], "peers": []}, "host": {"visible": ""}},
        "GPUs",
        "warn",
        "none is visible to CUDA (CUDA_VISIBLE_DEVICES='')",
    ),
    "Slurm binding": (
        {"host": {"slurm_gpus": 8}},
        "CUDA IPC",
        "warn",
        "Slurm gave this node 8 GPUs and lets this task see 4; start one task a node",
    ),
    "Slurm cgroup": (
        {"host": {"slurm_gpus": 4}, "ipc": {"gpus": 4, "failed": "mapping", "error": "cuIpcOpen", "code": 101}},
        "CUDA IPC",
        "fail",
        "Slurm's device cgroups",
    ),
    "IPC namespaces": (
        {"host": {"container": "Docker"}, "ipc": {"gpus": 4, "failed": "mapping", "error": "cuIpcOpen", "code": 1}},
        "CUDA IPC",
        "fail",
        "--ipc=host",
    ),
    "host keeps some": ({"nvml": {"host_gpus": 8}}, "GPUs", "ok", "4 more of this host are hidden by a device cgroup"),
    "IPC on the host itself": ({"host": {"container": None}}, "CUDA IPC", "ok", "wrote into one another's memory"),
    "torch without CUDA": ({"torch": {"cuda": None}}, "torch", "fail", "GPU ranks need torch with CUDA"),
    "old NVRTC": (
        {"nvrtc": {"known": [75, 80]}},
        "NVRTC",
        "fail",
        "does not know sm_90 of NVIDIA H200; it knows sm_75 to",
    ),
    "Ray sees none": ({"ray": {"gpus": 0}}, "Ray", "warn", "it counts 0 GPUs, CUDA 4"),
    "hidepid": ({"host": {"memfd": "/proc/7/fd/3 may not be opened"}}, "memfd and /proc", "fail", "without hidepid"),
    "a cache for all": (
        {"host": {"cache": "/tmp/cache: its mode 0777 lets other users write it"}},
        "kernel cache",
        "warn",
        "its mode 0777 lets other users write it; delete it, or set RAYMOE_CACHE_DIR",
    ),
    "no shm": ({"host": {"shm": {"there": False}}}, "/dev/shm", "fail", "mount -t tmpfs"),
    "shm of root": ({"host": {"shm": {"writable": False}}}, "/dev/shm", "fail", "not writable"),
    "little memory": (
        {"host": {"available_bytes": GIB}},
        "memory",
        "fail",
        "1.0 GiB available; quickstart takes 2.0 GiB",
    ),
    "half of NVLink": (
        {"nvml": {"topology": [["X", "NV4", "SYS"], ["NV4", "X", "SYS"], ["SYS", "SYS", "X"]]}},
        "NVLink",
        "warn",
        "NV4 between 1 pair, SYS between 2 pairs",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_machine_is_reported_by_the_right_check(name):
    change, check, level, words = BROKEN[name]
    probed = copy.deepcopy(with_gpus(4))
    for probe, values in change.items():
        replaced = {"error", "missing", "gpus"} & set(values) and probe in ("cuda", "nvml")
        shm = {"shm": probed[probe].get("shm", {}) | values["shm"]} if "shm" in values else {}
        probed[probe] = dict(values) if replaced else probed[probe] | values | shm
    finding = findings_of(probed)[check]
    assert finding.level == level
    assert words in finding.line()


def test_gpus_on_the_pci_bus_without_a_driver_are_reported():
    probed = no_gpu()
    probed["host"]["nvidia_on_pci"] = 8
    assert findings_of(probed)["driver"].level == "warn"
    assert "8 NVIDIA devices on the PCI bus" in findings_of(probed)["driver"].line()


@pytest.mark.parametrize("probe", ["host", "nvml", "cuda", "ipc", "nvrtc", "torch", "ray"])
@pytest.mark.parametrize("make", [no_gpu, lambda: with_gpus(4)], ids=["no GPU", "four H200"])
def test_a_broken_probe_is_reported_and_no_check_raises(probe, make):
    probed = make()
    findings = findings_of(probed, **{probe: "no answer within 60 s"})
    unused = probe == "ipc" and make is no_gpu  # no check reads it
    assert unused or any("no answer within 60 s" in finding.line() for finding in findings.values())
    if probe in ("host", "torch", "ray"):
        with pytest.raises(PlacementError, match=r"quickstart cannot run here on CPU ranks: .*no answer within 60 s"):
            verdict(list(findings.values()), machine(probed, **{probe: "no answer within 60 s"}))


def test_the_verdict_names_the_first_failed_check_and_counts_the_rest():
    probed = no_gpu()
    findings = findings_of(probed, host="ended by SIGSEGV", ray="no answer within 150 s while starting a local Ray")
    with pytest.raises(PlacementError) as error:
        verdict(list(findings.values()), machine(probed))
    assert str(error.value).startswith("quickstart cannot run here on CPU ranks: Ray: no: no answer within 150 s while")
    assert str(error.value).endswith("(and 2 more checks failed)")
    assert error.value.exit_code == 3


def test_the_advice_of_a_raymoe_error_is_the_findings_way_out():
    trouble = "asked for the Ray cluster at 10.0.0.1:6379, and nothing answers there; start one with `ray start --head`"
    assert findings_of(no_gpu(), ray=trouble)["Ray"].way_out == "start one with `ray start --head`"
    assert "'ray[default]" in findings_of(no_gpu(), ray="ended by SIGSEGV while starting a local Ray")["Ray"].way_out


def test_the_needs_of_quickstart():
    needs = needs_of(load_job("quickstart"), "quickstart")
    assert (needs.workload, needs.ranks) == ("layer", 4)
    assert needs.bytes_per_rank > 2**20


def test_a_check_that_raises_is_reported_as_a_warning(monkeypatch):
    def judge_nothing(machine: Machine) -> Finding:
        raise KeyError("peers")

    monkeypatch.setattr("raymoe.doctor.examine.CHECKS", (judge_nothing,))
    monkeypatch.setattr("raymoe.doctor.examine.Probes", lambda _: Recorded(no_gpu()))
    lines = list(examine())
    assert lines[0].startswith("warn  nothing            this check raised KeyError: 'peers'")


@pytest.mark.parametrize(
    ("make", "gpus"),
    [(no_gpu, 0), (lambda: with_gpus(4), 4), (mig_on, 0), (no_peer_access, 0), (driver_525, 0)],
    ids=["no GPU", "four H200", "MIG on", "no peer access", "driver 525"],
)
def test_quickstart_uses_gpus_only_where_gpu_ranks_can_run(monkeypatch, make, gpus):
    asked: list[set[str]] = []

    def recorded_probes(bounds: dict[str, float]) -> Recorded:
        asked.append(set(bounds))
        return Recorded(make())

    monkeypatch.setattr("raymoe.doctor.examine.Probes", recorded_probes)
    assert usable_gpus() == gpus and "ray" not in asked[0]


@pytest.mark.parametrize(
    ("there", "usable", "sets", "config"),
    [
        (0, 0, (), "quickstart"),
        (1, 1, (), "quickstart"),
        (2, 2, (), "quickstart_gpus"),
        (2, 2, ("steps.count=3",), "quickstart_gpus"),
        (2, 2, ("world.ranks=2",), "quickstart"),
        (8, 0, (), "quickstart"),
    ],
)
def test_the_first_run_takes_the_gpus_of_this_machine(monkeypatch, there, usable, sets, config):
    monkeypatch.setattr(run, "visible_gpus", lambda: there)
    monkeypatch.setattr(run, "usable_gpus", lambda: usable)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    chosen, notice = run._config_for_here(run.Request("quickstart", sets), "quickstart")
    assert chosen == config
    assert (notice is None) == (config == "quickstart" and not (there > 1 and usable < 2))
    assert run._config_for_here(run.Request("p2p", sets), "p2p") == ("p2p", None)
    assert run._config_for_here(run.Request("quickstart", sets, address="head:1"), "quickstart") == ("quickstart", None)
    assert load_job(config).world.device == ("cuda" if config == "quickstart_gpus" else "auto")


@pytest.mark.parametrize(
    ("variable", "count"), [(None, 3), ("", 0), ("0", 1), ("0,2", 2), ("1,-1,0", 1), ("0,1,2,3,4", 3)]
)
def test_devices_that_cuda_hides_do_not_count(monkeypatch, tmp_path, variable, count):
    for name in ("nvidia0", "nvidia1", "nvidia7", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus(tmp_path) == count
