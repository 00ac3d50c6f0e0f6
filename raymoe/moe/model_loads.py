"""Load weights into all layers of a model at once, so that no step has old weights in one layer and new in another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from torch import Tensor, nn

from raymoe.errors import ConfigError
from raymoe.memory.world import World
from raymoe.moe.layer import LoadOptions, layers_of
from raymoe.moe.live_weights import Loading, WeightSource, load_into


def load_weights(model: nn.Module, weights: Mapping[str, Tensor] | WeightSource, **options: Unpack[LoadOptions]) -> int:
    """Give a model new weights in the memory of the old, as `MoELayer.load` does. All ranks call it.

    Parameters that are not of raymoe's layers are loaded too. Returns the epoch of the weights.
    """
    return load_into(model, world_of(model), weights, **options)


def loading(model: nn.Module, *, partial: bool = False, cast: bool = False) -> Loading:
    """Load weights of a model in several pieces, which take effect together, as `MoELayer.loading` does."""
    return Loading(world_of(model), model, partial=partial, cast=cast)


def world_of(model: nn.Module) -> World:
    """Return the world of all layers of a model."""
    worlds = {id(layer.world): layer.world for layer in layers_of(model).values()}
    if len(worlds) != 1:
        raise ConfigError(
            f"weights of a {type(model).__name__} whose layers of raymoe have {len(worlds)} worlds; they have one"
        )
    [world] = worlds.values()
    return world
