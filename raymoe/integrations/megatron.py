"""Run the experts of Megatron-Core on raymoe: change the module of the MoE layer in a layer spec.

    from raymoe.integrations.megatron import on_raymoe

    spec = on_raymoe(get_gpt_layer_local_spec(num_experts=64, moe_grouped_gemm=True))
    model = GPTModel(config, spec, …)

Router, experts, checkpoints and recomputation stay Megatron's, and nothing of it is patched. Megatron's own dispatcher
is still made in the constructor, so `moe_token_dispatcher_type` must name one that can be.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from raymoe.errors import ConfigError
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.differentiable import ExpertRows, combine, dispatch_exact

_REFUSED = {
    "moe_shared_expert_overlap": "runs no shared expert inside its dispatch",
    "overlap_moe_expert_parallel_comm": "has no schedule of two micro-batches",
    "moe_pad_expert_input_to_capacity": "brings the rows that came and no padding",
}
"""Keys of Megatron's config that must be off, and what raymoe does instead."""


@dataclass(frozen=True)
class Options:
    """The options of `on_raymoe`."""

    tokens: int | None = None
    """The most tokens that a rank gives to a layer. None: as many as in the first step, the same on all ranks."""
    backend: str = "auto"
    """The backend of the exchange."""
    sms: int | str = "auto"
    """The SMs of a GPU that its kernels may take."""
    capacity: int | float | str = "worst"
    """The rows that a rank may receive: worst, a number, or a factor of the mean such as 1.5."""
    alignment: int = 1
    """The rows of each expert begin at a multiple of this. Gaps are rows of zeros, which count as the expert's."""
    timeout_s: float = 60.0
    """The limit of every wait for a peer."""


class RaymoeTokenDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Megatron's six steps around one dispatch and one combine.

    The ranks of expert tensor parallelism count as ranks of the exchange: each gets the rows of its experts' tokens,
    and the combine adds what they return.
    """

    exchange: Exchange
    got: ExpertRows

    def __init__(self, layer: Any, groups: Any, options: Options) -> None:
        super().__init__(config=layer.config, pg_collection=groups)
        for key, instead in _REFUSED.items():
            if getattr(self.config, key, False):
                raise ConfigError(f"{key} is on, and raymoe {instead}: leave it out, or take Megatron's own dispatcher")
        self.local, self.site, self.options = layer.num_local_experts, int(layer.layer_number or 0), options
        self.world = World.of(self.tp_ep_group, timeout_s=options.timeout_s, shared=True)
        self.shape: torch.Size | None = None

    def set_shared_experts(self, shared_experts: Any) -> None:  # noqa: ARG002
        """Refuse a shared expert inside the dispatch."""
        raise ConfigError(f"moe_shared_expert_overlap is on, and raymoe {_REFUSED['moe_shared_expert_overlap']}")

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn the router's dense map into ids; -1 where a token was dropped."""
        self.shape = hidden_states.shape
        x = hidden_states.reshape(-1, self.shape[-1])
        chosen, ids = routing_map.to(torch.uint8).topk(self.config.moe_router_topk, dim=-1)
        weights, ids = probs.gather(1, ids), ids.masked_fill(chosen == 0, -1)
        if (parts := self.tp_size) > 1:
            owner, expert = ids // self.local, ids % self.local
            part = torch.arange(parts, device=ids.device)
            spread = (owner[..., None] * parts + part) * self.local + expert[..., None]
            ids = torch.where(ids[..., None] < 0, -1, spread).flatten(1)
            weights = weights[..., None].expand(-1, -1, parts).flatten(1)
        self.ids = ids
        return x, weights

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send the tokens; return the rows that came, and their weights."""
        options = self.options
        spec = ExchangeSpec(
            options.tokens or len(hidden_states),
            hidden_states.shape[1],
            self.local * self.world.size,
            self.ids.shape[1],
            dtype=str(hidden_states.dtype).removeprefix("torch."),
            alignment=options.alignment,
            padding="zero",
            capacity=options.capacity,
            depth=0,
        )
        self.exchange = self.world.exchange(spec, options.backend, sms=options.sms)
        tokens = hidden_states.contiguous(), self.ids, probs.float().contiguous()
        self.got = dispatch_exact(self.exchange, *tokens, site=self.site)
        return self.got.x, self.got.weights

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add how many rows each expert has, gaps included."""
        return hidden_states, self.got.expert_offsets.diff().long(), probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Leave the rows as they are: they may be fewer than the capacity."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's results, which the experts have multiplied by the weights."""
        got = self.got
        del self.got
        return combine(self.exchange, hidden_states.contiguous(), got, weighted=False)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Give the result the shape of the layer's input."""
        assert self.shape is not None, "the first step keeps it"
        return hidden_states.view(self.shape)


class RaymoeMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's layer with raymoe's dispatcher."""

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        raymoe_options: Options | None = None,
        **more: Any,
    ) -> None:
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, submodules, layer_number, groups, **more)
        self.token_dispatcher = RaymoeTokenDispatcher(self, groups, raymoe_options or Options())


def on_raymoe(layer_spec: Any, **options: Any) -> Any:
    """Put raymoe into a layer spec of Megatron, and return the spec. `Options` has the options.

    The module of the MoE layer is a ModuleSpec in Megatron-Core 0.16, and a partial in newer ones. A spec without such
    a layer, as of the dense layers of a model, stays as it is.
    """
    chosen, mlp = Options(**options), layer_spec.submodules.mlp
    if isinstance(mlp, functools.partial):
        if mlp.func is MoELayer:
            made = functools.partial(RaymoeMoELayer, *mlp.args, raymoe_options=chosen, **mlp.keywords)
            layer_spec.submodules.mlp = made
    elif getattr(mlp, "module", None) is MoELayer:
        mlp.module, mlp.params = RaymoeMoELayer, {**(mlp.params or {}), "raymoe_options": chosen}
    return layer_spec
