"""Messages between two ranks, put and get: eager on CPU ranks, and captured in a CUDA graph on GPUs.

    torchrun --nproc-per-node 2 examples/channel.py

Each process takes a GPU of its own where the machine has enough, else all are CPU ranks.
"""

import os

import torch
import torch.distributed as dist

import raymoe

STEPS, NUMBERS = 10, 1 << 18


def talk(world: raymoe.World, protocol: str) -> str:
    """Ranks 0 and 1 send one another a message in each step, and so do ranks 2 and 3, and so on."""
    peer = world.rank ^ 1
    message = torch.zeros(NUMBERS, device=world.device)
    seen = torch.zeros_like(message)

    def step() -> None:
        with channel.together():  # both ends send and receive, in an order that cannot block
            channel.send(message)
            received = channel.receive(message.shape, message.dtype)
        seen.copy_(received)
        channel.release()  # the peer may send the next one

    with raymoe.Channel(world, peer, message.nbytes, protocol) as channel:
        step()
        run = step
        if world.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            run = graph.replay
        for number in range(STEPS):
            message.fill_(1000 * world.rank + number)  # what a replay reads is what is there then
            run()
            expected = 1000 * peer + number
            if not bool((seen == expected).all()):
                raise SystemExit(f"rank {world.rank}: step {number} of {protocol} did not bring {expected}")
        channel.check()
        return channel.transport


def main() -> None:
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpus else "gloo")
    with raymoe.World.of() as world:
        for protocol in ("put", "get"):
            transport = talk(world, protocol)
            if world.rank == 0:
                print(
                    f"{protocol} by {transport} on {world.device.type}: {STEPS} steps of {4 * NUMBERS} bytes, verified"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
