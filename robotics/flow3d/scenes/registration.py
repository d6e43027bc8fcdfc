"""Names under which `gymnasium.make` finds the flow scenes, registered by importing this module.

    env = gymnasium.make("robotics.flow3d.scenes.registration:mmrl/Flow3DPour-v0", arm="ur5e")

does the import by itself; after `import robotics.flow3d.scenes.registration` the name alone is enough.
"""

from __future__ import annotations


def register() -> None:
    """Tell Gymnasium of `mmrl/Flow3DPlaceRed-v0` and the others in `ENVIRONMENT_IDS`; a second call changes nothing.

    Every argument of `FlowTabletopEnv` but the task can be given to `gymnasium.make`, such as `arm="ur5e"`. The
    environments truncate themselves, so no time limit is wrapped around them.
    """
    import gymnasium

    for name, task in ENVIRONMENT_IDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point="robotics.flow3d.scenes.envs:FlowTabletopEnv", kwargs={"task": task})


ENVIRONMENT_IDS: dict[str, str] = {
    "mmrl/Flow3DPlaceRed-v0": "place_red",
    "mmrl/Flow3DPlaceGreen-v0": "place_green",
    "mmrl/Flow3DPour-v0": "pour",
    "mmrl/Flow3DInsertBlue-v0": "insert_blue",
    "mmrl/Flow3DInsertYellow-v0": "insert_yellow",
    "mmrl/Flow3DOpenRed-v0": "open_red",
    "mmrl/Flow3DOpenBlue-v0": "open_blue",
}

# As in `robotics.sim.registration`: `make("module:id")` imports the module.
register()
