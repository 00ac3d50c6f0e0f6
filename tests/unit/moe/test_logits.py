"""The logits of a router: in float32, and as tensor cores compute them, whose products a CPU makes here in float32."""

from __future__ import annotations

import pytest
import torch

import raymoe.moe.logits as logits
from raymoe.moe.logits import halves, logits_of

OPS = torch.ops.raymoe


def drawn_inputs(tokens: int, kind: torch.dtype, weight_kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(rows, 96, generator=source) for rows in (tokens, 24))
    return x.to(kind).requires_grad_(), weight.to(weight_kind).requires_grad_()


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.dtype]]:
    """Take the way of GPUs from the first row on; return the dtypes of each product."""
    products = []

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        products.append((a.dtype, b.dtype))
        return a.float() @ b.float()

    monkeypatch.setattr(logits, "product", product)
    monkeypatch.setattr(logits, "_by_tensor_cores", lambda *_, **__: True)
    return products


@pytest.mark.parametrize("weight_kind", [torch.bfloat16, torch.float32])
def test_tensor_cores_multiply_bfloat16_alone_and_keep_16_bits(tensor_cores: list, weight_kind: torch.dtype) -> None:
    x, weight = drawn_inputs(40, torch.bfloat16, weight_kind)
    found = OPS.router_logits(x, weight)
    exact = x.double() @ weight.double().T
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-4)
    dlogits = torch.randn(exact.shape, generator=torch.Generator().manual_seed(7))
    dx, dweight = torch.autograd.grad(found, (x, weight), dlogits)
    wanted_dx, wanted_dweight = torch.autograd.grad(exact, (x, weight), dlogits.double())
    assert (dx.dtype, dweight.dtype) == (torch.bfloat16, weight_kind)
    torch.testing.assert_close(dx.double(), wanted_dx.double(), rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(dweight.double(), wanted_dweight.double(), rtol=2**-7, atol=1e-3)
    assert set(tensor_cores) == {(torch.bfloat16, torch.bfloat16)} and len(tensor_cores) == 2


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_of_a_cpu_are_float32_with_gradients_for_the_bias(kind: torch.dtype) -> None:
    x, weight = drawn_inputs(5, kind, kind)
    bias = torch.randn(24).to(kind).requires_grad_()
    found = logits_of(x, weight, bias)
    torch.testing.assert_close(found, x.float() @ weight.float().T + bias.float())
    (dbias,) = torch.autograd.grad(found.sum(), bias)
    assert dbias.tolist() == [5.0] * 24


def test_numbers_that_are_not_finite_become_nan() -> None:
    high, low = halves(torch.tensor([torch.inf, -torch.inf, torch.nan]))
    assert (high + low).isnan().tolist() == [True, True, True]
    assert high.tolist()[:2] == [torch.inf, -torch.inf]


@pytest.mark.parametrize("weight_kind", [torch.bfloat16, torch.float32])
def test_the_operators_pass_opcheck(weight_kind: torch.dtype) -> None:
    x, weight = drawn_inputs(6, torch.bfloat16, weight_kind)
    torch.library.opcheck(OPS.router_logits, (x, weight))
    torch.library.opcheck(OPS.router_logits_backward, (torch.randn(6, 24), x.detach(), weight.detach()))
