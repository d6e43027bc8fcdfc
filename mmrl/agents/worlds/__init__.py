"""Small worlds that agents see as images, as environments of Gymnasium.

    env = gymnasium.make("mmrl.agents.worlds:mmrl/GridWorld-v0", size=5, min_distance=8)

imports this package by itself; after `import mmrl.agents.worlds` the name alone is enough.
"""

from __future__ import annotations

import importlib.util

__all__ = ["ENVIRONMENT_IDS", "register"]

ENVIRONMENT_IDS: dict[str, str] = {"mmrl/GridWorld-v0": "mmrl.agents.worlds.grid:GridWorld"}


def register() -> None:
    """Register `ENVIRONMENT_IDS` with Gymnasium; a second call changes nothing.

    The worlds truncate their episodes themselves, so no time limit is wrapped around them.
    """
    import gymnasium

    for name, entry_point in ENVIRONMENT_IDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=entry_point)


if importlib.util.find_spec("gymnasium") is not None:  # an extra
    register()
