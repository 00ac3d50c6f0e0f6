"""What a plain YAML scalar means here: YAML 1.1 without its surprises.

`yaml.safe_load` reads `on` as true, `010` as 8, `1:30` as 90 and `1e-3` as text. Here numbers look like numbers and
everything else is text, so that a surprise becomes a type error, with the hint that `surprise` gives.
"""

import re

Scalar = bool | int | float | str

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_SWITCH = {"yes": "true", "y": "true", "on": "true", "no": "false", "n": "false", "off": "false"}
# Digits are bounded because Python refuses to convert more than 4300 of them; no key takes a number of 400 digits.
_INT = re.compile(r"[-+]?(0|[1-9](_?[0-9]){0,400})")
_HEX = re.compile(r"0x[0-9a-fA-F]{1,400}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,400}|[0-9]{1,400}(\.[0-9]{0,400})?)([eE][-+]?[0-9]{1,9})?")
_NOT_FINITE = re.compile(r"([-+]?)\.(inf|Inf|INF|nan|NaN|NAN)")
_LEADING_ZERO = re.compile(r"([-+]?)0o?([0-9]+)")
_SEXAGESIMAL = re.compile(r"[0-9]{1,9}(:[0-5]?[0-9]){1,3}")


def resolve(text: str) -> Scalar | None:
    """The value of a plain (unquoted) scalar.

    >>> [resolve(text) for text in ("12", "1e-3", "1_000", "true", "on", "010", "1:30", "2026-11-21", "~")]
    [12, 0.001, 1000, True, 'on', '010', '1:30', '2026-11-21', None]
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    if _HEX.fullmatch(text):
        return int(text, 16)
    # A leading zero of a whole number is the octal of YAML 1.1, so such a number is neither that nor a decimal.
    if _FLOAT.fullmatch(text) and not _LEADING_ZERO.fullmatch(text):
        return float(text)
    if not_finite := _NOT_FINITE.fullmatch(text):
        return float(not_finite[1] + not_finite[2])
    return text


def surprise(text: str) -> str | None:
    """What to write instead, where YAML 1.1 would have read something else into a text.

    >>> surprise("on"), surprise("1:30"), surprise("010"), surprise("fine")
    ('write true', 'write 90 if minutes were meant', 'write 10, or 8 if octal was meant', None)
    """
    if text.lower() in _SWITCH:
        return f"write {_SWITCH[text.lower()]}"
    if zero := _LEADING_ZERO.fullmatch(text):
        digits = zero[2].lstrip("0") or "0"
        if len(digits) > 20 or not set(digits) <= set("01234567"):
            return "take the leading zero away"
        return f"write {zero[1]}{digits}, or {zero[1]}{int(digits, 8)} if octal was meant"
    if _SEXAGESIMAL.fullmatch(text):
        total = 0
        for part in text.split(":"):
            total = total * 60 + int(part)
        return f"write {total} if minutes were meant"
    return None
