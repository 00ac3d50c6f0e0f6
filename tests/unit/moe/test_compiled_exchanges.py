"""Exchanges in functions that torch.compile compiles: all calls run, in the order of the program, for every size."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from raymoe.errors import ConfigError
from raymoe.exchange.cpu.cpu_backend import CpuBackend
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer
from raymoe.moe.compiled_order import keep_order
from raymoe.moe.differentiable import combine, dispatch
from tests.python_path import python_path
from tests.unit.worlds import wired

H, E, K = 64, 4, 2
SPEC = ExchangeSpec(tokens=512, hidden=H, experts=E, topk=K, dtype="float32", depth=0, padding="zero")
Calls = list[tuple[str, int]]


@pytest.fixture
def world() -> Iterator[World]:
    (alone,) = wired(1)
    with alone:
        yield alone


@pytest.fixture
def exchange(world: World) -> Iterator[Exchange]:
    torch.compiler.reset()
    with Exchange(world, SPEC) as exchange:
        yield exchange


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The operations that run: their names and numbers of tokens."""
    seen: Calls = []

    def watch(name: str, tokens_of: Callable[..., int]) -> None:
        real = getattr(CpuBackend, name)

        def watched(*arguments: object) -> object:
            seen.append((name, tokens_of(*arguments[1:])))
            return real(*arguments)

        monkeypatch.setattr(CpuBackend, name, watched)

    for name in ("dispatch", "dispatch_again"):
        watch(name, lambda tokens, *_: len(tokens.x))
    for name in ("combine", "combine_gradients"):
        watch(name, lambda _rows, *others: others[-1].shape[0])
    return seen


def inputs(*tokens: int, grad: bool = False) -> list[torch.Tensor]:
    """x, ids and weights for each number of tokens."""
    source = torch.Generator().manual_seed(0)
    tensors = []
    for n in tokens:
        x = torch.randn(n, H, generator=source).requires_grad_(grad)
        ids, weights = torch.randint(0, E, (n, K), generator=source), torch.rand(n, K, generator=source)
        tensors += [x, ids, weights]
    return tensors


def pair(exchange: Exchange, *tensors: torch.Tensor) -> torch.Tensor:
    """Two independent exchanges of rows."""
    a, b = (dispatch(exchange, x.tanh(), ids, weights) for x, ids, weights in (tensors[:3], tensors[3:]))
    return combine(exchange, a.x * 2, a).sum() + combine(exchange, b.x * 3, b).sum()


def one_unused(exchange: Exchange, *tensors: torch.Tensor) -> torch.Tensor:
    """Two exchanges of rows. The result of the second one is not used."""
    a, b = (dispatch(exchange, x.tanh(), ids, weights) for x, ids, weights in (tensors[:3], tensors[3:]))
    y = combine(exchange, a.x * 2, a)
    combine(exchange, b.x * 3, b)
    return y.sum()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("sizes", [(512, 16), (16, 512), (0, 16)])
