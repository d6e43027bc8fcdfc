"""MuJoCo simulation: which renderer works, fast images, many scenes at once, tasks, experts, and workers.

Importing this package does not import mujoco; that happens when a model is loaded or an image is rendered.
"""

from __future__ import annotations

from mmrl.lazy import lazy_names

_NAMES = {
    "robotics.scenes.arms": ("ARMS",),
    "robotics.sim.backends": ("Backend", "find_backend", "require_backend"),
    "robotics.scenes.batch": ("BatchSettings", "TabletopBatch"),
    "robotics.scenes.control": ("CartesianController", "ControlSettings"),
    "robotics.scenes.envs": ("SimulationDiverged", "TabletopEnv"),
    "robotics.sim.episodes": ("ChunkResult", "EpisodeSpec", "RobotObservation", "RobotSim"),
    "robotics.scenes.expert_check": ("check_experts", "replay_experts"),
    "robotics.scenes.experts": ("EXPERTS", "Expert"),
    "robotics.sim.opening": ("SimConfig", "open_sim"),
    "robotics.sim.randomization": ("RandomizationConfig",),
    "robotics.sim.rendering": ("FrameRenderer", "RenderSettings", "fast_visuals", "update_poses"),
    "robotics.sim.rollout": ("Chunk", "ImageRollout", "Observation", "SceneTask"),
    "robotics.sim.scene_results": ("SceneSteps",),
    "robotics.scenes.arm_cubes": ("ReachCube", "load_arm_cubes"),
    "robotics.sim.suite_setup": ("open_suite", "setup_suite"),
    "robotics.scenes.tasks": ("TASKS",),
    "robotics.scenes.vector_env": ("TabletopVectorEnv",),
    "mmrl.hub.video": ("VideoRecorder", "write_mp4"),
    "robotics.sim.subprocess_settings": ("SubprocessSettings",),
    "robotics.sim.subprocess_sim": ("SubprocessSim",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
