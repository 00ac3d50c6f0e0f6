"""Train a language model of bytes whose experts are spread over the ranks, and compare its loss with an unsharded run.

    torchrun --nproc-per-node 2 examples/train.py
    torchrun --nproc-per-node 2 examples/train.py --parallel fsdp --compile
    torchrun --nproc-per-node 2 --max-restarts 1 examples/train.py --folder run --kill-at 15
    python examples/train.py --ray --folder run --kill-at 15

The third and fourth write a checkpoint every ten steps. A rank kills itself, torchrun or Ray Train starts all anew, and
they go on from the last checkpoint. A later start with the same folder goes on too, also with another number of ranks.
If the machine has enough GPUs, each process takes its own; otherwise all are CPU ranks. At the end rank 0 trains the
unsharded model, which has all experts in one process and no exchange, and compares the losses.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import raymoe
from raymoe.moe import (
    LayerForm,
    RouterForm,
    average_expert_gradients,
    balance_loss,
    clip_grad_norm,
    expert_load,
    expert_parameters,
    routing_stats,
    update_router_bias,
)

HIDDEN, HEADS, LENGTH, EXPERTS, TOPK, LAYERS = 64, 4, 64, 8, 2, 3
PARTS, SEQUENCES = 2, 8  # parts of a batch, which the ranks share, and sequences of a part
MOST_STEPS, RATE, MAX_NORM, BALANCE, BIAS_SPEED = 10_000, 3e-3, 0.5, 0.01, 0.01
BOUNDS = {"cpu": 0.01, "cuda": 0.1}  # of a loss beside the unsharded run's: rounding may move a token to another expert
SOFTMAX = RouterForm(EXPERTS, TOPK)  # balanced by a loss; the others by their bias
SIGMOID = RouterForm(EXPERTS, TOPK, score="sigmoid", groups=4, topk_groups=2, scale=2.5)
TEXT = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].glob("docs/*.md")))


def part_of(step: int, part: int) -> torch.Tensor:
    """Return a part of a step's batch, the same for any number of ranks."""
    starts = torch.randint(
        len(TEXT) - LENGTH, (SEQUENCES,), generator=torch.Generator().manual_seed(PARTS * step + part)
    )
    return torch.tensor([list(TEXT[start : start + LENGTH + 1]) for start in starts.tolist()])


