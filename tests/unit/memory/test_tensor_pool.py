"""The pool of tensors and its readers, in one process: bytes, reuse, order, limits, refusals."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.errors import Aborted, CaptureError, ConfigError, CudaError, PlacementError, WiringError
from raymoe.memory import tensor_reader
from raymoe.memory.pool_devices import HostPoolDevice, Mark
from raymoe.memory.tensor_pool import PoolLimits, TensorPool
from raymoe.memory.tensor_reader import TensorReader
from tests.python_path import python_path
from tests.unit.memory.pool_streams import SlowDevice

MIB = 2**20
LIMITS = PoolLimits(pool_bytes=8 * MIB, segment_bytes=4 * MIB, wait_s=0.0)
OWNER = "Actor(Trainer, 1234) (pid 5)"


class Pair:
    """A pool and a reader of it, on one device of a kind."""

    def __init__(self, device: HostPoolDevice, limits: PoolLimits = LIMITS) -> None:
        self.pool, self.reader = TensorPool(device, limits, OWNER), TensorReader(device)

    def read(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        exported = self.pool.export("once", tensors)
        found = self.reader.start(exported).wait(30)
        self.pool.release("once")
        return found


@pytest.fixture
def pair():
    made = Pair(HostPoolDevice())
    yield made
    made.reader.close()
    made.pool.close()


@pytest.fixture
def slow():
    device = SlowDevice()
    made = Pair(device)
    yield made, device
    for work in (*device.writes, *device.copies):
        work.done = True
    made.reader.close()
    made.pool.close()


def same(found: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Compare as bytes, so that NaN and float8 are compared too."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    as_bytes = [
        each.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) for each in (found, plain)
    ]
    form = found.shape == tensor.shape and found.dtype == tensor.dtype and found.is_contiguous()
    return form and torch.equal(*as_bytes)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Fill a tensor with random bytes, which are of 0 and 1 for bool."""
    draw = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=draw)
    return values.view(dtype).view(shape)


