"""The step time of a torchtitan model by each dispatcher in turns: its all-to-all, DeepEP's, and raymoe's.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.perf.torchtitan_step --out step.jsonl

Four layers of Qwen3-30B-A3B, in bfloat16 by FSDP with expert parallelism over all ranks: forward, loss and backward
pass, without an optimizer. One model has all dispatchers in turn, so weights and tokens are the same. Rank 0 prints a
line of JSON for each: its loss, the relative difference of all its gradients from the all-to-all's, the median and
range of its times. A dispatcher that does not run has a line with the reason. `captured` is raymoe's step as a CUDA
graph by torchtitan's own wrapper; with it the all-to-all cannot run, whose host waits for the counts of rows.

Without a GPU it takes a small model on Gloo, and `examples` must be on the path.
"""

from __future__ import annotations

import argparse
import os
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp as fsdp

ON_GPU = torch.cuda.is_available()
NESTED = not hasattr(fsdp, "DataParallelMeshDims")
"""Whether torch, such as 2.11, cannot shard the parameters of one module over two meshes, as torchtitan 0.3 does."""
if NESTED:
    fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})  # type: ignore[attr-defined]
if not hasattr(torch.compiler, "_is_non_strict_tracing"):  # nothing is traced here
    torch.compiler._is_non_strict_tracing = lambda: False  # type: ignore[attr-defined]
if not ON_GPU:
    import torchtitan_on_ray.cpu as on_cpu  # before the other modules of torchtitan

import torch.distributed as dist  # noqa: E402
import torchtitan.distributed.utils as dist_utils  # noqa: E402
from torch.nn import functional  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig, derive  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.moe import RoutedExperts  # noqa: E402
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher  # noqa: E402
from torchtitan.models.qwen3 import model_registry, parallelize  # noqa: E402

from raymoe.integrations.torchtitan import RaymoeTokenDispatcher  # noqa: E402
from tests.perf.host_steps import Comparison, begin_ranks  # noqa: E402

RAYMOE: dict[str, dict[str, Any]] = {
    "raymoe": {},
    "raymoe, capacity 1.5": {"capacity": 1.5},
    "raymoe, exact": {"exact": True},
}
OWN, DEEP, CAPTURED = "torchtitan all-to-all", "torchtitan DeepEP", "raymoe, capacity 1.5, captured"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096 if ON_GPU else 64, help="tokens of a rank")
    parser.add_argument("--layers", type=int, default=4 if ON_GPU else 2)
    parser.add_argument("--vocabulary", type=int, default=16384 if ON_GPU else 2048)
    parser.add_argument("--rounds", type=int, default=15 if ON_GPU else 3)
    parser.add_argument("--without", nargs="*", default=[], help="dispatchers that are left out, by their names")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    return parser.parse_args()


def shard_nested(model: Any, dp_mesh: Any, *, param_dtype: Any, reduce_dtype: Any, edp_mesh: Any, **_: Any) -> None:
    """Shard the experts of each layer by themselves, and then the layer, as torchtitan did before."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for layer in model.layers.values():
        fsdp.fully_shard(layer.moe.routed_experts.inner_experts, mesh=edp_mesh, mp_policy=policy)
        fsdp.fully_shard(layer, mesh=dp_mesh, mp_policy=policy)
    fsdp.fully_shard(model, mesh=dp_mesh, mp_policy=policy)
    disable_fsdp_gradient_division(model)


def build(chosen: argparse.Namespace, device: torch.device) -> tuple[torch.nn.Module, Any]:
    """Build the model with torchtitan's own parallelism; return it and its dimensions."""
    if NESTED:
        parallelize.apply_fsdp_to_decoder = shard_nested
    ranks = dist.get_world_size()
    parallelism = ParallelismConfig(
        expert_parallel_degree=ranks, data_parallel_shard_degree=ranks, spmd_backend="partial_dtensor"
    )
    dims = ParallelDims.from_config(parallelism, ranks)
    dims.build_mesh()
    dist_utils.set_spmd_backend("partial_dtensor")
    spec = model_registry("30B-A3B" if ON_GPU else "debugmodel_moe", attn_backend="flex", moe_comm_backend="standard")
    spec.model.layers = spec.model.layers[: chosen.layers]
    spec.model.vocab_size = spec.model.tok_embeddings.num_embeddings = chosen.vocabulary
    spec.model.lm_head.out_features = chosen.vocabulary
    for layer in spec.model.layers:
        attention = layer.attention
        attention.inner_attention = derive(attention.inner_attention, ScaledDotProductAttention.Config)
    training = TrainingConfig(local_batch_size=1, seq_len=chosen.tokens, mixed_precision_param="bfloat16")
    spec.model.update_from_config(config=types.SimpleNamespace(parallelism=parallelism, training=training))
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    if not ON_GPU:
        on_cpu.sum_without_scale(model)
    model.to_empty(device=device)
    torch.manual_seed(0)  # the same for all ranks; a shard is a part of the whole draw
    with torch.no_grad():
        model.init_states(buffer_device=None)
    return model, dims


