"""Where a run takes place: versions and machine, for the record, and the folder of what is kept between runs."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("fedpact", "jax", "jaxlib", "numpy", "scipy", "scikit-learn", "matplotlib")


def environment() -> dict[str, Any]:
    """Versions of Python and of what decides the numbers and the plots, the system and its cores."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # used from a folder, not installed
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": versions,
    }


def cache_folder() -> Path:
    """$FEDPACT_CACHE, or ~/.cache/fedpact: datasets and compiled programs."""
    given = os.environ.get("FEDPACT_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "fedpact"
