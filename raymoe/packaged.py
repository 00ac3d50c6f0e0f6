"""Finds the folders that ship with raymoe: inside the package in a wheel, beside it in a source tree."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def packaged_folder(name: str, package: Path = _PACKAGE) -> Path | None:
    """Find `configs` or `kernels` in this installation; None if it is missing."""
    if (inside := package / name).is_dir():
        return inside
    # Beside the package only in raymoe's source tree: site-packages/configs would belong to another package.
    beside = package.parent / name
    return beside if beside.is_dir() and (package.parent / "pyproject.toml").is_file() else None


def packaged_names() -> list[str]:
    """List the names of the packaged configs."""
    folder = packaged_folder("configs")
    return sorted(path.stem for path in folder.glob("*.yaml")) if folder else []


def packaged_config(name: str) -> Path | None:
    """Find the file of a packaged config, named with or without `.yaml`."""
    stem = name.removesuffix(".yaml")
    folder = packaged_folder("configs")
    return folder / f"{stem}.yaml" if folder and stem in packaged_names() else None
