"""The Mixture-of-Experts layer around an exchange: router, experts and their weights, with gradients.

Read first: `layer.py`, then `differentiable.py` (the exchange with gradients, which a layer of one's own calls). The
functions over rows are in `raymoe/rows/`; they need no world.
"""

from raymoe.moe.by_name import exchange_of as exchange_of
from raymoe.moe.checkpoint_files import CheckpointFiles as CheckpointFiles
from raymoe.moe.copies import add_copy_gradients as add_copy_gradients
from raymoe.moe.differentiable import ExpertRows as ExpertRows
from raymoe.moe.differentiable import combine as combine
from raymoe.moe.differentiable import dispatch as dispatch
from raymoe.moe.differentiable import dispatch_exact as dispatch_exact
from raymoe.moe.expert_loads import RoutingStats as RoutingStats
from raymoe.moe.expert_loads import routing_stats as routing_stats
from raymoe.moe.expert_loads import update_router_bias as update_router_bias
from raymoe.moe.grouped import grouped_linear as grouped_linear
from raymoe.moe.grouped import grouped_swiglu as grouped_swiglu
from raymoe.moe.layer import LayerForm as LayerForm
from raymoe.moe.layer import MoELayer as MoELayer
from raymoe.moe.layer import expert_parameters as expert_parameters
from raymoe.moe.let_sleep import let_sleep as let_sleep
from raymoe.moe.microbatches import in_microbatches as in_microbatches
from raymoe.moe.model_loads import load_weights as load_weights
from raymoe.moe.model_loads import loading as loading
from raymoe.moe.offered_weights import OfferedWeights as OfferedWeights
from raymoe.moe.offered_weights import OpenedWeights as OpenedWeights
from raymoe.moe.offered_weights import offer_weights as offer_weights
from raymoe.moe.offered_weights import open_weights as open_weights
from raymoe.moe.placement import Placement as Placement
from raymoe.moe.placement import plan_placement as plan_placement
from raymoe.moe.quantised_checkpoints import load_quantised_experts as load_quantised_experts
from raymoe.moe.quantised_experts import QuantisedExperts as QuantisedExperts
from raymoe.moe.quantised_experts import quantise_experts as quantise_experts
from raymoe.moe.quantised_shared import QuantisedMlp as QuantisedMlp
from raymoe.moe.quantised_shared import load_quantised_shared as load_quantised_shared
from raymoe.moe.quantised_shared import quantise_shared as quantise_shared
from raymoe.moe.router import Router as Router
from raymoe.moe.router import balance_loss as balance_loss
from raymoe.moe.router import expert_load as expert_load
from raymoe.moe.router import replay_route as replay_route
from raymoe.moe.router_formulas import RouterForm as RouterForm
from raymoe.moe.routes import count_routes as count_routes
from raymoe.moe.routes import record_routes as record_routes
from raymoe.moe.routes import replay_routes as replay_routes
from raymoe.moe.routes import same_routes as same_routes
from raymoe.moe.routing_trace import RoutingTrace as RoutingTrace
from raymoe.moe.slot_parts import move_slots as move_slots
from raymoe.moe.training import average_expert_gradients as average_expert_gradients
from raymoe.moe.training import clip_grad_norm as clip_grad_norm
from raymoe.rows.activation import swiglu as swiglu
from raymoe.rows.elementwise import pointwise as pointwise
from raymoe.rows.norm import add_rms_norm as add_rms_norm
from raymoe.rows.norm import layer_norm as layer_norm
from raymoe.rows.norm import rms_norm as rms_norm
