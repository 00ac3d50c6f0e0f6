"""Small jobs for the gang tests, as YAML files."""

from __future__ import annotations

from pathlib import Path

import yaml

LONG = 1_000_000  # steps that no test waits for


def write(folder: Path, name: str = "small", **changes: object) -> str:
    """A job of two CPU ranks that exchange a few rows; keyword `world__ranks=2` changes world.ranks."""
    job: dict[str, object] = {
        "name": name,
        "workload": "exchange",
        "world": {"ranks": 2, "cpus": 0.5, "restarts": 1, "wait_timeout_s": 2, "placement_timeout_s": 20},
        "shape": {"tokens": 16, "hidden": 64, "experts": 6, "topk": 2, "dtype": "float32"},
        "exchange": {"backend": "host"},
        "steps": {"warmup": 1, "count": 20},
    }
    for key, value in changes.items():
        section, _, inner = key.partition("__")
        if inner:
            part = job.setdefault(section, {})
            assert isinstance(part, dict)
            part[inner] = value
        else:
            job[section] = value
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job))
    return str(path)
