"""Worlds that the users of a process group share: one a group, found again, and closed with the group."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from raymoe.cuda.current import capturing
from raymoe.errors import ConfigError
from raymoe.memory.process_group import is_known


class Closable(Protocol):
    """A world, as this file uses it."""

    device: Any

    @property
    def closed(self) -> bool: ...

    def close(self, together: bool = True) -> None: ...


@dataclass
class _SharedWorld:
    """A world, the arguments that it was made with, and what closes it."""

    world: Closable
    options: tuple[object, ...]
    closing: weakref.finalize[..., Any]


class GroupWorlds:
    """The shared worlds of this process, by process group.

    No framework has a hook at the end of a group. So a world is closed at the first of these: torch drops the group's
    object, `of` is called and the group was destroyed, the interpreter exits.
    """

    def __init__(self) -> None:
        self._worlds: weakref.WeakKeyDictionary[Any, _SharedWorld] = weakref.WeakKeyDictionary()
        self._left: list[Closable] = []
        """Worlds whose group went during a capture, which frees no memory."""

    def of(self, group: Any, options: tuple[object, ...], make: Callable[[], Closable]) -> Closable:
        """Return the world of a group. The first call makes it, and so does one after its world was closed."""
        self._close_destroyed()
        shared = self._worlds.get(group)
        if shared is not None and not shared.world.closed:
            if shared.options != options:
                raise ConfigError(
                    f"the shared world of a process group was asked for with (device, timeout_s, domain) = {options}; "
                    f"it was made with {shared.options}: give the same, or leave shared out"
                )
            return shared.world
        if shared is not None:
            shared.closing.detach()
        world = make()
        self._worlds[group] = _SharedWorld(world, options, weakref.finalize(group, self._close, world))
        return world

    def _close_destroyed(self) -> None:
        """Close the worlds of groups that torch no longer knows, although an object of them is left."""
        for group, shared in list(self._worlds.items()):
            if not is_known(group):
                shared.closing()
                del self._worlds[group]
        left, self._left = self._left, []
        for world in left:
            self._close(world)

    def _close(self, world: Closable) -> None:
        if not world.closed and capturing(world.device):
            self._left.append(world)
        else:
            world.close()


GROUP_WORLDS = GroupWorlds()