def test_inductor_keeps_the_order_of_independent_exchanges(
    exchange: Exchange, calls: Calls, sizes: tuple[int, int], grad: bool
) -> None:
    tensors = inputs(*sizes, grad=grad)
    y = torch.compile(pair, fullgraph=True, dynamic=False)(exchange, *tensors)
    a, b = sizes
    assert calls == [("dispatch", a), ("dispatch", b), ("combine", a), ("combine", b)]
    calls.clear()
    torch.testing.assert_close(y, pair(exchange, *tensors))
    if grad:
        calls.clear()
        y.backward()
        assert calls == [
            ("dispatch_again", b),
            ("dispatch_again", a),
            ("combine_gradients", b),
            ("combine_gradients", a),
        ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("grad", [True, False])
def test_inductor_leaves_out_no_call_whose_result_is_unused(exchange: Exchange, calls: Calls, grad: bool) -> None:
    y = torch.compile(one_unused, fullgraph=True, dynamic=False)(exchange, *inputs(8, 16, grad=grad))
    assert calls == [("dispatch", 8), ("dispatch", 16), ("combine", 8), ("combine", 16)]
    if grad:
        calls.clear()
        y.backward()
        assert calls == [("dispatch_again", 8), ("combine_gradients", 8)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tokens", [4, 0])
def test_checkpointed_layers_are_computed_again_one_after_the_other(
    exchange: Exchange, calls: Calls, tokens: int
) -> None:
    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        got = dispatch(exchange, x, ids, weights)
        return x + combine(exchange, torch.tanh(got.x), got)

    def three(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = checkpoint(layer, x, ids, weights, use_reentrant=False)
        return x.sum()

    torch.compile(three, fullgraph=True, dynamic=False)(*inputs(tokens, grad=True)).backward()
    names = [name for name, _ in calls]
    assert names == ["dispatch", "combine"] * 3 + ["dispatch", "dispatch_again", "combine_gradients"] * 3


@pytest.mark.parametrize("dynamic", [None, True])
def test_one_function_serves_any_number_of_exchanges_and_tokens(world: World, dynamic: bool | None) -> None:
    torch.compiler.reset()

    def step(exchange: Exchange, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        got = dispatch(exchange, x, ids, weights)
        return combine(exchange, torch.tanh(got.x), got)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for capacity in ("worst", 64, 96):
        spec = ExchangeSpec(tokens=8, hidden=H, experts=E, topk=K, dtype="float32", depth=0, capacity=capacity)
        with Exchange(world, spec) as exchange:
            for tokens in (5, 3):
                tensors = inputs(tokens)
                torch.testing.assert_close(compiled(exchange, *tensors), step(exchange, *tensors))


def test_tracing_needs_no_exchange() -> None:
    """A graph from torch's cache on disk may be of another process. Its sizes are in the graph."""
    with FakeTensorMode():
        x, ids, weights = torch.empty(3, 8), torch.empty(3, 2, dtype=torch.int64), torch.empty(3, 2)
        rows, places, offsets, counts, metadata = torch.ops.raymoe.dispatch([99, 40, 4, 11, 0], 0, x, ids, weights, [])
        y, called = torch.ops.raymoe.combine([99, 40, 4, 11, 0], 0, rows, places, [ids, metadata, offsets], True)
        known = torch.ops.raymoe.dispatch_gradients([99, 40, 4, 11, 0], 0, x, [ids, metadata, offsets], 40)
    sizes = [list(each.shape) for each in (rows, places, offsets, counts, metadata, y, called, known)]
    assert sizes == [[40, 8], [40], [5], [4], [11], [3, 8], [1], [40, 8]]


CACHED = """
import sys, torch
from torch._dynamo.utils import counters
from raymoe import ExchangeSpec, World
from raymoe.moe import LayerForm, MoELayer
world = World.open(rank=0, size=1)
world.wire([world.descriptor()])
spec = ExchangeSpec(tokens=8, hidden=32, experts=4, topk=2, dtype="float32", capacity=int(sys.argv[1]), depth=0)
layer = MoELayer(world, spec, LayerForm(ffn=16))
x = torch.ones(5, 32, requires_grad=True)
y = torch.compile(layer)(x)
y.sum().backward()
torch.testing.assert_close(y, layer(x))
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.soak
def test_a_restart_with_other_sizes_takes_no_graph_of_the_old_ones(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": python_path()}
    hits = [
        int(subprocess.check_output([sys.executable, "-c", CACHED, capacity], env=environment, timeout=300))
        for capacity in ("64", "64", "80")
    ]
    assert hits[0] == 0 and hits[1] > 0 and hits[2] == 0


@pytest.mark.parametrize("strict", [False, True])
def test_export_is_refused(exchange: Exchange, strict: bool) -> None:
    class Step(torch.nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            got = dispatch(exchange, x, ids, weights)
            return combine(exchange, got.x, got)

    with pytest.raises(
        Exception, match=r"dispatch or combine inside torch\.export: an exchange belongs to the processes"
    ):
        torch.export.export(Step(), tuple(inputs(3)), strict=strict)


def test_an_inductor_that_cannot_keep_the_order_is_refused() -> None:
    import torch._inductor.lowering

    with (
        mock.patch.object(torch._inductor.ir, "FallbackKernel", new=object()),
        pytest.raises(ConfigError, match=r"cannot keep the order of exchanges in graphs that Inductor compiles"),
    ):
        keep_order("an operator")


@pytest.mark.thorough
def test_a_layer_compiles_for_ranks_with_and_without_tokens(world: World, calls: Calls) -> None:
    torch.compiler.reset()
    spec = ExchangeSpec(tokens=8, hidden=8, experts=2, topk=1, dtype="float32", depth=0)
    layer = MoELayer(world, spec, LayerForm(ffn=4, residual=True))
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    for tokens in (5, 0):
        calls.clear()
        compiled(torch.ones(tokens, 8)).sum().backward()
        names = [name for name, _ in calls]
        assert names == ["dispatch", "combine", "dispatch_again", "combine_gradients"]
