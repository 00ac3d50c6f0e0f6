"""The tensors of a checkpoint in safetensors files, which are read when they are taken."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from raymoe.errors import ConfigError

INDEX = "model.safetensors.index.json"


class CheckpointFiles(Mapping[str, Tensor]):
    """The tensors of a safetensors file, or of a folder with several and an index. It reads those that are taken."""

    def __init__(self, path: str | Path) -> None:
        self._files: dict[Path, Any] = {}
        place = Path(path)
        if (place / INDEX).is_file():
            self._places = _indexed(place / INDEX)
            return
        files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
        if not files or not files[0].is_file():
            raise ConfigError(f"{place} is neither a safetensors file nor a folder with one")
        self._places = {name: file for file in files for name in self._opened(file).keys()}  # noqa: SIM118  (no mapping)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._opened(self._places[name]).get_tensor(name)
        return tensor

    def part(self, name: str, number: int) -> Tensor:
        """Read tensor[number] alone."""
        tensor: Tensor = self._opened(self._places[name]).get_slice(name)[number]
        return tensor

    def length(self, name: str) -> int:
        """Return the tensor's first size, without its values."""
        sizes: list[int] = self._opened(self._places[name]).get_slice(name).get_shape()
        return sizes[0]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _opened(self, file: Path) -> Any:
        if file not in self._files:
            try:
                from safetensors import safe_open
            except ImportError as error:
                raise ConfigError(f"{file} needs the package safetensors: pip install safetensors") from error
            self._files[file] = safe_open(file, framework="pt")
        return self._files[file]


def _indexed(index: Path) -> dict[str, Path]:
    """Read which file of the folder has each tensor."""
    names: dict[str, str] = json.loads(index.read_text())["weight_map"]
    outside = sorted({file for file in names.values() if Path(file).name != file})
    if outside:
        raise ConfigError(f"{index} names {outside[0]}; an index names files of its own folder")
    return {name: index.parent / file for name, file in names.items()}
