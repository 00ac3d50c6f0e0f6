"""Generate text with a Hugging Face model whose experts are spread over the ranks by raymoe.

    torchrun --nproc-per-node 2 examples/transformers_moe.py

The model is a tiny Qwen3-MoE with random weights, so its text means nothing. Each rank continues prompts of its own. It
compares the tokens with those of the same model unsharded, and the gradients of one training step.

    torchrun --nproc-per-node 2 examples/transformers_moe.py --fp8

Each block becomes a layer of raymoe whose experts are quantised to 8 bits, on GPUs where there are some. The program
prints how far the logits are from those of the unsharded model, whose experts are wide.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from raymoe import MoELayer, World
from raymoe.integrations.transformers import register

LENGTH, NEW = 6, 8
LARGEST_ERROR = 0.25
"""Of the logits with 8-bit experts (rms). Some percent are usual, and more where a token goes to other experts."""
CONFIG = Qwen3MoeConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
)


def write_model(folder: Path) -> None:
    """Save a model with random weights."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(CONFIG)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


def main(folder: Path) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    prompts = torch.randint(1, CONFIG.vocab_size, (rank + 1, LENGTH), generator=torch.Generator().manual_seed(rank))
    with register(tokens=64):
        config = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="raymoe")
        model = Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=config)
        with torch.no_grad():
            tokens = model.generate(prompts, max_new_tokens=NEW, do_sample=False)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        gradient = model.model.layers[0].mlp.experts.down_proj.grad.full_tensor()

    alone = Qwen3MoeForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        wanted = alone.generate(prompts, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(tokens, wanted), f"rank {rank}: other tokens than the unsharded model's"
    alone_loss = alone(tokens, labels=tokens).loss
    alone_loss.backward()
    torch.testing.assert_close(loss, alone_loss, rtol=1e-5, atol=1e-5)
    whole = alone.model.layers[0].mlp.experts.down_proj.grad
    dist.all_reduce(whole)  # FSDP averages over the ranks' batches
    torch.testing.assert_close(gradient, whole / ranks, rtol=1e-4, atol=1e-5)
    print(f"rank {rank} on cpu: {len(prompts)} x {NEW} tokens by raymoe, as the unsharded model; gradients too")


@torch.no_grad()
def main_fp8(folder: Path) -> None:
    rank = dist.get_rank()
    prompts = torch.randint(1, CONFIG.vocab_size, (rank + 1, LENGTH), generator=torch.Generator().manual_seed(rank))
    with World.of() as world:
        device, dtype = world.device, torch.float32 if world.device.type == "cpu" else torch.bfloat16
        model, wide = (Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype).to(device) for _ in range(2))
        for layer in model.model.layers:
            layer.mlp = MoELayer.from_block(layer.mlp, world, tokens=64, experts_dtype="float8_e4m3")
        tokens = model.generate(prompts.to(device), max_new_tokens=NEW, do_sample=False)
        logits, wanted = (each(tokens).logits.double() for each in (model, wide))
        error = float((logits - wanted).norm() / wanted.norm())
        assert 0 < error < LARGEST_ERROR, f"rank {rank}: logits are {error:.1%} from those of wide experts"
        dist.barrier()  # no rank closes the world while another one still generates
    name, text = str(dtype).removeprefix("torch."), f"{len(prompts)} x {NEW} tokens"
    print(f"rank {rank} on {device}: {text} with 8-bit experts, logits {error:.1%} from the {name} model's\n", end="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Generate text by a model with its experts on raymoe.")
    parser.add_argument("--fp8", action="store_true", help="let the experts have 8 bits")
    fp8 = parser.parse_args().fp8
    gpus = fp8 and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)  # rank 0's folder
        if dist.get_rank() == 0:
            write_model(Path(own))
        dist.barrier()
        (main_fp8 if fp8 else main)(Path(shared[0]))
        dist.barrier()
    dist.destroy_process_group()
