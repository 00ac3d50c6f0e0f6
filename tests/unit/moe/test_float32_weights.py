"""Layers with float32 weights over rows of 16 bits, compared with a model that is not sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer, expert_parameters
from raymoe.moe.experts import local
from raymoe.moe.router import route
from raymoe.rows import formulas
from tests.unit.ranks import RankPool
from tests.unit.worlds import wired

H, TOKENS, CLASSES = 32, 48, 8
SPEC = ExchangeSpec(tokens=TOKENS, hidden=H, experts=4, topk=2, dtype="bfloat16", depth=0)
ALL = replace(SPEC, topk=4)
"""Each token has all experts, so rounding changes no choice."""
FORM = LayerForm(ffn=16, biases=True, shared=24, norm=1e-6, residual=True, weights="float32")
Gradients = dict[str, torch.Tensor]


class Model(nn.Module):
    """Two layers between two linear ones."""

    def __init__(self, layers: list[nn.Module], recompute: bool = False, hidden: int = H) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(0)
        self.first, self.last = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, CLASSES, bias=False)
        for linear in (self.first, self.last):
            nn.init.normal_(linear.weight, std=hidden**-0.5, generator=source)
        self.layers, self.recompute = nn.ModuleList(layers), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.last(x)


class Whole(nn.Module):
    """The layer by plain torch: all experts here, float32 parameters, rows of bfloat16."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.form, self.experts = layer.gate.form, nn.Module()
        self.gate, self.norm, self.shared_experts = (
            copy.deepcopy(each) for each in (layer.gate, layer.norm, layer.shared_experts)
        )
        for name, each in layer.experts.named_parameters():
            self.experts.register_parameter(name, nn.Parameter(whole(each).clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            h = formulas.rms_norm(x, self.norm.weight, self.norm.eps).bfloat16()
            ids, weights = route(h.float() @ self.gate.weight.T, self.form)
            y = torch.zeros(h.shape, device=h.device)
            own = self.experts
            for e in range(len(own.down_proj)):
                token, place = (ids == e).nonzero(as_tuple=True)
                gate_up = h[token] @ own.gate_up_proj[e].bfloat16().T
                gate, up = (gate_up.float() + own.gate_up_proj_bias[e]).bfloat16().chunk(2, dim=-1)
                rows = (nn.functional.silu(gate) * up) @ own.down_proj[e].bfloat16().T
                rows = (rows.float() + own.down_proj_bias[e]) * weights[token, place, None]
                y = y.index_add(0, token, rows)
            gate, up = (h @ self.shared_experts.gate_up_proj.bfloat16().T).chunk(2, dim=-1)
            shared = (nn.functional.silu(gate) * up) @ self.shared_experts.down_proj.bfloat16().T
            return (x + y + shared).to(x.dtype)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' parts of a DTensor."""
    every: Any = tensor.detach()
    return every.full_tensor() if hasattr(every, "full_tensor") else every


def batch(step: int, hidden: int = H) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(100 + step)
    return torch.randn(TOKENS, hidden, generator=source), torch.randint(CLASSES, (TOKENS,), generator=source)


# The ways to train.


def manual(model: Model) -> nn.Module:
    return model


def under_ddp(model: Model) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(expert_parameters(model)))
    return DistributedDataParallel(model)


def under_fsdp(model: Model, **options: Any) -> nn.Module:
    ignored = set(expert_parameters(model).values())
    for layer in model.layers:
        fully_shard(layer, ignored_params=ignored, **options)
    fully_shard(model, ignored_params=ignored, **options)
    return model


def under_fsdp_mixed(model: Model) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return under_fsdp(model, mp_policy=policy)


def autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, dtype=torch.bfloat16)


def no_cast(_: str) -> AbstractContextManager[Any]:
    return nullcontext()


def compiled(model: Model) -> nn.Module:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


WAYS: dict[str, tuple[Callable[[Model], nn.Module], bool, Callable[[str], AbstractContextManager[Any]]]] = {
    "manual": (manual, False, no_cast),
    "DDP": (under_ddp, False, no_cast),
    "FSDP2": (under_fsdp, False, no_cast),
    "FSDP2 mixed": (under_fsdp_mixed, False, no_cast),
    "FSDP2 mixed recomputed": (under_fsdp_mixed, True, no_cast),
    "autocast": (manual, False, autocast),
    "autocast DDP": (under_ddp, False, autocast),
    "recomputed": (manual, True, no_cast),
    "compiled": (compiled, False, no_cast),
    "compiled recomputed autocast": (compiled, True, autocast),
}


