"""The Mixture-of-Experts layer around an exchange: router, experts and their weights, with gradients.

Read first: `layer.py`, then `differentiable.py` (the exchange with gradients, which a layer of one's own calls). The
functions over rows are in `raymoe/rows/`; they need no world.
"""

from raymoe.moe.by_name import exchange_of as exchange_of
from raymoe.moe.differentiable import ExpertRows as ExpertRows
from raymoe.moe.differentiable import combine as combine
from raymoe.moe.differentiable import dispatch as dispatch
from raymoe.moe.differentiable import dispatch_exact as dispatch_exact
from raymoe.moe.grouped import grouped_linear as grouped_linear
from raymoe.moe.grouped import grouped_swiglu as grouped_swiglu
from raymoe.moe.layer import LayerForm as LayerForm
from raymoe.moe.layer import MoELayer as MoELayer
from raymoe.moe.layer import expert_parameters as expert_parameters
from raymoe.moe.quantised_experts import QuantisedExperts as QuantisedExperts
from raymoe.moe.quantised_experts import quantise_experts as quantise_experts
from raymoe.moe.router import Router as Router
from raymoe.moe.router import balance_loss as balance_loss
from raymoe.moe.router import expert_load as expert_load
from raymoe.moe.router_formulas import RouterForm as RouterForm
from raymoe.moe.routing_trace import RoutingTrace as RoutingTrace
from raymoe.rows.activation import swiglu as swiglu
from raymoe.rows.elementwise import pointwise as pointwise
from raymoe.rows.norm import add_rms_norm as add_rms_norm
from raymoe.rows.norm import layer_norm as layer_norm
from raymoe.rows.norm import rms_norm as rms_norm
