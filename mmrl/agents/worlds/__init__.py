"""Small worlds that agents see as pictures, as environments of Gymnasium.

    env = gymnasium.make("mmrl.agents.worlds:mmrl/PictureGrid-v0", size=5, min_distance=8)

does the import by itself; after `import mmrl.agents.worlds` the name alone is enough.
"""

from __future__ import annotations

import importlib.util

__all__ = ["ENVIRONMENT_IDS", "register"]

ENVIRONMENT_IDS: dict[str, str] = {"mmrl/PictureGrid-v0": "mmrl.agents.worlds.grid:PictureGrid"}


def register() -> None:
    """Tell Gymnasium of `ENVIRONMENT_IDS`; a second call changes nothing.

    The worlds truncate their episodes themselves, so no time limit is wrapped around them.
    """
    import gymnasium

    for name, entry_point in ENVIRONMENT_IDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=entry_point)


if importlib.util.find_spec("gymnasium") is not None:  # an extra
    register()
