"""MuJoCo simulation: which renderer works, fast pictures, many scenes at once, tasks, experts, and workers.

Importing this package does not import mujoco; that happens when a model is loaded or a picture is drawn.
"""

from __future__ import annotations

import importlib
from typing import Any

from robotics.sim.backends import Backend, find_backend, require_backend
from robotics.sim.rendering import FrameRenderer, RenderSettings, fast_visuals, update_poses
from robotics.sim.rollout import Chunk, ImageRollout, Observation, SceneSteps, SceneTask
from robotics.sim.scenes import ReachCube, load_arm_cubes

_NAMES = {
    "robotics.sim.arms": ("ARMS",),
    "robotics.sim.batch": ("BatchSettings", "TabletopBatch"),
    "robotics.sim.control": ("CartesianController", "ControlSettings"),
    "robotics.sim.envs": ("SimulationDiverged", "TabletopEnv"),
    "robotics.sim.episodes": ("ChunkResult", "EpisodeSpec", "RobotObservation", "RobotSim"),
    "robotics.sim.expert_check": ("check_experts",),
    "robotics.sim.experts": ("EXPERTS", "Expert"),
    "robotics.sim.opening": ("SimConfig", "open_sim"),
    "robotics.sim.suite_setup": ("open_suite", "setup_suite"),
    "robotics.sim.tasks": ("TASKS",),
    "robotics.sim.video": ("VideoRecorder", "write_mp4"),
    "robotics.sim.workers": ("WorkerPool", "WorkerSettings"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Backend",
    "Chunk",
    "FrameRenderer",
    "ImageRollout",
    "Observation",
    "ReachCube",
    "RenderSettings",
    "SceneSteps",
    "SceneTask",
    "fast_visuals",
    "find_backend",
    "load_arm_cubes",
    "require_backend",
    "update_poses",
    *sorted(_HOME),
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
