"""Read the properties of GPUs and their links from NVML, by its binding in cuda.bindings or by pynvml."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

# raymoe's name of a function, its name in cuda.bindings.nvml, its name in pynvml.
_NAMES = {
    "init": ("init_v2", "nvmlInit"),
    "driver": ("system_get_driver_version", "nvmlSystemGetDriverVersion"),
    "count": ("device_get_count_v2", "nvmlDeviceGetCount"),
    "handle": ("device_get_handle_by_index_v2", "nvmlDeviceGetHandleByIndex"),
    "name": ("device_get_name", "nvmlDeviceGetName"),
    "uuid": ("device_get_uuid", "nvmlDeviceGetUUID"),
    "memory": ("device_get_memory_info_v2", "nvmlDeviceGetMemoryInfo"),
    "capability": ("device_get_cuda_compute_capability", "nvmlDeviceGetCudaComputeCapability"),
    "mig": ("device_get_mig_mode", "nvmlDeviceGetMigMode"),
    "pci": ("device_get_pci_info_v3", "nvmlDeviceGetPciInfo"),
    "ancestor": ("device_get_topology_common_ancestor", "nvmlDeviceGetTopologyCommonAncestor"),
    "link_state": ("device_get_nvlink_state", "nvmlDeviceGetNvLinkState"),
    "link_version": ("device_get_nvlink_version", "nvmlDeviceGetNvLinkVersion"),
    "link_kind": ("device_get_nvlink_remote_device_type", "nvmlDeviceGetNvLinkRemoteDeviceType"),
    "link_pci": ("device_get_nvlink_remote_pci_info_v2", "nvmlDeviceGetNvLinkRemotePciInfo"),
    "handle_of": ("device_get_handle_by_uuid", "nvmlDeviceGetHandleByUUID"),
    "p2p": ("device_get_p2p_status", "nvmlDeviceGetP2PStatus"),
}
_MOST_LINKS = 18
_SWITCH = 2  # nvmlIntNvLinkDeviceType_t
_NVLINK = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
"""NVLink's major version for each nvmlNvlinkVersion_t, which also counts minor versions: NVLink 4 of an H200 is 6."""
# nvmlGpuTopologyLevel_t, in the words of `nvidia-smi topo -m`
_LEVELS = {0: "X", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_P2P_NVLINK, _P2P_OK = 2, 0  # nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t


@dataclass(frozen=True)
class NvmlBinding:
    """A Python binding of NVML, and its differences from the other."""

    module: str
    column: int
    error: str
    bus_id: str


BINDINGS = (NvmlBinding("cuda.bindings.nvml", 0, "NvmlError", "bus_id"), NvmlBinding("pynvml", 1, "NVMLError", "busId"))


def nvlinked(first: str, second: str) -> bool:
    """Return whether two GPUs, given by UUID, reach one another over NVLink, as NVML reports. A GPU reaches itself.

    False if NVML is missing or fails, or if it does not know one of the GPUs (a container may hide it).
    """
    if first == second:
        return True
    for binding in BINDINGS:
        try:
            library = Library(binding)
        except (ImportError, AttributeError):
            continue  # the other binding may be installed
        try:
            return library.nvlinked(first, second)
        except (library.error, RuntimeError):  # RuntimeError: libnvidia-ml is missing
            continue
    return False


class Library:
    """One of the two bindings; its functions are called by raymoe's names."""

    def __init__(self, binding: NvmlBinding) -> None:
        module = importlib.import_module(binding.module)
        self.error: type[Exception] = getattr(module, binding.error)
        self._bus_id = binding.bus_id
        self._functions = {name: getattr(module, names[binding.column]) for name, names in _NAMES.items()}

    def machine(self) -> dict[str, object]:
        self.ask("init")
        handles = [self.ask("handle", index) for index in range(self.ask("count"))]
        links = [self._links(handle) for handle in handles]
        buses = [self._bus(self.ask("pci", handle)) for handle in handles]
        rows = [
            [self._between(handles, links, buses, (one, other)) for other in range(len(handles))]
            for one in range(len(handles))
        ]
        return {
            "driver": self.ask("driver"),
            "gpus": [self._gpu(handle, its) for handle, its in zip(handles, links, strict=True)],
            "topology": rows,
        }

    def nvlinked(self, first: str, second: str) -> bool:
        """Return whether peer access between two GPUs, given by UUID, goes over NVLink."""
        self.ask("init")
        pair = [self.ask("handle_of", f"GPU-{uuid.removeprefix('GPU-')}") for uuid in (first, second)]
        return int(self.ask("p2p", *pair, _P2P_NVLINK)) == _P2P_OK

    def ask(self, name: str, *arguments: object) -> Any:
        answer = self._functions[name](*arguments)
        return answer.decode() if isinstance(answer, bytes) else answer

    def maybe(self, name: str, *arguments: object) -> Any:
        """Call a function; None where this GPU or driver does not support it."""
        try:
            return self.ask(name, *arguments)
        except self.error:
            return None

    def _gpu(self, handle: Any, links: list[tuple[int | None, str]]) -> dict[str, object]:
        capability, mig = self.maybe("capability", handle), self.maybe("mig", handle)
        return {
            "name": self.ask("name", handle),
            "uuid": self.ask("uuid", handle),
            "memory_bytes": int(self.ask("memory", handle).total),
            "capability": list(capability) if capability else None,
            "mig": bool(mig and mig[0]),
            "links": len(links),
            "nvlink": self._version(handle, len(links)),
        }

    def _version(self, handle: Any, links: int) -> int | None:
        version = self.maybe("link_version", handle, 0) if links else None
        return None if version is None else _NVLINK.get(int(version))

    def _links(self, handle: Any) -> list[tuple[int | None, str]]:
        """Return the other end of each active link: the kind of device, and its place on the PCI bus."""
        ends = []
        for link in range(_MOST_LINKS):
            if self.maybe("link_state", handle, link):
                kind, pci = self.maybe("link_kind", handle, link), self.maybe("link_pci", handle, link)
                ends.append((None if kind is None else int(kind), "" if pci is None else self._bus(pci)))
        return ends

    def _bus(self, pci: Any) -> str:
        bus_id = getattr(pci, self._bus_id)
        return (bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)).lower()

    def _between(
        self, handles: list[Any], links: list[list[tuple[int | None, str]]], buses: list[str], pair: tuple[int, int]
    ) -> str:
        one, other = pair
        if one == other:
            return "X"
        switched = [sum(kind == _SWITCH for kind, _ in links[end]) for end in pair]
        direct = sum(bus == buses[other] for _, bus in links[one])
        if count := min(switched) or direct:
            return f"NV{count}"
        level = self.maybe("ancestor", handles[one], handles[other])
        return "?" if level is None else _LEVELS.get(int(level), "?")
