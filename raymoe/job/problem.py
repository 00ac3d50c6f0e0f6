"""One thing wrong with a job, told so that it can be found and mended."""

from dataclasses import dataclass

_SHOWN = 80  # characters of a value that a report repeats


def shown(text: str) -> str:
    r"""Text from a user's file made fit for one line of a report.

    >>> shown("a\nb"), shown("x" * 200) == "x" * 80 + "…"
    ('a\\nb', True)
    """
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: _SHOWN + 1])
    return plain if len(plain) <= _SHOWN else plain[:_SHOWN] + "…"


@dataclass(frozen=True)
class Problem:
    """`where` is a file as the user named it, or `--set a.b=c`; `line` is None where a line means nothing.

    >>> print(Problem("x.yaml", 4, "shape.hiden", "1024", "unknown key", "did you mean 'hidden'?"))
    x.yaml: line 4, shape.hiden = 1024: unknown key, did you mean 'hidden'?
    >>> print(Problem("--set shape.topk=0", None, "shape.topk", "0", "0 is below 1"))
    --set shape.topk=0: 0 is below 1
    """

    where: str
    line: int | None
    key: str
    value: str | None
    reason: str
    hint: str | None = None

    @property
    def told(self) -> str:
        """Line, key and value, what is wrong and what to do: everything but the place's name."""
        # A setting is its own key and value.
        key = "" if self.where.startswith(f"--set {self.key}=") else self.key
        asked = f"{key} = {self.value}" if key and self.value is not None else key
        place = ", ".join(part for part in (f"line {self.line}" if self.line else "", asked) if part)
        told = f"{self.reason}, {self.hint}" if self.hint else self.reason
        return f"{place}: {told}" if place else told

    def __str__(self) -> str:
        return f"{self.where}: {self.told}" if self.where else self.told
