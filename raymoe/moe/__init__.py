"""The Mixture-of-Experts layer around an exchange: router, experts and their weights, with gradients.

Start with `layer.py`. `differentiable.py` has the exchange with gradients, which a layer of one's own calls.
"""

from raymoe.moe.differentiable import ExpertRows as ExpertRows
from raymoe.moe.differentiable import combine as combine
from raymoe.moe.differentiable import dispatch as dispatch
from raymoe.moe.layer import LayerForm as LayerForm
from raymoe.moe.layer import MoELayer as MoELayer
from raymoe.moe.router import Router as Router
from raymoe.moe.router import RouterForm as RouterForm
from raymoe.moe.router import balance_loss as balance_loss
from raymoe.moe.router import expert_load as expert_load