class Block(nn.Module):
    """Attention, and a layer of experts that returns its routing."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(HIDDEN), moe
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y, routing = self.moe(x, return_routing=True)
        return y, balance_loss(routing.logits, routing.topk_idx, self.moe.gate.form)


class PlainExperts(nn.Module):
    """The same layer with all experts in this process and no exchange: what the others are compared with."""

    def __init__(self, layer: raymoe.MoELayer) -> None:
        super().__init__()
        self.gate, self.norm, self.shared, self.experts = layer.gate, layer.norm, layer.shared_experts, layer.experts
        self.load = torch.zeros(EXPERTS, dtype=torch.int64, device=layer.world.device)

    def forward(self, x: torch.Tensor, return_routing: bool) -> tuple[torch.Tensor, object]:
        assert return_routing
        flat = x.flatten(0, 1)
        h = self.norm(flat)
        routing = self.gate(h)
        y = flat + self.shared(h)
        for expert, (gate_up, down) in enumerate(zip(self.experts.gate_up_proj, self.experts.down_proj, strict=True)):
            token, k = (routing.topk_idx == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(h[token], gate_up).chunk(2, -1)
            rows = functional.linear(functional.silu(gate) * up, down) * routing.topk_weights[token, k, None]
            y = y.index_add(0, token, rows.to(y.dtype))
        self.load += expert_load(routing.topk_idx, EXPERTS)
        return y.view_as(x), routing

    def update_bias(self) -> None:
        if self.gate.e_score_correction_bias is not None:
            self.gate.e_score_correction_bias += BIAS_SPEED * torch.sign(self.load.float().mean() - self.load)
        self.load.zero_()


class Model(nn.Module):
    """Bytes to logits. `forward` returns the loss of a part, and the loss that balances the first layer."""

    def __init__(self, world: raymoe.World, unsharded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        dtype = torch.float32 if world.device.type == "cpu" else torch.bfloat16
        spec = raymoe.ExchangeSpec(SEQUENCES * LENGTH, HIDDEN, EXPERTS, TOPK, dtype=dtype, depth=0)
        routers = [SOFTMAX] + (LAYERS - 1) * [SIGMOID]
        forms = [LayerForm(64, router, shared=32, norm=1e-6, residual=True) for router in routers]
        layers = [raymoe.MoELayer(world, spec, form, seed=seed) for seed, form in enumerate(forms)]
        self.bytes, self.places = nn.Embedding(256, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block(PlainExperts(layer) if unsharded else layer) for layer in layers)
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256, bias=False)
        self.to(world.device, dtype)

    def forward(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, balance = self.bytes(part[:, :-1]) + self.places.weight, []
        for block in self.blocks:
            x, loss = block(x)
            balance.append(loss)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), part[:, 1:].flatten()), balance[
            0
        ]


def wrap(plain: Model, parallel: str, world: raymoe.World) -> nn.Module:
    """Let DDP or FSDP2 take all parameters but the experts."""
    experts = expert_parameters(plain)
    if parallel == "ddp":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, list(experts))
        return DistributedDataParallel(plain)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for module in (*plain.blocks, plain):
        fully_shard(module, mesh=mesh, ignored_params=set(experts.values()))
    return plain


def train(world: raymoe.World, options: argparse.Namespace, unsharded: bool = False) -> tuple[torch.Tensor, int]:
    """Train; return the loss of each step, and the step of the checkpoint from which this process went on."""
    plain = Model(world, unsharded)
    model = plain if unsharded else wrap(plain, options.parallel, world)
    step_of = torch.compile(model) if options.compile and not unsharded else model
    experts = expert_parameters(plain)
    others = [parameter for name, parameter in plain.named_parameters() if name not in experts]
    groups = [{"params": each} for each in (list(experts.values()), others) if each]
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=0.1)
    first, losses = torch.zeros((), dtype=torch.int64), torch.zeros(MOST_STEPS)

    def state() -> dict[str, object]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": first, "losses": losses}

    folder = None if unsharded else options.folder
    if folder and (saved := sorted(folder.glob("step-*/.metadata"))):  # .metadata is written last
        dcp.load(loaded := state(), checkpoint_id=saved[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    resumed = int(first)
    for step in range(resumed, options.steps):
        if not resumed and step == options.kill_at and world.rank == world.size - 1 and not unsharded:
            os.kill(os.getpid(), signal.SIGKILL)
        for part in range(world.rank, PARTS, world.size):
            loss, balance = step_of(part_of(step, part).to(world.device))
            ((loss + BALANCE * balance) * world.size / PARTS).backward()
            losses[step] += loss.detach().cpu() / PARTS
        average_expert_gradients(plain)
        norm = clip_grad_norm(plain, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if unsharded:
            for block in plain.blocks:
                block.moe.update_bias()
            continue
        update_router_bias(plain, BIAS_SPEED)
        losses[step] = sum(world.swap(float(losses[step]), "loss"))
        if (step + 1) % 10 == 0:
            busy = [f"{stats.imbalance:.2f}" for stats in routing_stats(plain).values()]
            if world.rank == 0:
                print(
                    f"step {step + 1}: loss {losses[step]:.4f}, norm {norm:.3f}, imbalance {' '.join(busy)}", flush=True
                )
            if folder:
                first.fill_(step + 1)
                dcp.save(state(), checkpoint_id=folder / f"step-{step + 1:06}")
    return losses[: options.steps], resumed


def work(options: argparse.Namespace) -> str:
    """Train on this rank, with the process group that torchrun or Ray Train made; compare on rank 0, and say how."""
    with raymoe.World.of(timeout_s=300 if options.compile else 60) as world:
        losses, resumed = train(world, options)
    if world.rank:
        return ""
    with raymoe.World.open(0, 1, device=str(world.device)) as alone:
        alone.wire([alone.descriptor()])
        wanted, _ = train(alone, options, unsharded=True)
    if options.out:
        facts = {"parallel": options.parallel, "compiled": options.compile, "ranks": world.size, "resumed": resumed}
        with options.out.open("a") as out:
            out.write(json.dumps(facts | {"losses": losses.tolist(), "unsharded": wanted.tolist()}) + "\n")
    difference = float((losses - wanted).abs().max())
    assert difference <= BOUNDS[world.device.type], f"losses {losses.tolist()}, unsharded {wanted.tolist()}"
    return (
        f"{world.size} ranks on {world.device.type} by {options.parallel}: steps {resumed} to {options.steps}, loss "
        f"{losses[0]:.4f} to {losses[-1]:.4f}, the unsharded run's to {difference:.0e}\n"
    )


def run_by_ray_train(options: argparse.Namespace) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init()
    gpus = ray.cluster_resources().get("GPU", 0) >= PARTS
    each = {"CPU": 0.5, "GPU": 1} if gpus else {"CPU": 0.5}
    workers = ScalingConfig(
        num_workers=PARTS, use_gpu=gpus, resources_per_worker=each, placement_strategy="STRICT_PACK"
    )
    trainer = TorchTrainer(
        lambda: work(options),
        scaling_config=workers,
        run_config=RunConfig(storage_path=str(options.folder), failure_config=FailureConfig(max_failures=1)),
    )
    print(trainer.fit().return_value, end="")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--folder", type=lambda text: Path(text).resolve(), help="checkpoints; a run goes on from the last"
    )
    parser.add_argument("--kill-at", type=int, default=-1, help="the step at which a rank kills itself, the first time")
    parser.add_argument("--out", type=lambda text: Path(text).resolve(), help="a file to which the losses are added")
    parser.add_argument("--ray", action="store_true", help="start two workers by Ray Train")
    options = parser.parse_args()
    if options.ray:
        run_by_ray_train(options)
        return
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, ranks = next(dist.rendezvous("env://"))
    # torchrun keeps its store over a restart, and Gloo would find the addresses of the ranks before it there.
    store = dist.PrefixStore(f"restart-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("nccl" if gpus else "gloo", store=store, rank=rank, world_size=ranks)
    print(work(options), end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
