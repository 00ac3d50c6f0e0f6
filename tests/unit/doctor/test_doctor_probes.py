"""The doctor's probe processes, which may fail in any way, and nvidia-smi, the last of three ways to ask NVML."""

# ruff: noqa: ARG002, N802  (the names and arguments of CUDA's driver)

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymoe.cuda.nvml import NvmlBinding
from raymoe.doctor import ipc, nvml
from raymoe.doctor.host import _container, _nvidia_on_pci, _shm, _why_no_cache
from raymoe.doctor.nvml import machine_of, matrix_of
from raymoe.doctor.probes import BOUNDS, PROBES, Child, Probes, outcome_of
from raymoe.doctor.software import probe_ray
from raymoe.errors import CudaError

TELL = "import os, sys; tell = lambda text: os.write(int(sys.argv[3]), text.encode()); "
HANGS = (
    TELL
    + """tell('{"doing": "starting CUDA"}\\n')
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
)


def runs(pid: int) -> bool:
    """Return whether the process runs. An ended orphan stays a zombie until the system collects it."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("program", "trouble"),
    [
        ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
        ("import sys; print('driver: ruined', file=sys.stderr); sys.exit(3)", "ended with code 3: driver: ruined"),
        (TELL + """tell('{"doing": "opening GPU 2"}\\n{"to'); os.abort()""", "ended by SIGABRT while opening GPU 2"),
        (TELL + """tell('{"trouble": "no libcuda"}\\n')""", "no libcuda"),
        ("pass", "ended with code 0"),
    ],
)
def test_the_failure_of_a_probe_process_is_described(program, trouble):
    outcome = Child("any", 20.0, program).outcome()
    assert (dict(outcome.values), outcome.trouble) == ({}, trouble)


def test_output_of_libraries_does_not_disturb_a_probe():
    program = (
        "print('{\"values\": 1}'); " + TELL + """tell('{"values": {"gpus": 4}}\\n'); print('{broken', flush=True)"""
    )
    assert Child("any", 20.0, program).outcome().values == {"gpus": 4}


def test_a_hung_probe_process_is_ended_with_its_children():
    child = Child("any", 3.0, HANGS)
    began = time.monotonic()
    outcome = child.outcome()
    assert time.monotonic() - began < 6
    assert outcome.trouble.startswith("no answer within 3 s while starting CUDA")
    grandchild = int(outcome.trouble.rpartition(" ")[2])
    deadline = time.monotonic() + 5
    while runs(grandchild) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not runs(grandchild)


def test_close_ends_a_probe_that_was_not_read():
    probes = Probes({"nvrtc": 60.0, "ipc": 60.0})
    pid = probes._children["nvrtc"]._process.pid
    assert list(probes._children) == ["nvrtc"]  # ipc starts only when it is read
    probes.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_probe_process_that_cannot_be_started_has_an_outcome(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert "Resource temporarily unavailable" in Probes({"host": 1.0})["host"].trouble


def test_every_probe_has_a_time_limit():
    assert set(BOUNDS) == set(PROBES)


def test_the_host_probe_describes_this_machine():
    outcome = Child("host", 60.0).outcome()
    assert outcome.trouble == ""
    assert outcome.values["memfd"] == ""
    assert outcome.values["available_bytes"] > 2**20


def test_an_exception_in_a_probe_is_reported_in_one_line():
    assert outcome_of('{"trouble": "ModuleNotFoundError: No module named \'ray\'"}', "", "").trouble.endswith("'ray'")
    outcome = Child("no such probe", 60.0).outcome()
    assert outcome.trouble == "KeyError: 'no such probe'"


def test_an_unreachable_ray_cluster_is_reported(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(Exception, match=r"asked for the Ray cluster at 127\.0\.0\.1:1, and nothing answers there"):
        probe_ray(lambda _: None)


class FakeHandle:
    def __init__(self, content: bytes = b"") -> None:
        self.content = ctypes.create_string_buffer(content, 64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.content)


class FakeDriver:
    """A driver whose device memory forked processes share. An address is the index of an allocation."""

    def __init__(self, gpus: int, fault: str) -> None:
        self.gpus, self.fault = gpus, fault
        self.memory = mmap.mmap(-1, 8 * ipc.NBYTES)
        self.allocations = FORK.Value("i", 0)

    def open(self, ordinal: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=str(ordinal), current=contextlib.nullcontext, close=lambda: None)

    def call(self, name: str, *arguments: Any) -> Any:
        if name == self.fault:
            raise CudaError(f"{name} failed: CUDA_ERROR_MAP_FAILED", 205)
        return getattr(self, name, lambda *_: None)(*arguments)

    def cuDeviceGetCount(self) -> int:
        return self.gpus

    def cuMemAlloc(self, nbytes: int) -> int:
        with self.allocations.get_lock():
            self.allocations.value += 1
            return self.allocations.value - 1

    def cuIpcGetMemHandle(self, address: int) -> FakeHandle:
        return FakeHandle(bytes([address]))

    def cuIpcOpenMemHandle(self, handle: FakeHandle, flags: int) -> int:
        if self.fault == "crash":
            os.kill(os.getpid(), 11)
        return handle.content.raw[0] if self.fault != "astray" else 7

    def cuMemsetD8(self, address: int, value: int, nbytes: int) -> None:
        self.memory[address * nbytes : (address + 1) * nbytes] = bytes([value]) * nbytes

    def cuMemcpyDtoH(self, to: int, address: int, nbytes: int) -> None:
        ctypes.memmove(to, self.memory[address * nbytes : (address + 1) * nbytes], nbytes)


FORK = multiprocessing.get_context("fork")


@pytest.mark.parametrize(
    ("gpus", "fault", "told"),
    [
        (1, "", {"gpus": 1, "processes": 2}),
        (4, "", {"gpus": 4, "processes": 4}),
        (
            2,
            "cuIpcOpenMemHandle",
            {"failed": ipc.STEPS[2], "error": "cuIpcOpenMemHandle failed: CUDA_ERROR_MAP_FAILED"},
        ),
        (2, "crash", {"failed": ipc.STEPS[2], "error": "the process crashed"}),
        (2, "astray", {"failed": "reading", "error": "bytes [2] were written, [0] found"}),
    ],
)
def test_the_ring_of_cuda_ipc_reports_success_or_the_failed_step(monkeypatch, gpus, fault, told):
    monkeypatch.setattr(ipc, "NBYTES", 4096)
    driver = FakeDriver(gpus, fault)
    monkeypatch.setattr(ipc, "call", driver.call)
    monkeypatch.setattr(ipc, "Gpu", driver)
    monkeypatch.setattr(ipc, "bindings", lambda: SimpleNamespace(CUipcMemHandle=FakeHandle))
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: FORK)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    activities: list[str] = []
    others = set(multiprocessing.active_children())  # rank processes of other tests, which must live on
    assert told.items() <= ipc.probe(activities.append).items()
    assert fault or activities == ["counting GPUs", *ipc.STEPS]
    for child in set(multiprocessing.active_children()) - others:
        child.kill()
        child.join(10)


SMI = """NVIDIA H200, GPU-aa, 143771, 9.0, Disabled, 580.95.05
NVIDIA H200, GPU-bb, 143771, 9.0, Enabled, 580.95.05
"""
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-47,96-143\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNODE\t0-47,96-143\t0\t\tN/A\n"
    "NIC0\tPIX\tNODE\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n"
)


