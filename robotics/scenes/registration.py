"""Registers the tabletop environments with Gymnasium when imported.

    env = gymnasium.make("robotics.scenes.registration:mmrl/Reach-v0", arm="ur5e")

imports this module automatically; after `import robotics.scenes.registration` the id alone is enough.
"""

from __future__ import annotations


def register(entry_point: str, ids: dict[str, str]) -> None:
    """Register a tabletop environment under one id per task; a second call changes nothing.

    Every argument except the task can be passed to `gymnasium.make`, such as `arm="ur5e"`. The environments truncate
    themselves, so no time limit is wrapped around them.
    """
    import gymnasium

    for name, task in ids.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=entry_point, kwargs={"task": task})


ENVIRONMENT_IDS: dict[str, str] = {
    "mmrl/Reach-v0": "reach",
    "mmrl/ReachGreen-v0": "reach_green",
    "mmrl/Push-v0": "push",
    "mmrl/PickPlace-v0": "pick_place",
    "mmrl/Stack-v0": "stack",
    "mmrl/Drawer-v0": "drawer",
    "mmrl/DrawerWide-v0": "drawer_wide",
}

# Gymnasium 1.0 dropped the loading of plug-ins by entry point; it imports the module in `make("module:id")` instead.
register("robotics.scenes.envs:TabletopEnv", ENVIRONMENT_IDS)
