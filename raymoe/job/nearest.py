"""The name that a misspelt one was probably meant to be."""

from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The closest of `names`, if any is close.

    >>> nearest("hiden", ["tokens", "hidden"]), nearest("xyz", ["tokens", "hidden"])
    ('hidden', None)
    >>> nearest("wait", ["ranks", "wait_timeout_s"])
    'wait_timeout_s'
    """
    import difflib  # here because a config without mistakes has no use for it

    same = {other.lower().replace("-", "_"): other for other in names}
    wanted = name[:100].lower().replace("-", "_")
    close = difflib.get_close_matches(wanted, same, n=1, cutoff=0.6)
    close += [other for other in same if len(wanted) >= 4 and other.startswith(wanted[:4])]
    return same[close[0]] if close else None
