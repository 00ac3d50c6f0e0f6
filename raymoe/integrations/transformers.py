"""Run the expert parallelism of Hugging Face transformers on raymoe, with no change to the model.

    from raymoe.integrations.transformers import register

    with register(tokens=4096):
        config = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="raymoe")
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
        ...

transformers gives each rank its experts, and calls the implementation with the tokens of this rank and the ids of their
experts. raymoe brings the rows to the ranks of their experts and the results back, forward and backward.

8-bit experts (`FineGrainedFP8Config`) are computed by raymoe too, for inference (`transformers_fp8.py`).
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from raymoe.errors import ConfigError, RaymoeError
from raymoe.exchange.abilities import BACKENDS, backends_of
from raymoe.exchange.backend import Tokens
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.shared import SharedExchanges
from raymoe.exchange.spec import ExchangeSpec
from raymoe.integrations.transformers_fp8 import ScaledExperts
from raymoe.memory.member import Member
from raymoe.memory.world import World
from raymoe.moe.differentiable import ExpertRows, combine, dispatch, refuse
from raymoe.moe.expert_rows import Groups
from raymoe.moe.scaled_layer import scaled_spec


class Registration:
    """The name under which transformers finds raymoe, and the worlds of its expert groups, which `close` closes.

    All ranks close. Models that were loaded with it cannot run afterwards. Another `register` replaces the name.
    """

    def __init__(self, name: str, tokens: int, backend: str, capacity: int | float | str, timeout_s: float) -> None:
        # A model makes its exchanges in its first forward pass. Wrong arguments raise before it is loaded.
        ExchangeSpec(tokens, hidden=8, experts=1, topk=1, capacity=capacity)
        if backend not in BACKENDS:
            raise ConfigError(f"backend is {backend!r}; it is one of {', '.join(backends_of('cpu', 'cuda'))}")
        Member(rank=0, size=1, timeout_s=timeout_s)
        self.name, self.tokens, self.backend, self.capacity = name, tokens, backend, capacity
        self.timeout_s = timeout_s
        self._worlds: dict[str, World] = {}
        self._layers = 0
        self._closed = False
        EPImplementationInterface.register(name, self._implementation)

    def world(self, group: Any) -> World:
        """Return the world of a process group's ranks. The first call makes it; all ranks of the group call it."""
        if self._closed:
            raise ConfigError(f"experts ran on {self.name}, whose registration is closed; keep it open with the model")
        if (name := str(group.group_name)) not in self._worlds:
            self._worlds[name] = World.of(group, timeout_s=self.timeout_s)
        return self._worlds[name]

    def exchange(
        self, group: Any, like: tuple[torch.Tensor, torch.Tensor], experts: int, scaled: bool = False
    ) -> Exchange:
        """Return the exchange for rows and ids like these. Layers of one shape share it. `scaled`: of 8-bit experts."""
        rows, ids = like
        dtype, world = str(rows.dtype).removeprefix("torch."), self.world(group)
        spec = ExchangeSpec(
            self.tokens,
            rows.shape[1],
            experts,
            ids.shape[1],
            dtype=dtype,
            capacity=self.capacity,
            depth=0,
        )
        if scaled:
            return world.exchange(scaled_spec(spec, world, self.backend), self.backend)
        # No gaps between experts.
        return world.exchange(replace(spec, alignment=1, padding="zero"), self.backend)

    def next_number(self) -> int:
        """Number a layer. All ranks make models in one order, so the number is the same everywhere."""
        self._layers += 1
        return self._layers

    def check(self) -> None:
        """Wait for the device, then raise what failed on this rank: a failed wait, or data that all ranks refused.

        On GPUs no step waits for that. Call it where the program waits anyway, as where it reads the loss.
        """
        for world in self._worlds.values():
            world.shared(SharedExchanges).check()

    def close(self, together: bool = True) -> None:
        """Close the worlds."""
        self._closed = True
        for world in self._worlds.values():
            world.close(together)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(together=error is None)

    def _implementation(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> RaymoeExperts:
        """Make the implementation of one experts module: transformers calls this like a class."""
        return RaymoeExperts(experts, ep_mesh, tp_mesh, self)


def register(
    name: str = "raymoe",
    *,
    tokens: int = 4096,
    backend: str = "auto",
    capacity: int | float | str = "worst",
    timeout_s: float = 60.0,
) -> Registration:
    """Make raymoe known to transformers, for `DistributedConfig(ep_implementation=name)`.

    `tokens` is the most that a rank gives to a layer at once: batch times length, and not padded to it. `capacity`
    limits the rows that a rank receives, which training saves for each layer. `timeout_s` bounds every wait for a peer.

    Where one rank gives more tokens, all ranks refuse that step, and the next one works. On CPUs all raise DataRefused.
    On GPUs the output is NaN on all ranks, this rank warns, and `check` of the result raises.

    8-bit experts are computed by raymoe's products. A call that would record gradients of them is refused.
    """
    return Registration(name, tokens, backend, capacity, timeout_s)


class RaymoeExperts(EPImplementation):  # type: ignore[misc]
    """Brings tokens to the experts of one module and the results back."""

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any, registration: Registration) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._registration, self._number = registration, registration.next_number()
        self._scaled = _scaled_experts_of(experts)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of its experts' results for each token."""
        tokens = hidden_states, top_k_index, top_k_weights
        if self.tp_mesh.size() == 1:
            return self._apply(*tokens)
        # The ranks of a tensor-parallel group have the same tokens; every rank takes its part of them.
        from torch.distributed.tensor import DTensor, Replicate, Shard

        def part(whole: torch.Tensor) -> torch.Tensor:
            replicated = DTensor.from_local(whole, self.tp_mesh, [Replicate()], run_check=False)
            local: torch.Tensor = replicated.redistribute(placements=[Shard(0)]).to_local()
            return local

        y = self._apply(*(part(whole) for whole in tokens))
        shape, stride = hidden_states.shape, hidden_states.stride()
        sharded = DTensor.from_local(y, self.tp_mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        whole: torch.Tensor = sharded.full_tensor()
        return whole

    def _apply(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts = self.num_local_experts * self.ep_mesh.size()
        scaled = self._scaled is not None
        exchange = self._registration.exchange(self.ep_mesh.get_group(), (x, ids), experts, scaled)
        tokens, most, count = len(x), exchange.spec.tokens, None
        if tokens > most:  # the others are in this step, so it is refused inside it, where they learn of it
            count = torch.full((1,), tokens, dtype=torch.int32, device=x.device)
            x, ids, weights = x[:most], ids[:most], weights[:most]
            if x.device.type != "cpu":
                warnings.warn(
                    f"a rank gives {tokens} tokens, and register was called with tokens={most}: all ranks refuse this "
                    "step, whose output is NaN",
                    RuntimeWarning,
                    stacklevel=2,
                )
        given = Tokens(x.contiguous(), ids.contiguous(), weights.float().contiguous(), count, site=self._number)
        y = self._with_gradients(exchange, given) if self._scaled is None else self._scaled(exchange, given)
        return y if tokens <= most else torch.cat((y, y.new_full((tokens - most, y.shape[1]), torch.nan)))

    def _with_gradients(self, exchange: Exchange, tokens: Tokens) -> torch.Tensor:
        x = tokens.x
        got = dispatch(exchange, x, tokens.topk_idx, tokens.topk_weights, tokens.num_tokens, site=tokens.site)
        try:
            rows = self._rows(got)
        except Exception:
            if x.device.type == "cpu":
                with suppress(RaymoeError):  # DataRefused, as on the other ranks; the exception here is the reason
                    refuse(exchange, got)
            raise
        return combine(exchange, rows.to(x.dtype), got, weighted=False)

    def _rows(self, got: ExpertRows) -> torch.Tensor:
        """Return the results of this rank's experts for the rows that came, times the weights."""
        capacity = len(got.x)
        # Rows of no expert have the id after the last, which the experts skip.
        expert = Groups(got.expert_offsets, got.expert_counts).expert_of_row(capacity)
        there = capacity
        if got.x.device.type == "cpu":  # reading the count costs no wait here, so the experts get only rows that came
            # At least one row, of zeros and weight zero, keeps the experts' weights in the backward pass.
            there = max(1, int(got.expert_offsets[-1]))
            expert = expert[:there].clamp(max=self.num_local_experts - 1)
        rows: torch.Tensor = self.experts_forward(got.x[:there], expert[:, None], got.weights[:there, None])
        return rows


def _scaled_experts_of(experts: Any) -> ScaledExperts | None:
    """Return experts that raymoe computes in 8 bits, or None for others, which transformers computes."""
    if not any(name.endswith("_scale_inv") for name, _ in experts.named_parameters(recurse=False)):
        return None
    try:
        return ScaledExperts(experts)
    except ConfigError as error:
        warnings.warn(f"transformers' own kernels compute {error}", RuntimeWarning, stacklevel=2)
        return None