class Hosts:
    """One model whose layers take the dispatchers of one host after another."""

    def __init__(self, model: torch.nn.Module, dims: Any, tokens: int) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
        self._mesh, self._tokens = dims.get_optional_mesh("ep"), tokens
        assert self._mesh is not None and len(self._layers) > 0
        assert all(type(layer.token_dispatcher) is AllToAllTokenDispatcher for layer in self._layers)
        self._made = {OWN: [layer.token_dispatcher for layer in self._layers]}
        self._hidden = self._layers[0].inner_experts.w1_EFD.shape[-1]

    def take(self, host: str) -> None:
        """Let the model take a host's dispatchers. Raise an error if they cannot be made."""
        if host not in self._made:
            self._made[host] = [self._dispatcher(host, layer.token_dispatcher) for layer in self._layers]
        for layer, dispatcher in zip(self._layers, self._made[host], strict=True):
            layer.token_dispatcher = dispatcher

    def _dispatcher(self, host: str, now: Any) -> Any:
        sizes: dict[str, Any] = {"num_experts": now.num_experts, "top_k": now.top_k}
        if host == DEEP:
            sizes |= {"num_max_tokens_per_rank": self._tokens, "hidden_dim": self._hidden}
            dispatcher = DeepEPTokenDispatcher.Config(**sizes).build()
        else:
            dispatcher = RaymoeTokenDispatcher.Config(**sizes, **RAYMOE[host]).build()
        dispatcher.wire_meshes(ep_mesh=self._mesh)
        return dispatcher


def stepper(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return the function that runs forward, loss and backward pass, and returns the loss."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    labels = tokens.roll(-1, 1).flatten()

    def step() -> torch.Tensor:
        logits = model(tokens, positions)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels)
        loss.backward()
        return loss.detach()

    return step


def captured(step: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """Return the step as a graph by torchtitan's wrapper: one eager run, one capture, then replays."""
    from torchtitan.distributed.cudagraph import wrap_with_cuda_graph

    wrapped = wrap_with_cuda_graph(lambda *_: step())
    nothing = torch.zeros(1, device=device)
    return lambda: wrapped(nothing, nothing, nothing, {})


def main() -> None:
    warnings.filterwarnings("ignore")
    chosen, device = options(), begin_ranks()
    model, dims = build(chosen, device)
    source = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, chosen.vocabulary, (1, chosen.tokens), generator=source).to(device)
    step, hosts = stepper(model, tokens), Hosts(model, dims, chosen.tokens)
    shared = {
        "model": f"Qwen3 {'30B-A3B' if ON_GPU else 'debug'}, {chosen.layers} layers",
        "tokens": chosen.tokens,
        "experts": "sharded by themselves" if NESTED else "sharded with their layer",
    }
    comparison = Comparison(model, step, hosts.take, shared, chosen.out)
    comparison.eager([name for name in (OWN, DEEP, *RAYMOE) if name not in chosen.without], chosen.rounds)
    eager = CAPTURED.removesuffix(", captured")
    if ON_GPU and comparison.runs(eager):
        hosts.take(eager)
        comparison.alone(CAPTURED, captured(step, device), chosen.rounds)
    dist.barrier()
    os._exit(0)  # destructors of other libraries may wait for one another


if __name__ == "__main__":
    main()
