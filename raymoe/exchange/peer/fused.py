"""Backend `fused`: each operation is one launch, and so is each half of a dispatch or combine.

Nothing waits for the host. The parameters of a launch are addresses, and the kernels read everything that changes from
run to run (epochs, counts, tokens) from device memory. So a captured call can be replayed with new tokens, new routing
and a new `num_tokens`.
"""

from __future__ import annotations

from raymoe.exchange.peer import combine
from raymoe.exchange.peer.build import Build, Grids
from raymoe.exchange.peer.dispatch import ALL_PARTS, PLACE, ROUTE, SEND
from raymoe.exchange.peer.table import BackendKind, LaunchTable, Stages


def fused_table(build: Build, grids: Grids, stages: Stages | None = None) -> LaunchTable:
    """Return the table; `stages` makes its launches."""
    stages = stages or Stages(build, grids)
    return LaunchTable(
        dispatch=(stages.dispatch(ALL_PARTS),),
        dispatch_send=(stages.dispatch(ROUTE | SEND),),
        dispatch_receive=(stages.dispatch(PLACE),),
        dispatch_again=(stages.dispatch(ALL_PARTS, again=True),),
        dispatch_known=() if build.fp8 else (stages.dispatch(SEND | PLACE, known=True),),
        combine=(stages.combine(combine.ALL_PARTS),),
        combine_send=(stages.combine(combine.REDUCE),),
        combine_receive=(stages.combine(combine.SUM),),
        combine_gradients=(stages.combine(combine.ALL_PARTS, carries=True),),
        combine_beside_product=(stages.combine_beside_product(),) if build.sends_pieces else (),
    )


FUSED = BackendKind("fused", Build.fused_grids, fused_table)
