"""The Mixture-of-Experts layer around an exchange: router, experts and their weights, with gradients."""

from raymoe.moe.differentiable import ExpertRows as ExpertRows
from raymoe.moe.differentiable import combine as combine
from raymoe.moe.differentiable import dispatch as dispatch
