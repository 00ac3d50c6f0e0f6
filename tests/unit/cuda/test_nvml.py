"""NVML through a fake binding: the description of a machine, and whether rows may travel in lines (the LL path)."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from raymoe.cuda import nvml
from raymoe.cuda.nvml import Library, NvmlBinding, nvlinked
from raymoe.errors import ConfigError
from raymoe.exchange.choice import Choice, ExchangeRequest, choose, make_backend
from raymoe.exchange.peer.fused import FUSED
from raymoe.exchange.peer.fused_ll import FEW_TOKENS
from raymoe.exchange.peer.peer_backend import PeerBackend
from raymoe.exchange.peer.workspace import Bounds, Links, Workspace, workspace_layout
from raymoe.exchange.spec import ExchangeSpec
from tests.unit.worlds import close, each, wired

PYNVML = NvmlBinding("pynvml", 1, "NVMLError", "busId")
FEW = ExchangeSpec(tokens=128, hidden=1024, experts=8, topk=2)
MANY = replace(FEW, tokens=8192)


class FakeNvml(SimpleNamespace):
    """Four GPUs as pynvml shows them, with bytes for some strings and its own error class. `word` is their link."""

    class NVMLError(Exception):
        pass

    def __init__(self, word: str = "switch", gpus: int = 4) -> None:
        def unsupported(*_):
            raise self.NVMLError("Not Supported")

        def link_kind(handle, link):
            return {"switch": 2, "direct": 0}[word]

        def link_pci(handle, link):
            others = [index for index in range(gpus) if index != handle]
            peer = others[link % len(others)]
            return SimpleNamespace(busId=b"SWITCH" if word == "switch" else f"0000:{peer}".encode())

        def handle_of(uuid):
            if not uuid.startswith("GPU-") or int(uuid[4:]) >= gpus:
                raise self.NVMLError("Not Found")
            return int(uuid[4:])

        def p2p(first, second, index):
            assert index == 2  # NVML_P2P_CAPS_INDEX_NVLINK
            return {"switch": 0, "direct": 0 if abs(first - second) == 1 else 5, "none": 5}[word]

        super().__init__(
            nvmlInit=lambda: None,
            nvmlSystemGetDriverVersion=lambda: b"580.95.05",
            nvmlDeviceGetCount=lambda: gpus,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetName=lambda _: b"NVIDIA H200",
            nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
            nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=150754820096),
            nvmlDeviceGetCudaComputeCapability=lambda _: (9, 0),
            nvmlDeviceGetMigMode=lambda _: unsupported() if word == "none" else [0, 0],
            nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=f"0000:{handle}".encode()),
            nvmlDeviceGetTopologyCommonAncestor=lambda *_: 50,
            nvmlDeviceGetNvLinkState=lambda _, link: unsupported() if word == "none" or link >= 12 else 1,
            nvmlDeviceGetNvLinkVersion=lambda *_: 6,  # NVLink 4
            nvmlDeviceGetNvLinkRemoteDeviceType=link_kind,
            nvmlDeviceGetNvLinkRemotePciInfo=link_pci,
            nvmlDeviceGetHandleByUUID=handle_of,
            nvmlDeviceGetP2PStatus=p2p,
        )


@pytest.mark.parametrize(("word", "between"), [("switch", "NV12"), ("direct", "NV4"), ("none", "SYS")])
def test_a_binding_of_nvml_describes_the_machine(monkeypatch, word, between):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(word))
    found = Library(NvmlBinding("pynvml", 1, "NVMLError", "busId")).machine()
    assert found["driver"] == "580.95.05"
    assert found["topology"][1] == [between, "X", between, between]
    assert found["gpus"][3] == {
        "name": "NVIDIA H200",
        "uuid": "GPU-3",
        "memory_bytes": 150754820096,
        "capability": [9, 0],
        "mig": False,
        "links": 0 if word == "none" else 12,
        "nvlink": None if word == "none" else 4,
    }


def test_cuda_bindings_has_every_name_of_nvml_that_is_used():
    module = pytest.importorskip("cuda.bindings.nvml")
    assert [names[0] for names in nvml._NAMES.values() if not hasattr(module, names[0])] == []
    assert hasattr(module.PciInfo, "bus_id")
    versions = {each.name: int(each) for each in module.NvlinkVersion}
    assert {nvml._NVLINK[versions[f"VERSION_{version}_0"]] for version in (1, 2, 4, 5)} == {1, 2, 4, 5}
    assert hasattr(module.Memory_v2, "total")


@pytest.fixture
def linked_by(monkeypatch):
    """A function that makes pynvml the only binding, for a machine with this link between its GPUs."""

    def install(word: str) -> None:
        monkeypatch.setattr(nvml, "BINDINGS", (PYNVML,))
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(word))

    return install


@pytest.mark.parametrize(
    ("word", "second", "linked"),
    [
        ("switch", "3", True),
        ("switch", "GPU-3", True),
        ("direct", "1", True),
        ("direct", "3", False),
        ("none", "1", False),
        ("none", "0", True),  # the same GPU
        ("switch", "7", False),  # a GPU that a container hides
    ],
)
def test_nvlinked_tells_which_pairs_have_nvlink(linked_by, word, second, linked):
    linked_by(word)
    assert nvlinked("0", second) is linked


def test_without_nvml_no_pair_has_nvlink(monkeypatch):
    monkeypatch.setattr(nvml, "BINDINGS", (NvmlBinding("no_such_module", 0, "Error", ""), PYNVML))
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace())  # a binding that is too old
    assert not nvlinked("0", "1")

    def missing() -> None:
        raise RuntimeError("no libnvidia-ml")

    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert nvlinked("0", "1")
    sys.modules["pynvml"].nvmlInit = missing
    assert not nvlinked("0", "1")


@pytest.mark.parametrize(
    ("word", "gpus", "lines"),
    [
        ("switch", "012", True),
        ("direct", "012", False),  # 0 and 2 are not neighbours; rank 1 cannot see that
        ("direct", "01", True),
        ("none", "01", False),
        ("none", "00", True),  # ranks that share a GPU
    ],
)
def test_all_ranks_agree_whether_rows_travel_in_lines(linked_by, word, gpus, lines):
    linked_by(word)
    worlds = wired(len(gpus))

    with mock.patch.object(type(worlds[0]), "gpu", property(lambda world: SimpleNamespace(uuid=gpus[world.rank]))):
        assert each(worlds, lambda world: world.shared(Links).lines) == [lines] * len(gpus)
    close(worlds)


@pytest.mark.parametrize(("spec", "lines", "kind"), [(FEW, True, FEW_TOKENS), (FEW, False, FUSED), (MANY, True, FUSED)])
def test_few_tokens_travel_in_lines_only_over_nvlink(spec, lines, kind):
    made = []
    gpu = SimpleNamespace(uuid="a", name="NVIDIA H200", capability=(9, 0), sms=132)
    links = SimpleNamespace(lines=lines)
    world = SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        gpu=gpu,
        size=2,
        domains=1,
        rank=0,
        shared=lambda _: links,
        swap=lambda value, _: [value] * 2,
    )
    choice = choose(world, spec, ExchangeRequest("fused", None, "auto"))
    assert choice == Choice("fused", sms=132, lines=kind is FEW_TOKENS)
    with mock.patch.object(PeerBackend, "__init__", lambda _, *args: made.append(args[-1])):
        make_backend(choice, world, spec, None)
    assert made == [kind]


def test_a_workspace_without_lines_has_no_memory_for_them():
    with_lines, without = Bounds.of(FEW, MANY), Bounds.of(FEW, MANY, lines=False)
    assert (without.ll_entries, without.ll_lines) == (0, 0)
    regions = [{placed.region.name for placed in workspace_layout(each, 2).placed} for each in (with_lines, without)]
    assert regions[0] - regions[1] == {name for name in regions[0] if name.startswith("ll_")}
    for bounds in (with_lines, without):
        bounds.check(FEW)  # few tokens can be served with and without lines
    with pytest.raises(ConfigError, match="needs ll_entries"):
        Bounds.of(MANY).check(FEW)


def test_a_workspace_uses_lines_only_if_its_world_has_them():
    def swap(bounds, what):
        raise StopIteration(bounds.lines)

    world = SimpleNamespace(size=2, shared=lambda _: SimpleNamespace(lines=False), swap=swap)
    with pytest.raises(StopIteration, match="False"):
        Workspace(world, FEW)
