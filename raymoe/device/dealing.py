"""How the rows of few tokens are dealt out to warps: the structs of kernels/include/raymoe/ll/dealing.cuh."""

from __future__ import annotations

from dataclasses import dataclass

from raymoe.device.params import U32, Params


@dataclass(frozen=True)
class Divisor(Params):
    """A number that a kernel divides others by, which is dear: it multiplies by the inverse instead."""

    by: U32
    inverse: U32
    shift: U32

    @classmethod
    def of(cls, by: int) -> Divisor:
        """For numbers below 2**31, all of which it is exact for.

        >>> numbers = [*range(1000), *(2**31 - each for each in range(1, 1000))]
        >>> divisors = [Divisor.of(by) for by in (*range(1, 600), 65535, 65536, 65537, 2**31 - 1)]
        >>> all(each.under(number) == number // each.by for each in divisors for number in numbers)
        True
        """
        shift = (by - 1).bit_length()
        return cls(by, -(-(2 ** (31 + shift)) // by), shift)

    def under(self, number: int) -> int:
        """As the kernel does it."""
        return (number * 2 * self.inverse >> 32) >> self.shift


@dataclass(frozen=True)
class Dealing(Params):
    """Rows cut into units of `each` groups of lines, token after token and of a token peer after peer."""

    each: U32
    groups: U32
    units: Divisor
    peers: Divisor

    @classmethod
    def of(cls, groups: int, most: int, tokens: int, peers: int, warps: int) -> Dealing:
        """For so many rows of so many groups, as work for so many warps, each of which has at most `most` groups under
        way. No warp has more units than need be, and none of them is longer than need be.

        >>> one = Dealing.of(groups=30, most=6, tokens=1, peers=1, warps=32)
        >>> one.each, one.units.by
        (1, 30)
        >>> two_each = Dealing.of(groups=30, most=6, tokens=128, peers=1, warps=384)
        >>> two_each.each, two_each.units.by
        (5, 6)
        """
        rows = max(tokens * peers, 1)
        turns = -(-rows * groups // (warps * most))
        units = min(max(turns * warps // rows, -(-groups // most)), groups)
        each = -(-groups // units)
        return cls(each, groups, Divisor.of(-(-groups // each)), Divisor.of(max(peers, 1)))


NOTHING_DEALT = Dealing(0, 0, Divisor.of(1), Divisor.of(1))
"""Of kernels whose rows do not travel in lines."""
