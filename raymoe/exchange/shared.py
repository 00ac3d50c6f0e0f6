"""The exchanges of a world that its users share: one for each spec, backend and number of SMs."""

from __future__ import annotations

from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World


class SharedExchanges:
    """The shared exchanges of a world, which closes them (`World.exchange`, `World.shared`).

    All ranks ask for new specs in one order.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._exchanges: dict[tuple[ExchangeSpec, str, int | str], Exchange] = {}
        self._sites = 0

    def of(self, spec: ExchangeSpec, backend: str = "auto", sms: int | str = "auto") -> Exchange:
        """Return the exchange of this spec; the first call makes it. An exchange that was closed is made again."""
        key = spec.counted(self._world.size), backend, sms
        exchange = self._exchanges.get(key)
        if exchange is None or exchange.closed:
            exchange = self._exchanges[key] = Exchange(self._world, spec, backend, sms=sms)
        return exchange

    def next_number(self) -> int:
        """Number a new call site, such as a layer. All ranks make layers in one order, so it is the same everywhere."""
        self._sites += 1
        return self._sites

    def check(self) -> None:
        """Wait for the device, then raise what failed on this rank (`Exchange.check`)."""
        for exchange in self._exchanges.values():
            if not exchange.closed:
                exchange.check()

    def close(self, together: bool) -> None:
        """Close them with the world."""
        for exchange in reversed(self._exchanges.values()):
            exchange.close(together)
