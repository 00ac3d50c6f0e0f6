"""Finds the folders that ship with raymoe: inside the package in a wheel, beside it in a source tree."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def packaged_folder(name: str, package: Path = _PACKAGE) -> Path | None:
    """Find `configs`, `jobs` or `kernels` in this installation; None if it is missing."""
    if (inside := package / name).is_dir():
        return inside
    # Beside the package only in raymoe's source tree: site-packages/configs would belong to another package.
    beside = package.parent / name
    return beside if beside.is_dir() and (package.parent / "pyproject.toml").is_file() else None


def packaged_names(folder: str = "configs") -> list[str]:
    """List the names of the packaged configs, or of the packaged jobs."""
    directory = packaged_folder(folder)
    return sorted(path.stem for path in directory.glob("*.yaml")) if directory else []


def packaged_config(name: str, folder: str = "configs") -> Path | None:
    """Find the file of a packaged config or job, named with or without `.yaml`."""
    stem = name.removesuffix(".yaml")
    directory = packaged_folder(folder)
    return directory / f"{stem}.yaml" if directory and stem in packaged_names(folder) else None
