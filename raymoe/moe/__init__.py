"""The Mixture-of-Experts layer around an exchange: router, experts and their weights, with gradients.

Start with `layer.py`. `differentiable.py` has the exchange with gradients, which a layer of one's own calls. `norm.py`,
`activation.py` and `elementwise.py` have functions over rows, which need no world.
"""

from raymoe.moe.activation import swiglu as swiglu
from raymoe.moe.differentiable import ExpertRows as ExpertRows
from raymoe.moe.differentiable import combine as combine
from raymoe.moe.differentiable import dispatch as dispatch
from raymoe.moe.elementwise import pointwise as pointwise
from raymoe.moe.layer import LayerForm as LayerForm
from raymoe.moe.layer import MoELayer as MoELayer
from raymoe.moe.layer import expert_parameters as expert_parameters
from raymoe.moe.norm import add_rms_norm as add_rms_norm
from raymoe.moe.norm import layer_norm as layer_norm
from raymoe.moe.norm import rms_norm as rms_norm
from raymoe.moe.router import Router as Router
from raymoe.moe.router import balance_loss as balance_loss
from raymoe.moe.router import expert_load as expert_load
from raymoe.moe.router_formulas import RouterForm as RouterForm