@contextmanager
def of_group(world: World, store: str) -> Iterator[World]:
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        with World.of(timeout_s=60) as own:
            yield own
    finally:
        dist.destroy_process_group()


def average(model: Model, world: World, others: bool) -> None:
    """Average the gradients over the ranks: those of experts are sums already, others only where nothing does it."""
    own = expert_parameters(model)
    for name, parameter in model.named_parameters():
        if name in own:
            parameter.grad.div_(world.size)
        elif others:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world.size)


def optimizer_of(model: Model, lr: float) -> torch.optim.Optimizer:
    own = expert_parameters(model)
    others = [each for name, each in model.named_parameters() if name not in own]
    return torch.optim.AdamW([{"params": list(own.values())}, {"params": others}], lr=lr)


def trained(
    world: World, store: str, way: str, steps: int, hidden: int = H
) -> tuple[list[float], list[Gradients], list[float]]:
    """Train; return the losses, the gradients of the first step, the same of the reference, and its losses."""
    wrap, recompute, context = WAYS[way]
    spec, form = replace(ALL, hidden=hidden), replace(FORM, ffn=hidden // 2, shared=hidden * 3 // 4)
    if wrap is compiled:
        torch.compiler.reset()
    with of_group(world, store) as own:
        device = own.device
        plain = Model([MoELayer(own, spec, form) for _ in range(2)], recompute, hidden).to(device)
        reference = Model([Whole(layer) for layer in plain.layers], hidden=hidden).to(device)
        model = wrap(plain)
        optimizers = optimizer_of(plain, 3e-3), torch.optim.AdamW(reference.parameters(), lr=3e-3)
        losses, first, wanted = [], [], []
        for step in range(steps):
            x, classes = (each.to(device) for each in batch(step, hidden))
            with context(device.type):
                loss = nn.functional.cross_entropy(reference(x).float(), classes)
            loss.backward()
            wanted.append(float(loss))
            mine = slice(world.rank * TOKENS // world.size, (world.rank + 1) * TOKENS // world.size)
            with context(device.type):
                loss = nn.functional.cross_entropy(model(x[mine]).float(), classes[mine])
            loss.backward()
            average(plain, own, others=wrap in (manual, compiled))
            total = loss.detach()
            dist.all_reduce(total)
            losses.append(float(total) / world.size)
            if not step:
                first = [
                    {name: whole(each.grad).cpu() for name, each in m.named_parameters()} for m in (plain, reference)
                ]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        states = [value for state in optimizers[0].state.values() for value in state.values() if value.dim()]
        assert len(states) == 2 * len(list(plain.parameters()))
        assert {each.dtype for each in (*states, *plain.parameters())} == {torch.float32}
        return losses, first, wanted


def error(have: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((have.double() - wanted.double()).norm() / wanted.double().norm())


FAST = ("manual", "FSDP2 mixed", "autocast DDP")


@pytest.mark.parametrize("way", [pytest.param(w, marks=[] if w in FAST else pytest.mark.thorough) for w in WAYS])
def test_training_is_that_of_a_model_with_float32_weights_that_is_not_sharded(
    pool: RankPool, tmp_path: Path, way: str
) -> None:
    bound = 0.03 if "mixed" in way or "autocast" in way else 0.015  # there the linear layers are bfloat16 too
    for losses, (gradients, wanted_gradients), wanted in pool.run(2, trained, str(tmp_path / "store"), way, 5):
        assert gradients.keys() == wanted_gradients.keys() and len(gradients) == 2 + 2 * 8
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32, name
            assert error(gradient, wanted_gradients[name]) < bound, name
        assert losses == pytest.approx(wanted, rel=bound)


# The cast.


def beside_narrow(world: World, store: str, transposed: bool) -> list[bool]:
    """Run a given routing with float32 weights and with weights of bfloat16; compare all bits."""
    with of_group(world, store) as own:
        wide, narrow = (
            MoELayer(own, SPEC, LayerForm(ffn=16, shared=24, weights=weights), seed=4) for weights in ("float32", None)
        )
        results = []
        for layer in (wide, narrow):
            if transposed:
                layer.experts.transposed = True
                for name, each in list(layer.experts.named_parameters()):
                    setattr(layer.experts, name, nn.Parameter(each.detach().transpose(1, 2).clone()))
            x = batch(world.rank)[0].bfloat16().requires_grad_()
            weights, ids = torch.rand(TOKENS, 4, generator=torch.Generator().manual_seed(world.rank)).topk(2)
            weights.requires_grad_()
            y = layer.apply_experts(x, ids, weights)
            y.float().square().sum().backward()
            with torch.no_grad():
                again = layer.apply_experts(x, ids, weights)
            gradients = [local(each.grad) for each in (*layer.experts.parameters(), *layer.shared_experts.parameters())]
            results.append([y.detach(), again, x.grad, weights.grad, *gradients])
        assert {each.dtype for each in results[0][4:]} == {torch.float32}
        assert {each.dtype for each in results[1][4:]} == {torch.bfloat16}
        return [torch.equal(a.float(), b.float()) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_see_the_weights_rounded_once(pool: RankPool, tmp_path: Path, transposed: bool) -> None:
    for found in pool.run(2, beside_narrow, str(tmp_path / "store"), transposed):
        assert found == [True] * 8


def test_the_output_has_the_dtype_of_x_and_the_router_keeps_its_bits() -> None:
    """A router of float32 sees weights that bfloat16 cannot hold."""
    (world,) = wired(1)
    with world:
        layer, x = MoELayer(world, SPEC, FORM), batch(0)[0]
        for dtype in (torch.float32, torch.bfloat16):
            assert layer(x.to(dtype)).dtype == dtype
        rows = x.bfloat16()
        logits = layer.gate(rows).logits
        torch.testing.assert_close(logits.double(), rows.double() @ layer.gate.weight.double().T, rtol=1e-5, atol=1e-5)
        narrow = MoELayer(world, SPEC, LayerForm(ffn=16))
        with pytest.raises(ConfigError, match=r"x is torch.float32; torch.bfloat16 is needed"):
            narrow(x)


@pytest.mark.parametrize("weights", ["float32", torch.float32])
def test_weights_take_names_and_dtypes_of_torch(weights: Any) -> None:
    (world,) = wired(1)
    with world:
        layer = MoELayer(world, SPEC, LayerForm(ffn=16, shared=8, norm=1e-6, weights=weights))
        assert {each.dtype for each in layer.parameters()} == {torch.float32}
        assert layer.exchange.spec.dtype == "bfloat16"


def test_other_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="weights is 'float64'; it is one of bfloat16, float16, float32, or None"):
        LayerForm(ffn=16, weights=torch.float64)
    (world,) = wired(1)
    with world, pytest.raises(ConfigError, match="'float16' with rows of bfloat16; it is float32 or the dtype of the"):
        MoELayer(world, SPEC, LayerForm(ffn=16, weights="float16"))


# The reason.


def changed(weights: str | None) -> float:
    """Return the share of all weights that 20 steps of AdamW at 1e-5 change."""
    (world,) = wired(1)
    with world:
        form = LayerForm(ffn=16, shared=24, norm=1e-6, residual=True, weights=weights)
        model = MoELayer(world, SPEC, form, seed=0)
        before = [each.detach().clone() for each in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        for step in range(20):
            model(batch(step)[0].bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        moved = [(each != old).flatten() for each, old in zip(model.parameters(), before, strict=True)]
        return float(torch.cat(moved).float().mean())


def test_small_steps_change_float32_weights_and_hardly_any_of_bfloat16() -> None:
    assert changed("float32") > 0.99
    assert changed(None) < 0.1


# Checkpoints.


def saved(world: World, store: str, folder: str, save: bool) -> list[bool]:
    """Save a model and its optimizer after a step, or load them into another; return whether they are the same."""
    with of_group(world, store) as own:
        model = Model([MoELayer(own, SPEC, FORM, seed=1 if save else 2)])
        optimizer = optimizer_of(model, 1e-2)
        model(batch(0)[0]).square().mean().backward()
        if not save:
            optimizer.step()  # makes its state
        reference = torch.load(f"{folder}.pt") if not save else {}
        if save:
            optimizer.step()
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
            names = {each: name for name, each in model.named_parameters()}
            values = {name: whole(each) for name, each in model.named_parameters()}
            values |= {f"{names[p]} squared": whole(state["exp_avg_sq"]) for p, state in optimizer.state.items()}
            if world.rank == 0:
                torch.save(values, f"{folder}.pt")
            return []
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found = []
        for name, each in model.named_parameters():
            of_state = whole(optimizer.state[each]["exp_avg_sq"])
            found.append(torch.equal(whole(each), reference[name]) and each.dtype == torch.float32)
            found.append(torch.equal(of_state, reference[f"{name} squared"]) and of_state.dtype == torch.float32)
        return found


def test_weights_and_optimizer_are_loaded_on_another_number_of_ranks(pool: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    pool.run(2, saved, str(tmp_path / "two"), folder, True)
    for ranks in (1, 2):
        for found in pool.run(ranks, saved, str(tmp_path / f"again {ranks}"), folder, False):
            assert len(found) == 2 * 10 and all(found)
