"""Run the expert parallelism of torchtitan on raymoe: two overrides of its config, and no change to torchtitan.

    torchrun … -m torchtitan.train --module qwen3 --config … --parallelism.expert_parallel_degree 8 \\
        --override.imports raymoe.integrations.torchtitan.dispatcher raymoe.integrations.torchtitan.selective_ac

`dispatcher` replaces every dispatcher for expert parallelism: the all-to-all, HybridEP's and the others. Router,
experts, FSDP, optimizer and checkpoints stay torchtitan's. It takes options as JSON:

    'raymoe.integrations.torchtitan.dispatcher={"capacity": 1.5, "sms": 64}'

`selective_ac` lets selective activation checkpointing save what raymoe brought. torchtitan has a fixed list of
operators to save; without this one, the backward pass brings all rows again.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.token_dispatcher import (
    BaseEPTokenDispatcher,
    HybridEPTokenDispatcher,
    LocalTokenDispatcher,
)

from raymoe.errors import ConfigError
from raymoe.exchange.abilities import BACKENDS, backends_of
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.member import Member
from raymoe.moe.by_name import exchange_of
from raymoe.moe.differentiable import ExpertRows, combine, dispatch, dispatch_exact

_SITES = itertools.count(1)  # ranks of one expert-parallel group build their layers in one order


class RaymoeTokenDispatcher(BaseEPTokenDispatcher):  # type: ignore[misc]
    """Brings tokens to the ranks of their experts and the results back, forward and backward.

    Rows of an expert are in the order of ranks and tokens, as the all-to-all has them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HybridEPTokenDispatcher.Config):  # type: ignore[misc]
        """The options. It derives from HybridEP's because torchtitan lists the configs that may be captured.

        `hidden_dim` and `num_max_tokens_per_rank` need no values. `pad_multiple` aligns the rows of each expert.
        """

        non_blocking_capacity_factor: float | None = 1.0
        """Always 1.0: on GPUs no step waits, and no token is dropped."""
        backend: str = "auto"
        """The backend of the exchange: auto, fused, staged and so on."""
        sms: int | str = "auto"
        """The SMs of a GPU that its kernels may take."""
        capacity: int | float | str = "worst"
        """The rows that a rank may receive: worst, a number, or a factor of the mean such as 1.5. Where more come, all
        ranks refuse the step, whose output is NaN on GPUs."""
        exact: bool = False
        """Whether the host waits for the number of rows on GPUs, so that experts get these rows alone. Not captured."""
        timeout_s: float = 60.0
        """The limit of every wait for a peer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # The exchange is made in the first step. Wrong options raise before the model is built.
        ExchangeSpec(
            tokens=1, hidden=8, experts=1, topk=1, capacity=config.capacity, alignment=config.pad_multiple or 1
        )
        if config.backend not in BACKENDS:
            raise ConfigError(f"backend is {config.backend!r}; it is one of {', '.join(backends_of('cpu', 'cuda'))}")
        Member(rank=0, size=1, timeout_s=config.timeout_s)
        self.config, self.site = config, next(_SITES)

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        """Take the mesh of the ranks that share the experts."""
        super().wire_meshes(ep_mesh=ep_mesh)
        self.group = "" if ep_mesh is None else str(ep_mesh.get_group().group_name)

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, ExpertRows]:
        """Send the tokens. Returns the rows of this rank's experts and how many each has."""
        config = self.config
        if self.ep_mesh is None:  # one rank has all experts
            if config.pad_multiple:
                raise ConfigError(
                    f"pad_multiple is {config.pad_multiple} without expert parallelism, where torchtitan's own "
                    "dispatcher pads: leave raymoe's out of override.imports"
                )
            tokens = x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            routed: tuple[torch.Tensor, torch.Tensor, Any] = LocalTokenDispatcher.dispatch(self, *tokens)
            return routed
        exchange = exchange_of(
            self.group,
            config.backend,
            config.timeout_s,
            config.sms,
            # torchtitan pads the sequences before, so all ranks have as many tokens.
            tokens=config.num_max_tokens_per_rank or x_TD.shape[0],
            hidden=x_TD.shape[1],
            experts=self.num_experts,
            topk=self.top_k,
            dtype=str(x_TD.dtype).removeprefix("torch."),
            alignment=config.pad_multiple or 1,
            capacity=config.capacity,
        )
        # On a CPU the host knows the number of rows without a wait. A trace must not depend on it.
        exact = (config.exact or x_TD.device.type == "cpu") and not torch.compiler.is_compiling()
        bring = dispatch_exact if exact else dispatch
        got = bring(exchange, x_TD.contiguous(), topk_expert_ids_TK, topk_scores_TK.float(), site=self.site)
        # torchtitan sums the counts up to offsets. So gaps, whose rows are zero, count as rows of their expert.
        return got.x, got.expert_offsets.diff(), got

    def combine(self, routed_output_RD: torch.Tensor, metadata: ExpertRows, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's results, times its scores."""
        if self.ep_mesh is None:
            summed: torch.Tensor = LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
            return summed
        return combine(metadata.exchange, routed_output_RD.to(x_TD.dtype), metadata)


@override(target=BaseEPTokenDispatcher.Config, description="expert parallelism by raymoe")  # type: ignore[untyped-decorator]
def dispatcher(cfg: Any, **options: Any) -> Any:
    """Replace a dispatcher for expert parallelism. `RaymoeTokenDispatcher.Config` has the options."""
    return derive(cfg, RaymoeTokenDispatcher.Config, **{"non_blocking_capacity_factor": 1.0, **options})


class RaymoeSelectiveAC(SelectiveAC):  # type: ignore[misc]
    """Selective activation checkpointing that saves the rows that raymoe brought."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):  # type: ignore[misc]
        """The options of torchtitan's own."""

    def get_save_ops(self) -> set[Any]:
        """Return the operators whose results are saved: torchtitan's, and the exchange's."""
        exchange: Any = torch.ops.raymoe
        saved: set[Any] = super().get_save_ops()
        return saved | {exchange.dispatch.default, exchange.dispatch_exact.default, exchange.combine.default}


@override(target=SelectiveAC.Config, exact=True, description="save the rows that raymoe brought")  # type: ignore[untyped-decorator]
def selective_ac(cfg: Any) -> Any:
    """Replace torchtitan's selective activation checkpointing."""
    return derive(cfg, RaymoeSelectiveAC.Config)
