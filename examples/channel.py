"""Send messages between two ranks, by put and by get: captured in a CUDA graph on GPUs, eager on CPU ranks.

    torchrun --nproc-per-node 2 examples/channel.py

If the machine has enough GPUs, each process takes its own; otherwise all are CPU ranks.
"""

import os

import torch
import torch.distributed as dist

import raymoe

STEPS, FLOATS = 10, 1 << 18


def exchange_messages(world: raymoe.World, protocol: str) -> str:
    """Swap messages between ranks 0 and 1, ranks 2 and 3, and so on; return the transport."""
    peer = world.rank ^ 1
    message = torch.zeros(FLOATS, device=world.device)
    copied = torch.zeros_like(message)

    def step() -> None:
        with channel.together():  # both peers send and receive, in an order that cannot deadlock
            channel.send(message)
            received = channel.receive(message.shape, message.dtype)
        copied.copy_(received)
        channel.release()  # the peer may send its next message

    with raymoe.Channel(world, peer, message.nbytes, protocol) as channel:
        step()
        run = step
        if world.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            run = graph.replay
        for number in range(STEPS):
            message.fill_(1000 * world.rank + number)  # a replay sends the values of this moment
            run()
            expected = 1000 * peer + number
            if not bool((copied == expected).all()):
                raise SystemExit(f"rank {world.rank}: step {number} of {protocol} did not deliver {expected}")
        channel.check()
        return channel.transport


def main() -> None:
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpus else "gloo")
    with raymoe.World.of() as world:
        for protocol in ("put", "get"):
            transport = exchange_messages(world, protocol)
            if world.rank == 0:
                done = f"{STEPS} steps of {4 * FLOATS} bytes"
                print(f"{protocol} by {transport} on {world.device.type}: {done}, verified")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
