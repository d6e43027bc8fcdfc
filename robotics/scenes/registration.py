"""Names under which `gymnasium.make` finds the table's environments, registered by importing this module.

    env = gymnasium.make("robotics.scenes.registration:mmrl/Reach-v0", arm="ur5e")

does the import by itself; after `import robotics.scenes.registration` the name alone is enough.
"""

from __future__ import annotations

from collections.abc import Iterable

from robotics.scenes.objects.tasks import FLOW_TASKS
from robotics.scenes.tasks import TASKS


def register() -> None:
    """Register the environments of both tables; a second call changes nothing.

    Every argument but the task can be given to `gymnasium.make`, such as `arm="ur5e"`. The environments truncate
    themselves, so no time limit is wrapped around them.
    """
    import gymnasium

    for entry_point, ids in ENTRY_POINTS.items():
        for name, task in ids.items():
            if name not in gymnasium.registry:
                gymnasium.register(name, entry_point=entry_point, kwargs={"task": task})


def _ids(prefix: str, tasks: Iterable[str]) -> dict[str, str]:
    """Names such as mmrl/PickPlace-v0, and the task of each."""
    return {f"mmrl/{prefix}{''.join(map(str.capitalize, task.split('_')))}-v0": task for task in tasks}


ENVIRONMENT_IDS, FLOW_ENVIRONMENT_IDS = _ids("", TASKS), _ids("Flow3D", FLOW_TASKS)
ENTRY_POINTS = {
    "robotics.scenes.envs:TabletopEnv": ENVIRONMENT_IDS,
    "robotics.scenes.objects.envs:FlowTabletopEnv": FLOW_ENVIRONMENT_IDS,
}

# Gymnasium 1.0 dropped the loading of plug-ins by entry point; it imports the module in `make("module:id")` instead.
register()
