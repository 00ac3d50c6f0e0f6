"""A user's program that uses every public name. `test_public_names.py` checks it with mypy; nothing runs it."""

from __future__ import annotations

import torch

import raymoe
from raymoe.errors import DataRefused, PeerTimeout, RaymoeError
from raymoe.moe import (
    LayerForm,
    RouterForm,
    add_rms_norm,
    combine,
    dispatch,
    grouped_linear,
    grouped_swiglu,
    layer_norm,
    rms_norm,
    swiglu,
)


def steps(world: raymoe.World, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    spec = raymoe.ExchangeSpec(tokens=128, hidden=1024, experts=32, topk=4, wire="float8_e4m3", capacity="worst")
    y = torch.empty_like(x)
    with raymoe.Workspace(world, spec) as workspace, raymoe.Exchange(world, spec, workspace=workspace, sms=32) as ex:
        got: raymoe.Dispatched = ex.dispatch(x, topk_idx, topk_weights, num_tokens=128)
        offsets: torch.Tensor = got.expert_offsets
        rows = got.x * offsets[-1]
        try:
            y = ex.combine(rows, got, weighted=True)
            ex.check()
        except DataRefused as error:
            print(error.exit_code)
        got = ex.dispatch_receive(ex.dispatch_send(x, topk_idx, topk_weights))
        y += ex.combine_receive(ex.combine_send(got.x, got))
    return y


def gated(x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = raymoe.pointwise("silu(gate) * x + bias", sms=48, x=x, gate=gate, bias=bias)
    y, total = add_rms_norm(total, x, bias)
    y = rms_norm(y, bias, batch_invariant=True)
    values, scales = rms_norm(y, bias, output="float8_e4m3", scales="column", batch_invariant=True)
    (values, scales), total = add_rms_norm(y, total, bias, 1e-5, output="float8_e4m3")
    values, scales = swiglu(layer_norm(total, bias, bias, sms=32), output="float8_e4m3")
    return swiglu(y, weights=scales[:, 0]) * values.float() * scales


def experts(got: raymoe.Dispatched, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    places = got.expert_offsets, got.expert_counts
    h: torch.Tensor = grouped_swiglu(got.x, up, *places, bias=bias, limit=7.0, interleaved=True, expected_rows=32)
    other, gate_up = grouped_swiglu(got.x, up, *places, row_weights=got.weights, return_gate_up=True)
    h += other * gate_up.mean()
    return grouped_linear(h, down, *places, row_weights=got.weights, expected_rows=32.5)


def neighbours(world: raymoe.World, message: torch.Tensor) -> torch.Tensor:
    peer = world.rank ^ 1
    nbytes = message.numel() * message.element_size()
    with raymoe.Channel(
        world, peer if peer < world.size else None, nbytes, protocol="get", transport="auto"
    ) as channel:
        with channel.together():
            channel.send(message)
            received: torch.Tensor = channel.receive(message.shape, message.dtype)
        copied = received.clone()
        channel.release()
        channel.check()
    return copied


def layers(world: raymoe.World, block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    spec = raymoe.ExchangeSpec(tokens=128, hidden=1024, experts=32, topk=4, dtype=torch.bfloat16)
    name: str = spec.dtype
    print(name)
    router = RouterForm(experts=32, topk=4, score="sigmoid", groups=8, topk_groups=4)
    layer = raymoe.MoELayer(world, spec, LayerForm(ffn=512, router=router, norm=1e-6, residual=True))
    taken = raymoe.MoELayer.from_block(block, world, tokens=128)
    y: torch.Tensor = taken(layer(x))
    got = dispatch(layer.exchange, y, torch.zeros(128, 4, dtype=torch.int64), torch.ones(128, 4))
    return combine(layer.exchange, got.x, got, weighted=False)


def main(rank: int, size: int) -> None:
    print(raymoe.__version__)
    try:
        with raymoe.World.of(device="auto", timeout_s=60.0) as world:
            print(world.device, world.name)
        with raymoe.join("experts", rank, size, device="cuda:1", timeout_s=60.0) as world:
            everybody: raymoe.World | None = world.group(range(size))
            print(everybody)
            print(neighbours(world, torch.zeros(8)), gated(torch.zeros(1, 64), torch.zeros(64), torch.zeros(64)))
    except PeerTimeout as error:
        print(error.peer, error.op, error.waited_s)
    except raymoe.errors.CaptureError as error:
        print(error.code)
    except RaymoeError as error:
        print(error)
