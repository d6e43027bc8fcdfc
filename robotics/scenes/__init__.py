"""The scene kit: arms, tasks and experts at a table, and environments built from them.

    from robotics.scenes import TabletopEnv
    env = TabletopEnv("push", arm="ur5e")

`TabletopEnv` runs one scene as a Gymnasium environment, `TabletopVectorEnv` many, `TabletopBatch` many for training.
Objects and their 3D flow are in `robotics.flow3d.objects`. Importing this package does not import mujoco; that happens
when a model is loaded.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "robotics.scenes.arms": ("ARMS", "ArmModel"),
    "robotics.scenes.batch": ("BatchSettings", "TabletopBatch"),
    "robotics.scenes.control": ("CartesianController", "ControlSettings"),
    "robotics.scenes.envs": ("SimulationDiverged", "TabletopEnv"),
    "robotics.scenes.expert_check": ("check_experts", "replay_experts"),
    "robotics.scenes.experts": ("EXPERTS", "Expert", "Move"),
    "robotics.scenes.mjcf_task": ("MjcfTask", "Seen", "Start"),
    "robotics.scenes.tabletop_tasks": ("TASKS",),
    "robotics.scenes.vector_env": ("TabletopVectorEnv",),
}

SIMULATORS = {"tabletop": "robotics.scenes.batch:open_tabletop"}
"""Functions that open a simulator, by `sim.kind`."""

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
