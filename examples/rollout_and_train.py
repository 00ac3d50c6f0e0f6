"""Reinforcement learning with the same bits in rollout and training: Ray actors that generate, and actors that train.

    python examples/rollout_and_train.py

Engines generate a token at a time without gradients, in a CUDA graph on GPUs. Trainers take all tokens at once, with
gradients. Both compute the logits of one policy: the trainers replay the engines' routes, and every logit has the same
bits. After each step the engines load the trainers' weights.

The task is made up: a token earns 1 if it is the successor of the one before. If the cluster has enough GPUs, an engine
and a trainer share each of them; otherwise all are CPU ranks.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import nn

import raymoe
from raymoe.moe import (
    LayerForm,
    average_expert_gradients,
    clip_grad_norm,
    expert_parameters,
    load_weights,
    offer_weights,
    open_weights,
    record_routes,
    replay_routes,
)

RANKS, STEPS = 2, 30
VOCABULARY, HIDDEN, LAYERS = 16, 64, 2
PROMPTS, LENGTH = 16, 8  # of one rank; an engine gives PROMPTS tokens at once, a trainer PROMPTS * LENGTH


class Policy(nn.Module):
    """Embedding, layers and head: the logits of the next token follow from the last one alone."""

    def __init__(self, world: raymoe.World) -> None:
        super().__init__()
        gpu = world.device.type == "cuda"
        spec = raymoe.ExchangeSpec(
            tokens=PROMPTS * LENGTH, hidden=HIDDEN, experts=8, topk=2, dtype="bfloat16" if gpu else "float32", depth=0
        )
        form = LayerForm(ffn=32, norm=1e-6, residual=True, weights="float32", deterministic="batch")
        self.layers = nn.ModuleList([raymoe.MoELayer(world, spec, form, seed=seed) for seed in range(LAYERS)])
        draw = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, generator=draw).to(world.device))
        self.head = nn.Parameter(0.1 * torch.randn(VOCABULARY, HIDDEN, generator=draw).to(world.device))
        self.tile = 512 if gpu else 32

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = nn.functional.embedding(tokens, self.embedding)
        for layer in self.layers:
            h = layer(h)
        # The bits of torch's products depend on the number of rows, so it is always the same.
        h = nn.functional.pad(h, (0, 0, 0, -len(h) % self.tile))
        return torch.cat([nn.functional.linear(tile, self.head) for tile in h.split(self.tile)])[: len(tokens)]


class Rank:
    """The part that engines and trainers share."""

    world: raymoe.World
    policy: Policy

    def close(self) -> None:
        self.world.close()


@ray.remote
class Engine(Rank):
    """Generates tokens for the prompts of one rank."""

    def start(self, rank: int, offers: list[dict[str, Any]]) -> None:
        self.world = raymoe.join("engines", rank, RANKS)
        self.policy = Policy(self.world)
        self.tokens = torch.zeros(PROMPTS, dtype=torch.int64, device=self.world.device)
        self.opened = open_weights(self.world, offers)
        self.recording = record_routes(self.policy, tokens=PROMPTS * LENGTH)
        self.routes = self.recording.__enter__()
        self.step = self.captured() if self.world.device.type == "cuda" else lambda: self.policy(self.tokens)

    def captured(self) -> Any:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            self.policy(self.tokens)  # torch loads its kernels at the first call
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # Ray's threads may call CUDA
                logits = self.policy(self.tokens)

        def replay() -> torch.Tensor:
            graph.replay()
            return logits.clone()

        return replay

    @torch.no_grad()
    def generate(self, seed: int) -> dict[str, torch.Tensor]:
        """Load the trainers' last weights, then generate."""
        epoch = load_weights(self.policy, self.opened)
        self.routes.clear()
        draw = torch.Generator().manual_seed(seed * RANKS + self.world.rank)
        tokens, logits = [torch.randint(VOCABULARY, (PROMPTS,), generator=draw)], []
        for _ in range(LENGTH):
            self.tokens.copy_(tokens[-1])
            logits.append(self.step().cpu())
            tokens.append(torch.multinomial(logits[-1].float().softmax(-1), 1, generator=draw)[:, 0])
        routes = self.routes.ids()
        return {
            "tokens": torch.stack(tokens),
            "logits": torch.cat(logits),
            "routes": routes,
            "epoch": torch.tensor(epoch),
        }

    def close(self) -> None:
        self.recording.__exit__(None, None, None)
        self.opened.close()
        super().close()