def test_every_dtype_and_form_comes_as_it_was(pair: Pair) -> None:
    whole = torch.randn(6, 10, 4)
    forms = [
        *(random_tensor(dtype, 3, 5) for dtype in DTYPES),
        *(random_tensor(dtype, 8, 6).t()[1:, ::2] for dtype in DTYPES),
        *(whole[2], whole[:, 3:7], whole.transpose(0, 2), whole[0, 0, 0], whole[:, :1].expand(6, 9, 4), whole.flip(0)),
        *(torch.arange(7)[3:4].as_strided((1,), (3,)), torch.arange(8).view(4, 2)[:1].t()),
        *(torch.empty(0), torch.empty(4, 0, 3, dtype=torch.int64), torch.nn.Parameter(whole)),
        *(torch.randn(4, dtype=torch.complex64).conj(), torch.randn(4, dtype=torch.complex64).conj().imag),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    found = pair.read(*forms)
    assert [index for index, each in enumerate(forms) if not same(found[index], each)] == []
    assert not any(each.requires_grad for each in found)
    assert pair.pool.usage().used_bytes == 0


def test_an_object_may_have_no_element(pair: Pair) -> None:
    assert [each.shape for each in pair.read(torch.empty(0, 7))] == [(0, 7)]
    assert pair.read() == []
    assert pair.pool.usage().total_bytes == 0


def test_a_source_may_change_its_tensor_afterwards(pair: Pair) -> None:
    tensor = torch.zeros(1000)
    exported = pair.pool.export("key", [tensor])
    tensor.fill_(1)
    assert pair.pool.export("key", [tensor]) is exported  # Ray may ask again, for the same tensors
    for _ in range(2):
        assert same(pair.reader.start(exported).wait(30)[0], torch.zeros(1000))


def test_targets_are_filled(pair: Pair) -> None:
    values = [torch.randn(100), torch.arange(7)]
    targets = [torch.empty(100), torch.empty(7, dtype=torch.int64)]
    found = pair.reader.start(pair.pool.export("key", values), targets).wait(30)
    assert all(a is b for a, b in zip(found, targets, strict=True))
    assert all(map(same, targets, values))


def test_a_description_is_small_and_plain(pair: Pair) -> None:
    exported = pair.pool.export("key", [torch.zeros(MIB)])
    carried = pickle.dumps(exported)
    assert len(carried) < 1500
    assert pickle.loads(carried) == exported


STEPS = st.lists(
    st.tuples(st.sampled_from(["export", "export", "release", "read"]), st.integers(0, 2**20)), min_size=5, max_size=60
)


@settings(max_examples=40)
@given(STEPS)
def test_live_objects_keep_their_bytes(steps: list[tuple[str, int]]) -> None:
    """Objects of any sizes come and go. Each one that lives is always read as it was given."""
    pair = Pair(HostPoolDevice(), PoolLimits(2 * MIB, 2 * MIB, 0.0))
    live: dict[int, tuple[object, list[torch.Tensor]]] = {}
    try:
        for number, (step, value) in enumerate(steps):
            key = sorted(live)[value % len(live)] if live else None
            if step == "export":
                sizes = (value, value // 3, 0, value % 257)
                tensors = [random_tensor(torch.uint8, size, seed=number) for size in sizes]
                try:
                    live[number] = pair.pool.export(number, tensors), tensors
                except PlacementError:
                    used = pair.pool.usage()
                    assert used.total_bytes - used.used_bytes < sum(sizes) + 4 * 256 or len(live) > 1  # or in pieces
            elif step == "release" and key is not None:
                pair.pool.release(key)
                del live[key]
            for exported, tensors in live.values() if step == "read" else ():
                found = pair.reader.start(exported).wait(30)  # type: ignore[arg-type]
                assert all(map(same, found, tensors))
        for key in live:
            pair.pool.release(key)
        assert pair.pool.usage().used_bytes == pair.pool.usage().objects == 0
    finally:
        pair.reader.close()
        pair.pool.close()


def test_memory_is_mapped_once_and_used_again(slow: tuple[Pair, SlowDevice]) -> None:
    pair, device = slow
    starts = set()
    for round_ in range(50):
        value = torch.full((MIB // 4,), float(round_))
        exported = pair.pool.export(round_, [value])
        starts.add(exported.places)
        reading = pair.reader.start(exported)
        device.writes[-1].done = True
        assert not reading.poll()
        device.finish(device.copies[-1])
        assert reading.poll() and same(reading.tensors[0], value)
        pair.pool.release(round_)
    assert len(starts) == 1 and pair.pool.usage().segments == 1
    assert list(device.mapped.values()) == [1]
    assert len(device.recycled) == 50


def test_a_reader_copies_after_the_source_has_written(slow: tuple[Pair, SlowDevice]) -> None:
    pair, device = slow
    reading = pair.reader.start(pair.pool.export("key", [torch.ones(4)]))
    assert not reading.poll() and not reading.poll()
    assert device.copies == []
    device.writes[0].done = True
    assert not reading.poll() and len(device.copies) == 1
    assert not reading.poll() and len(device.copies) == 1
    device.finish(device.copies[0])
    assert reading.poll() and same(reading.tensors[0], torch.ones(4))


@pytest.mark.parametrize("read", [True, False], ids=["read", "never read"])
def test_memory_is_not_used_again_before_its_last_user_is_done(slow: tuple[Pair, SlowDevice], read: bool) -> None:
    """The last user is the reader's copy, or the source's own if nobody has read."""
    pair, device = slow
    exported = pair.pool.export("old", [torch.ones(MIB)])
    reading = pair.reader.start(exported) if read else None
    if reading is not None:
        device.writes[0].done = True
        assert not reading.poll()
    pair.pool.release("old")
    new = pair.pool.export("new", [torch.zeros(MIB)])
    assert new.places != exported.places
    assert pair.pool.usage().waiting == 1
    with pytest.raises(PlacementError, match="1 are released and still read"):
        pair.pool.export("third", [torch.zeros(MIB)])
    if reading is not None:
        device.finish(device.copies[0])
        assert same(reading.wait(30)[0], torch.ones(MIB))
    device.writes[0].done = True
    assert pair.pool.usage().waiting == 0
    assert pair.pool.export("third", [torch.zeros(MIB)]).places == exported.places


def test_a_dropped_read_lets_go_after_its_copy(slow: tuple[Pair, SlowDevice]) -> None:
    pair, device = slow
    exported = pair.pool.export("key", [torch.ones(4)])
    device.writes[0].done = True
    reading = pair.reader.start(exported)
    assert not reading.poll()
    pair.pool.release("key")
    began = time.monotonic()
    del reading
    assert time.monotonic() - began < 5  # a timeout of `ray.get` is kept though a GPU is busy
    assert pair.pool.usage().waiting == 1
    device.finish(device.copies[0])
    while pair.pool.usage().waiting:
        assert time.monotonic() - began < 60
        time.sleep(0.01)


ENDS = """
import torch
from raymoe.memory.tensor_pool import PoolLimits, TensorPool
from raymoe.memory.tensor_reader import TensorReader
from tests.unit.memory.pool_streams import SlowDevice
device = SlowDevice()
pool, reader = TensorPool(device, PoolLimits(), "me"), TensorReader(device)
reading = reader.start(pool.export("key", [torch.ones(3)]))
device.writes[0].done = True
assert not reading.poll()
"""


def test_a_process_ends_in_the_middle_of_a_read() -> None:
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", ENDS], env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_tensors_that_were_freed_are_refused(pair: Pair) -> None:
    exported = pair.pool.export("key", [torch.ones(4)])
    pair.pool.release("key")
    with pytest.raises(WiringError, match=r"of Actor\(Trainer, 1234\) \(pid 5\) were freed before they were read"):
        pair.reader.start(exported)
    assert same(pair.read(torch.ones(3))[0], torch.ones(3))


def test_a_release_in_the_middle_of_an_export_is_not_lost(pair: Pair) -> None:
    """Garbage collection may drop the last ObjectRef in any line, also of the pool's own thread."""

    class Releases(torch.Tensor):
        def detach(self) -> torch.Tensor:  # type: ignore[override]
            pair.pool.release("other")
            return torch.ones(100)

    pair.pool.export("other", [torch.ones(MIB)])
    exported = pair.pool.export("key", [torch.zeros(100).as_subclass(Releases)])
    assert same(pair.reader.start(exported).wait(30)[0], torch.ones(100))
    usage = pair.pool.usage()
    assert (usage.objects, usage.waiting, usage.used_bytes) == (1, 0, 512)
    assert pair.pool.export("other", [torch.ones(3)]).places[0].nbytes == 12  # type: ignore[union-attr]


def test_a_full_pool_says_what_is_in_it(pair: Pair) -> None:
    pair.pool.export("first", [torch.zeros(MIB)])
    pair.pool.export("second", [torch.zeros(MIB - 64)])
    with pytest.raises(PlacementError) as full:
        pair.pool.export("third", [torch.zeros(MIB)])
    assert str(full.value) == (
        f"{4 * MIB} bytes were asked of the pool of tensors of {OWNER}; 256 of {8 * MIB} are free after 0 s, "
        "with 2 objects in it: drop ObjectRefs, or register a larger pool_bytes"
    )
    began = time.monotonic()
    patient = Pair(HostPoolDevice(), replace(LIMITS, wait_s=60.0)).pool
    patient.export("small", [torch.zeros(1)])
    with pytest.raises(PlacementError, match=f"^{12 * MIB} bytes .* with 1 objects in it"):
        patient.export("large", [torch.zeros(3 * MIB)])
    assert time.monotonic() - began < 30  # no wait helps
    pair.pool.release("first")
    assert same(pair.read(torch.ones(MIB))[0], torch.ones(MIB))


def test_a_full_pool_waits_for_a_release() -> None:
    pool = TensorPool(HostPoolDevice(), PoolLimits(4 * MIB, 4 * MIB, wait_s=60.0), OWNER)
    pool.export("first", [torch.zeros(MIB)])
    threading.Timer(0.1, pool.release, ["first"]).start()
    pool.export("second", [torch.zeros(MIB)])
    assert pool.usage().objects == 1
    pool.close()


def test_tensors_of_the_pool_are_taken_as_they_are(pair: Pair) -> None:
    own = pair.pool.empty((8, 1024), torch.float32)
    own.copy_(torch.randn(8, 1024))
    used = pair.pool.usage().used_bytes
    exported = pair.pool.export("key", [own, own[3], own[:, 0]])
    assert pair.pool.usage().used_bytes == used + 256  # the column is not contiguous, so it was copied
    found = pair.reader.start(exported).wait(30)
    assert all(map(same, found, (own, own[3], own[:, 0])))
    own[3] = 5
    assert same(pair.reader.start(exported).wait(30)[1], own[3])


def test_a_conjugate_of_a_tensor_of_the_pool_is_copied(pair: Pair) -> None:
    """Its memory holds other values than it has."""
    own = pair.pool.empty((4,), torch.complex64).copy_(torch.randn(4, dtype=torch.complex64))
    found = pair.reader.start(pair.pool.export("key", [own.conj(), own])).wait(30)
    assert same(found[0], own.conj()) and same(found[1], own)


@pytest.mark.parametrize("first", ["tensor", "object"])
def test_a_tensor_of_the_pool_lives_as_long_as_its_last_user(slow: tuple[Pair, SlowDevice], first: str) -> None:
    pair, device = slow
    own = pair.pool.empty((MIB,), torch.float32)
    exported = pair.pool.export("key", [own[: MIB // 2]])
    device.writes[0].done = True
    if first == "tensor":
        del own
    else:
        pair.pool.release("key")
    pair.pool.export("other", [torch.zeros(MIB)])
    with pytest.raises(PlacementError, match="are free"):
        pair.pool.export("third", [torch.zeros(MIB)])
    if first == "tensor":
        pair.pool.release("key")
    else:
        del own
    assert device.synchronised == 0
    assert pair.pool.export("third", [torch.zeros(MIB)]).places[0].start == exported.places[0].start  # type: ignore[union-attr]
    assert device.synchronised == 1  # streams that the pool does not know may have written to it


def test_a_failed_copy_leaves_the_pool_usable(pair: Pair) -> None:
    class Broken(torch.Tensor):
        def detach(self) -> torch.Tensor:  # type: ignore[override]
            raise RuntimeError("this tensor cannot be copied")

    broken = torch.zeros(100).as_subclass(Broken)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        pair.pool.export("key", [torch.ones(3), broken])
    assert pair.pool.usage().used_bytes == pair.pool.usage().objects == 0
    assert same(pair.read(torch.ones(3))[0], torch.ones(3))


class Sharded(torch.Tensor):
    """A tensor that is a part of another one, as a DTensor is."""

    placements = ("Shard(0)",)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(3).to_sparse(), "torch.sparse_coo form cannot be exported"),
        (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]), "nested form cannot be exported"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised form cannot be exported"),
        (lambda: torch.ones(3).as_subclass(Sharded), "a DTensor cannot be exported"),
        (lambda: torch.empty(3, device="meta"), "a tensor on meta was given with one on cpu"),
    ],
    ids=["sparse", "nested", "quantised", "sharded", "meta"],
)
def test_other_tensors_are_refused(pair: Pair, make: Callable[[], torch.Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pair.pool.export("key", [torch.ones(3), make()])
    assert pair.pool.usage().used_bytes == 0


def test_another_host_is_refused(pair: Pair) -> None:
    exported = pair.pool.export("key", [torch.ones(3)])
    far = replace(exported, leases=exported.leases | {"boot_id": "another"})
    with pytest.raises(WiringError, match=r"of Actor\(Trainer, 1234\) \(pid 5\) are on another host: .* nixl"):
        pair.reader.start(far)


def test_an_owner_that_ends_in_the_middle_is_named(slow: tuple[Pair, SlowDevice]) -> None:
    pair, device = slow
    reading = pair.reader.start(pair.pool.export("key", [torch.ones(3)]))
    late = threading.Timer(0.1, pair.pool.close)
    late.start()
    with pytest.raises(WiringError, match=r"Actor\(Trainer, 1234\) \(pid 5\) has ended"):
        reading.wait(60)
    late.join()
    reading.close()
    assert device.copies == []


@pytest.mark.parametrize("kind", [RuntimeError, CudaError])
@pytest.mark.parametrize("ends", [True, False])
def test_an_error_of_an_event_is_that_of_an_owner_that_ends(
    slow: tuple[Pair, SlowDevice], monkeypatch: pytest.MonkeyPatch, ends: bool, kind: type[Exception]
) -> None:
    """A killed process may lose its GPU before its files."""
    pair, device = slow
    reading = pair.reader.start(pair.pool.export("key", [torch.ones(3)]))
    device.writes[0].error = kind("CUDA error: unknown error")
    monkeypatch.setattr(tensor_reader, "_ENDING_S", 30.0 if ends else 0.1)
    late = threading.Timer(0.1, pair.pool.close)
    if ends:
        late.start()
    with pytest.raises(WiringError if ends else kind, match="has ended" if ends else "CUDA error"):
        reading.wait(60)
    late.cancel()
    reading.close()
    device.writes[0].error = None


def test_an_event_that_cannot_be_opened_is_named(
    slow: tuple[Pair, SlowDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, device = slow
    exported = pair.pool.export("key", [torch.ones(3)])

    def fail(handle: bytes | None) -> Mark:
        raise RuntimeError("CUDA error: invalid resource handle\nCompile with more")

    with monkeypatch.context() as patch:
        patch.setattr(device, "open_mark", fail)
        with pytest.raises(WiringError, match=r"of Actor\(Trainer, .* cannot be read here: .* resource handle$"):
            pair.reader.start(exported)
    pair.pool.release("key")
    device.writes[0].done = True
    assert pair.pool.usage().waiting == 0  # the failed read holds nothing


def test_memory_of_owners_that_have_ended_is_unmapped() -> None:
    device = HostPoolDevice()
    reader = TensorReader(device)
    for _ in range(3):
        pool = TensorPool(device, LIMITS, OWNER)
        exported = pool.export("key", [torch.ones(3)])
        reader.start(exported).wait(30)
        pool.close()
        assert reader.open_owners == 1
    with pytest.raises(WiringError, match="has ended"):
        reader.start(exported)
    assert reader.open_owners == 0
    reader.close()


def test_memory_stays_mapped_while_a_copy_reads_it(slow: tuple[Pair, SlowDevice]) -> None:
    pair, device = slow
    reading = pair.reader.start(pair.pool.export("key", [torch.ones(3)]))
    device.writes[0].done = True
    assert not reading.poll()
    pair.pool.close()
    other = TensorPool(device, LIMITS, OWNER)
    pair.reader.start(other.export("key", [torch.ones(3)])).close()
    assert pair.reader.open_owners == 2
    device.finish(device.copies[0])
    with pytest.raises(WiringError, match="has ended"):
        reading.poll()
    reading.close()
    other.close()
    third = TensorPool(device, LIMITS, OWNER)
    deadline = time.monotonic() + 60
    while pair.reader.open_owners != 1 and time.monotonic() < deadline:  # a thread lets the first read go
        pair.reader.start(third.export("key", [torch.ones(3)])).close()
        third.release("key")
        pair.reader.close_ended()
    assert pair.reader.open_owners == 1
    third.close()


def test_a_mark_is_opened_once(slow: tuple[Pair, SlowDevice]) -> None:
    pair, device = slow
    exported = pair.pool.export("key", [torch.ones(3)])
    for _ in range(3):
        pair.reader.start(exported).close()
    assert device.opened == {b"0": 1}


def test_a_capture_is_refused_before_anything_is_taken(slow: tuple[Pair, SlowDevice]) -> None:
    pair, device = slow
    device.is_capturing = True
    with pytest.raises(CaptureError, match="is captured"):
        pair.pool.export("key", [torch.ones(3)])
    assert pair.pool.usage().used_bytes == 0 and device.writes == []


def test_a_read_that_times_out_or_is_aborted_leaves_both_usable(slow: tuple[Pair, SlowDevice]) -> None:
    pair, device = slow
    exported = pair.pool.export("key", [torch.ones(3)])
    with pair.reader.start(exported) as reading, pytest.raises(TimeoutError, match=r"of Actor\(Trainer, 1234\)"):
        reading.wait(0.01)
    with pair.reader.start(exported) as reading, pytest.raises(Aborted, match="was aborted"):
        reading.wait(60, lambda: True)
    pair.pool.release("key")
    assert pair.pool.usage().waiting == 1  # the source has not written it yet
    device.writes[0].done = True
    assert pair.pool.usage().waiting == 0


class Clock:
    """A clock that only looks and pauses move."""

    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0

    def monotonic(self) -> float:
        self.now += 2e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.looks += 1


@pytest.mark.parametrize("copy_ms", [0.2, 0.9, 2.1, 3.7, 20.0, 5000.0])
def test_a_read_ends_soon_after_its_copy_without_many_looks(
    slow: tuple[Pair, SlowDevice], monkeypatch: pytest.MonkeyPatch, copy_ms: float
) -> None:
    pair, device = slow
    exported = pair.pool.export("key", [torch.ones(3)])
    device.writes[0].done = True
    clock = Clock()
    monkeypatch.setattr(tensor_reader, "time", clock)
    with pair.reader.start(exported) as reading:
        reading.poll()
        monkeypatch.setattr(device.copies[0], "is_done", lambda: clock.now >= copy_ms / 1000, raising=False)
        reading.wait()
    assert clock.now * 1000 < copy_ms * 1.06 + 0.06
    assert clock.looks < 70 + copy_ms / 2


@pytest.mark.parametrize("limits", [{"pool_bytes": 5}, {"segment_bytes": 1e9}, {"wait_s": -1}])
def test_wrong_limits_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        PoolLimits(**limits)  # type: ignore[arg-type]
