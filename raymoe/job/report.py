"""All problems of a config as one error."""

from collections.abc import Iterable

from raymoe.job.errors import ConfigError
from raymoe.job.problem import Problem


def report(file: str, problems: Iterable[Problem]) -> ConfigError:
    """The error for a file's problems: in the file's order, then its parents', then those of settings.

    >>> str(report("x.yaml", [Problem("x.yaml", 4, "shape.hiden", "8", "unknown key", "did you mean 'hidden'?")]))
    "x.yaml has 1 problem: line 4, shape.hiden = 8: unknown key, did you mean 'hidden'?"
    >>> str(report("x.yaml", [Problem("x.yaml", None, "", None, "is empty")]))
    'x.yaml: is empty'
    """
    problems = list(dict.fromkeys(problems))
    places = list(dict.fromkeys([file, *(problem.where for problem in problems)]))

    def order(problem: Problem) -> tuple[bool, int, int]:
        return problem.where.startswith("--set "), places.index(problem.where), problem.line or 0

    problems.sort(key=order)
    first = problems[0]
    told = first.told if first.where == file else f"{first.where}: {first.told}"
    if len(problems) > 1:
        return ConfigError(f"{file} has {len(problems)} problems; the first is {told}", problems)
    whole = first.where == file and not first.line and not first.key
    return ConfigError(f"{file}: {told}" if whole else f"{file} has 1 problem: {told}", problems)
