"""Finds the user's home directory, which a container that runs with a user ID of its own may lack."""

from pathlib import Path


def home() -> Path | None:
    """Return the home directory; None if HOME is not set and the system does not know the user."""
    try:
        return Path.home()
    except RuntimeError:
        return None
