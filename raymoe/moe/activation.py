"""Gated activations between the two products of an expert, as a model names them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import nn

from raymoe.moe.by_row import sigmoid
from raymoe.moe.expert_kernels import ActivationForm
from raymoe.rows.activation import swiglu


@dataclass(frozen=True)
class Activation:
    """SwiGLU, silu(gate) * up, or the clamped variant of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1).

    `interleaved`: gate and up take turns in the columns; else all of gate comes first. `limit` clamps gate from above
    and up from both sides.

    >>> Activation()(torch.tensor([[1.0, 3.0]])).item() == float(torch.tensor(1.0).sigmoid() * 3)
    True
    """

    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_plus: float = 0.0

    def __call__(
        self,
        gate_up: torch.Tensor,
        expert_offsets: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        *,
        by_row: bool = False,
    ) -> torch.Tensor:
        """Map [C, 2F] to [C, F], times the `weights`, float32[C], of the rows.

        With SwiGLU on GPUs rows from the last of `expert_offsets` on are left out, and one kernel does it all.
        `by_row`: on a CPU too the bits of a result depend on its row alone.
        """
        if self == SWIGLU and in_kernels(gate_up):
            return swiglu(gate_up, expert_offsets, weights)
        h = self._by_row(gate_up) if by_row else self._unweighted(gate_up)
        return h if weights is None else (h.float() * weights[:, None]).to(h.dtype)

    @classmethod
    def of(cls, form: ActivationForm) -> Activation:
        """Make the activation of these numbers.

        >>> Activation.of(SWIGLU.form) == SWIGLU, Activation.of(GPT_OSS.form) == GPT_OSS
        (True, True)
        """
        return cls(form.interleaved, form.alpha, None if form.limit == inf else form.limit, form.up_plus)

    @property
    def form(self) -> ActivationForm:
        """The numbers of the activation as the kernels take them."""
        limit = inf if self.limit is None else self.limit
        return ActivationForm(self.interleaved, self.alpha, limit, self.up_plus)

    def _by_row(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute in float32, and round once."""
        numbers = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
        gate, up = self._gate_and_up(numbers)
        return (gate * sigmoid(gate * self.alpha) * (up + self.up_plus)).to(gate_up.dtype)

    def _gate_and_up(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if self.interleaved else gate_up.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate, up

    def _unweighted(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_and_up(gate_up)
        gated = nn.functional.silu(gate) if self.alpha == 1.0 else gate * torch.sigmoid(gate * self.alpha)
        return gated * (up + self.up_plus if self.up_plus else up)


def in_kernels(rows: torch.Tensor) -> bool:
    """Whether products and activations are operators. On a CPU torch's functions one after the other take less time.

    Backward of SwiGLU, 2048 rows of 2 x 2048 bfloat16 with weights, one core of an AMD EPYC: 16 ms, and 50 by its
    formula (2026-11-23).
    """
    return rows.device.type != "cpu"


SWIGLU = Activation()
GPT_OSS = Activation(interleaved=True, alpha=1.702, limit=7.0, up_plus=1.0)
