"""Keep the order of exchange operations in graphs that torch.compile's Inductor compiles.

All ranks must run the same operations in one order. Inductor orders kernels by the memory that they need. So ranks with
different numbers of tokens would run two independent exchanges in different orders. Inductor also leaves out kernels
whose results are empty or unused, and its peers would wait for them.

This module makes each operation a kernel of Inductor with a side effect, which reads, by name only, the result of the
operation before it in the graph. Graphs list operations in the order of the program, in backward passes too. Other
compilers run them in that order.

torch's own means do not suffice. With an effect token (`torch._higher_order_ops.effects`) activation checkpointing may
not compute an operation again. With a tensor that all operations change, it computes all layers again at once.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from raymoe.errors import ConfigError


def keep_order(*operators: Any) -> None:
    """Let Inductor keep the order of calls of these operators. Their fake kernels call this at each trace.

    Inductor is loaded by then if it is to compile the graph. It is not loaded here, because that takes seconds.
    """
    if "torch._inductor.lowering" in sys.modules:
        _lower(operators)


@functools.cache
def _lower(operators: tuple[Any, ...]) -> None:
    """Register the lowerings. These names of Inductor are private to torch: 2.11 and 2.13 are tested, 2.9 has them."""
    try:
        from torch._inductor import dependencies, ir, lowering
        from torch._inductor.virtualized import V

        Fallback: Any = ir.FallbackKernel
        names = Fallback.create, Fallback.get_read_writes, Fallback.has_side_effects, dependencies.StarDep
        register = lowering.register_lowering
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"torch {torch.__version__} cannot keep the order of exchanges in graphs that Inductor compiles ({error}); "
            'call torch.compile with backend="aot_eager", or install torch 2.9 to 2.13'
        ) from error
    del names
    graph: Any = V

    class OrderedKernel(Fallback):  # type: ignore[misc]
        """A call of an operator, after the last one in its graph."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.before = getattr(graph.graph, "raymoe_last_call", None)
            graph.graph.raymoe_last_call = self

        def get_read_writes(self) -> Any:
            accesses = super().get_read_writes()
            if self.before is not None:
                accesses.reads.add(dependencies.StarDep(self.before.get_name()))
            return accesses

        def has_side_effects(self) -> bool:
            return True

    def wrapped(result: Any) -> Any:
        if not isinstance(result, ir.IRNode):
            return result
        wrap = getattr(result, "wrap_for_lowering", None)  # since torch 2.13
        return ir.TensorBox.create(result) if wrap is None else wrap()

    def lower(operator: Any, *arguments: Any, **options: Any) -> Any:
        results = OrderedKernel.create(operator, *arguments, **options)
        return torch.utils._pytree.tree_map(wrapped, results)

    for operator in operators:
        lowering.fallbacks.add(operator)
        register(operator, type_promotion_kind=None)(functools.partial(lower, operator))