@ray.remote
class Trainer(Rank):
    """Trains on the tokens that the engine of its rank has generated."""

    def start(self, rank: int, store: str) -> dict[str, Any]:
        gpu = torch.cuda.is_available()
        dist.init_process_group("nccl" if gpu else "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
        self.world = raymoe.World.of()
        self.policy = Policy(self.world)
        experts = expert_parameters(self.policy)
        self.others = [each for name, each in self.policy.named_parameters() if name not in experts]
        groups = [{"params": list(experts.values())}, {"params": self.others}]  # DTensors beside plain tensors
        self.optimizer = torch.optim.Adam(groups, lr=0.01)
        self.offer = offer_weights(self.policy, readers=RANKS)
        self.offer.publish()
        return self.offer.descriptor()

    def train(self, rollout: dict[str, torch.Tensor]) -> tuple[float, int]:
        """Make one step. Return the mean reward, and how many logits have other bits than the engine's."""
        rollout = {name: each.clone() for name, each in rollout.items()}  # what came through Ray is read-only
        before, after = rollout["tokens"][:-1].flatten(), rollout["tokens"][1:].flatten()
        reward = (after == (before + 1) % VOCABULARY).float()
        with replay_routes(self.policy, rollout["routes"]):
            logits = self.policy(before.to(self.world.device))
        other_bits = int((bits(logits.detach().cpu()) != bits(rollout["logits"])).sum())
        chosen = logits.log_softmax(-1).gather(1, after[:, None].to(logits.device))[:, 0]
        loss = -(chosen * (reward - reward.mean()).to(logits.device)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        for each in self.others:
            dist.all_reduce(each.grad)
            each.grad /= RANKS
        average_expert_gradients(self.policy)
        clip_grad_norm(self.policy, 1.0)
        self.optimizer.step()
        self.offer.publish()
        return reward.mean().item(), other_bits

    def close(self) -> None:
        self.offer.close()
        super().close()
        dist.destroy_process_group()


def bits(logits: torch.Tensor) -> torch.Tensor:
    return logits.contiguous().view(torch.int32 if logits.dtype == torch.float32 else torch.int16)


def steps(engines: list[Any], trainers: list[Any]) -> Iterator[float]:
    """Generate and train by turns; give the mean reward of each step."""
    for number in range(STEPS):
        rollouts = [engine.generate.remote(number) for engine in engines]
        results = [trainer.train.remote(rollout) for trainer, rollout in zip(trainers, rollouts, strict=True)]
        rewards, other_bits = zip(*ray.get(results, timeout=120), strict=True)
        epochs = {int(rollout["epoch"]) for rollout in ray.get(rollouts)}
        if any(other_bits) or epochs != {number + 1}:
            raise SystemExit(f"step {number}: {other_bits} logits have other bits; weights of epochs {epochs}")
        yield sum(rewards) / RANKS


def main() -> None:
    ray.init()
    gpus = ray.cluster_resources().get("GPU", 0) >= RANKS
    # An engine and a trainer in each bundle, all on one host, since ranks map one another's memory.
    group = placement_group([{"CPU": 0.5, "GPU": int(gpus)}] * RANKS, strategy="STRICT_PACK")
    ray.get(group.ready(), timeout=60)

    def actors(kind: Any) -> list[Any]:
        return [
            kind.options(
                num_cpus=0.25,
                num_gpus=0.5 if gpus else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            ).remote()
            for rank in range(RANKS)
        ]

    engines, trainers = actors(Engine), actors(Trainer)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        started = [trainer.start.remote(rank, store) for rank, trainer in enumerate(trainers)]
        offers = ray.get(started, timeout=120)
    ray.get([engine.start.remote(rank, offers) for rank, engine in enumerate(engines)], timeout=120)
    rewards = list(steps(engines, trainers))
    ray.get([actor.close.remote() for actor in engines + trainers], timeout=60)
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    if last < first + 0.2:
        raise SystemExit(f"the reward did not rise: {first:.2f} to {last:.2f}")
    actors_of, count = f"{RANKS} engines, {RANKS} trainers on {'cuda' if gpus else 'cpu'}", RANKS * PROMPTS * LENGTH
    logits = STEPS * count * VOCABULARY
    print(f"{actors_of}: {logits} logits with the same bits, reward {first:.2f} to {last:.2f}")


if __name__ == "__main__":
    main()
