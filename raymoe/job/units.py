"""Sizes as people write them, and the bytes of an element."""

import re
from fractions import Fraction

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([A-Za-z]*)")
SIZE_PATTERN = rf"^[0-9]+(\.[0-9]+)? ?({'|'.join(_UNITS)})$"


def parse_size(text: str) -> int:
    """Bytes in a size with a unit; raises ValueError with the reason.

    >>> parse_size("4KiB"), parse_size("1.5 MiB"), parse_size("2GB")
    (4096, 1572864, 2000000000)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("is not a size such as 4096 or 4KiB")
    number, unit = match.groups()
    if unit not in _UNITS:
        near = [name for name in _UNITS if name.lower() == unit.lower() or name.lower() == f"{unit.lower()}ib"]
        meant = f", did you mean {number}{near[0]}?" if near else f", the units are {', '.join(_UNITS)}"
        raise ValueError(f"has {'the unknown unit ' + repr(unit) if unit else 'no unit'}{meant}")
    size = Fraction(number) * _UNITS[unit]  # exact, where a float would lose the last bytes of a large size
    if size.denominator != 1:
        raise ValueError("is not a whole number of bytes")
    return size.numerator


def format_size(size: int) -> str:
    """The shortest exact way to write a size in powers of 1024.

    >>> format_size(4096), format_size(1500), format_size(3 * 2**30)
    ('4KiB', '1500B', '3GiB')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return f"{size}B"
