"""Names under which `gymnasium.make` finds the tabletop environments, registered by importing this module.

    env = gymnasium.make("robotics.sim.registration:mmrl/Reach-v0", arm="ur5e")

does the import by itself; after `import robotics.sim.registration` the name alone is enough.
"""

from __future__ import annotations


def register() -> None:
    """Tell Gymnasium of `mmrl/Reach-v0` and the others in `ENVIRONMENT_IDS`; a second call changes nothing.

    Every argument of `TabletopEnv` but the task can be given to `gymnasium.make`, such as `arm="ur5e"`. The
    environments truncate themselves, so no time limit is wrapped around them.
    """
    import gymnasium

    for name, task in ENVIRONMENT_IDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point="robotics.sim.envs:TabletopEnv", kwargs={"task": task})


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
register()
