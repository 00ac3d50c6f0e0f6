"""A run directory as it lies on disk, read without taking its lock: for `--resume` and for `raymoe report`."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from raymoe.job.errors import ConfigError
from raymoe.report.results import Line, decode
from raymoe.report.summary import Generation, generations_of

CONFIG, ENVIRONMENT, RESULTS, SUMMARY = "config.yaml", "environment.json", "results.jsonl", "summary.json"
MARK = "# raymoe run "


@dataclass(frozen=True)
class Record:
    """`summary` is None while the run goes on, and for ever when it was killed."""

    path: Path
    run: str
    config: dict[str, object]
    lines: list[Line] = field(default_factory=list)
    summary: dict[str, object] | None = None
    generations: tuple[Generation, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "Record":
        """ConfigError, naming the file and the line, for a directory that is no run's or was damaged."""
        text = _text(path / CONFIG) if path.is_dir() else None
        if text is None or not text.startswith(MARK):
            found = "no such directory" if not path.exists() else "not a directory" if not path.is_dir() else None
            raise ConfigError(
                f"{path} is no run directory: {found or f'it has no {CONFIG} that a run wrote'}; "
                f"name one that `raymoe run` made"
            )
        head, _, body = text.partition("\n")
        try:
            config = yaml.safe_load(body)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path / CONFIG} is damaged: {' '.join(str(error).split())}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{path / CONFIG} is damaged: it holds no mapping")
        summary = _summary(path / SUMMARY)
        return cls(
            path=path,
            run=head.removeprefix(MARK).strip(),
            config=config,
            lines=_lines(path / RESULTS),
            summary=summary,
            generations=() if summary is None else generations_of(summary),
        )


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from error


def _lines(path: Path) -> list[Line]:
    lines = []
    for number, text in enumerate((_text(path) or "").splitlines(), start=1):
        try:
            lines.append(decode(text))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is damaged: {error}; mend or remove that line") from error
    return lines


def _summary(path: Path) -> dict[str, object] | None:
    text = _text(path)
    if text is None:
        return None
    try:
        document = json.loads(text)
        generations_of(document)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}; mend or remove it") from error
    return dict(document)
