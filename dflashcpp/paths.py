"""Folders of the user's own: cache and config.

`DFLASHCPP_CACHE` and `DFLASHCPP_CONFIG` override the platform's defaults (tests use them).
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir(*parts: str) -> Path:
    """A folder of the user cache (`~/.cache/dflashcpp/...` on Linux), made if it is not there."""
    import platformdirs

    base = os.environ.get("DFLASHCPP_CACHE") or platformdirs.user_cache_dir("dflashcpp", appauthor=False)
    path = Path(base, *parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


def state_dir(*parts: str) -> Path:
    """A folder for pidfiles and logs, made if it is not there; beside the cache if that is overridden."""
    import platformdirs

    override = os.environ.get("DFLASHCPP_CACHE")
    base = f"{override}/state" if override else platformdirs.user_state_dir("dflashcpp", appauthor=False)
    path = Path(base, *parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


def config_file() -> Path:
    """The user's config file (`~/.config/dflashcpp/config.toml` on Linux); it may not exist."""
    import platformdirs

    override = os.environ.get("DFLASHCPP_CONFIG")
    if override:
        return Path(override)
    return Path(platformdirs.user_config_dir("dflashcpp", appauthor=False), "config.toml")
