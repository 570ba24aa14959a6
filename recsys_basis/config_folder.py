"""Where the YAML configs lie: inside an installed wheel, or at the top of a checkout."""

from __future__ import annotations

from pathlib import Path


def config_folder() -> Path:
    """Folder ``configs``: ``<package>/configs`` of a wheel if it exists, else ``<checkout>/configs``.

    Raises FileNotFoundError if neither exists.
    """
    package = Path(__file__).resolve().parent
    places = (package / "configs", package.parent / "configs")
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"no folder of configs at {places[0]} or {places[1]}: reinstall recsys-basis")