def test_the_output_of_nvidia_smi_is_parsed():
    values = machine_of(SMI, TOPOLOGY)
    assert values["driver"] == "580.95.05"
    assert values["topology"] == [["X", "NV18"], ["NV18", "X"]]
    gpus = values["gpus"]
    assert [(gpu["uuid"], gpu["mig"], gpu["links"], gpu["capability"]) for gpu in gpus] == [
        ("GPU-aa", False, 18, [9, 0]),
        ("GPU-bb", True, 18, [9, 0]),
    ]
    one = "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\x1b[0m\nGPU0\t X \t0-31\t0\n"
    assert matrix_of(one) == [["X"]]
    with pytest.raises(ValueError, match="which is not 6 values"):
        machine_of("No devices were found", "")


def test_nvidia_smi_is_asked_after_the_nvml_bindings(monkeypatch, tmp_path):
    (tmp_path / "nvidia-smi").write_text(
        f"#!/bin/sh\ncase $1 in topo) cat {tmp_path}/topology;; *) cat {tmp_path}/gpus;; esac\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "topology").write_text(TOPOLOGY)
    (tmp_path / "gpus").write_text(SMI)
    monkeypatch.setattr(nvml, "BINDINGS", (NvmlBinding("no_such_module", 0, "Error", ""),))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    activities: list[str] = []
    values = nvml.probe(activities.append)
    assert values["source"] == "nvidia-smi"
    assert activities == ["asking no_such_module", "asking nvidia-smi"]
    (tmp_path / "gpus").write_text("NVIDIA-SMI has failed because it couldn't communicate with the driver\n")
    assert "missing" in nvml.probe(activities.append)


def test_an_unsafe_kernel_cache_is_reported(tmp_path):
    assert _why_no_cache(tmp_path / "none yet") == ""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    assert _why_no_cache(folder) == ""
    folder.chmod(0o777)
    assert _why_no_cache(folder) == f"{folder}: its mode 0777 lets other users write it"
    (tmp_path / "link").symlink_to("nowhere")
    assert _why_no_cache(tmp_path / "link") == f"{tmp_path / 'link'}: it is a symbolic link"
    (tmp_path / "file").touch()
    assert _why_no_cache(tmp_path / "file") == f"{tmp_path / 'file'}: Not a directory"


def test_shm_container_and_pci_gpus_are_detected(tmp_path):
    assert _shm(tmp_path / "none") == {"there": False}
    assert _shm(tmp_path)["writable"] is True
    assert _container({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "Kubernetes"
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x068000"), ("c", "0x8086", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert _nvidia_on_pci(tmp_path) == 1  # an NVSwitch and a device of another vendor do not count
