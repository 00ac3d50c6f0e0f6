"""Deal the rows of few tokens out to warps: twins of the structs in kernels/include/raymoe/peer/ll/dealing.cuh."""

from __future__ import annotations

from dataclasses import dataclass

from raymoe.cuda.params import U32, Params


@dataclass(frozen=True)
class Divisor(Params):
    """A divisor. A kernel multiplies by the inverse instead, because division is slow."""

    by: U32
    inverse: U32
    shift: U32

    @classmethod
    def of(cls, by: int) -> Divisor:
        """Make the divisor; it is exact for all numbers below 2**31.

        >>> numbers = [*range(1000), *(2**31 - each for each in range(1, 1000))]
        >>> divisors = [Divisor.of(by) for by in (*range(1, 600), 65535, 65536, 65537, 2**31 - 1)]
        >>> all(each.under(number) == number // each.by for each in divisors for number in numbers)
        True
        """
        shift = (by - 1).bit_length()
        return cls(by, -(-(2 ** (31 + shift)) // by), shift)

    def under(self, number: int) -> int:
        """Divide as the kernel does."""
        return (number * 2 * self.inverse >> 32) >> self.shift


@dataclass(frozen=True)
class Dealing(Params):
    """Rows cut into units of `each` groups of lines, numbered token after token, and peer after peer within a token."""

    each: U32
    groups: U32
    units: Divisor
    peers: Divisor

    @classmethod
    def of(cls, groups: int, most: int, tokens: int, peers: int, warps: int) -> Dealing:
        """Cut `tokens * peers` rows of `groups` groups into units for so many warps.

        A warp has at most `most` groups in flight. No warp has more units than necessary, and no unit is longer than
        necessary.

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
