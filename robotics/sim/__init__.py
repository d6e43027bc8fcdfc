"""MuJoCo simulation: which renderer works, fast pictures, and many scenes at once.

Importing this package does not import mujoco; that happens when a model is loaded or a picture is drawn.
"""

from robotics.sim.backends import Backend, find_backend, require_backend
from robotics.sim.rendering import FrameRenderer, RenderSettings, fast_visuals, update_poses
from robotics.sim.rollout import Chunk, ImageRollout, Observation, SceneSteps, SceneTask
from robotics.sim.scenes import ReachCube, load_arm_cubes

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
]
