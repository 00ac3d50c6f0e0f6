"""The public names, for type checkers and editors."""

from raymoe import errors as errors
from raymoe.exchange.backend import Dispatched as Dispatched
from raymoe.exchange.exchange import Exchange as Exchange
from raymoe.exchange.peer.workspace import Workspace as Workspace
from raymoe.exchange.spec import ExchangeSpec as ExchangeSpec
from raymoe.integrations.ray_actors import join as join
from raymoe.memory.world import World as World
from raymoe.moe.layer import MoELayer as MoELayer
from raymoe.rows.elementwise import pointwise as pointwise
from raymoe.transport.channel import Channel as Channel

__version__: str

__all__ = [
    "Channel",
    "Dispatched",
    "Exchange",
    "ExchangeSpec",
    "MoELayer",
    "Workspace",
    "World",
    "__version__",
    "errors",
    "join",
    "pointwise",
]
