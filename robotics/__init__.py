"""Robots: simulation, vision-language-action policies and their training from their own successes.

    from robotics import RobotGrpoConfig, TabletopBatch, train_robot

The rooms are `robotics.sim` (MuJoCo scenes, Gymnasium environments, workers, rendering), `robotics.data` (the format
LeRobotDataset v3), `robotics.vla` (policies, cloning, GRPO, SRPO), `robotics.serving` (a policy behind a websocket) and
`robotics.flow3d` (3D flow of objects: its world model, planner and rewards). Importing the package loads none of them,
only what is taken from it.
"""

from __future__ import annotations

from mmrl.lazy import lazy_names

_NAMES = {
    "robotics.data": ("EpisodeWriter", "LeRobotReader"),
    "robotics.flow3d.clip": ("FlowClip",),
    "robotics.flow3d.flow_reward": ("FlowProgress", "flow_progress_reward"),
    "robotics.flow3d.model.awm": ("Flow3dAwmConfig", "Flow3dAwmRecipe"),
    "robotics.flow3d.model.recipe": ("Flow3dConfig", "Flow3dRecipe"),
    "robotics.flow3d.model.settings": ("FlowModelConfig",),
    "robotics.flow3d.model.world_model": ("FlowWorldModel",),
    "robotics.flow3d.planner": ("FlowPlanner", "PlannerConfig"),
    "robotics.sim.arms": ("ARMS",),
    "robotics.sim.batch": ("BatchSettings", "TabletopBatch"),
    "robotics.sim.envs": ("TabletopEnv",),
    "robotics.sim.episodes": ("ChunkResult", "EpisodeSpec", "RobotObservation", "RobotSim"),
    "robotics.sim.experts": ("EXPERTS", "Expert"),
    "robotics.sim.opening": ("SimConfig", "open_sim"),
    "robotics.sim.tasks": ("TASKS",),
    "robotics.sim.subprocess_settings": ("SubprocessSettings",),
    "robotics.sim.subprocess_sim": ("SubprocessSim",),
    "robotics.sim.vector_env": ("TabletopVectorEnv",),
    "robotics.vla.cloning": ("CloneConfig", "CloneRecipe"),
    "robotics.vla.collect": ("ActingSettings", "run_episodes"),
    "robotics.vla.flow_policy": ("FlowActionPolicy", "FlowPolicyConfig"),
    "robotics.vla.gaussian_policy": ("GaussianActionPolicy", "GaussianPolicyConfig"),
    "robotics.vla.grpo": ("RobotGrpoConfig", "RobotGrpoRecipe"),
    "robotics.vla.latents": ("LatentConfig", "make_latent"),
    "robotics.vla.loading": ("ActionPolicyConfig", "load_action_policy"),
    "robotics.vla.module_adapter": ("ModuleAdapter",),
    "robotics.vla.policy": ("ActionPolicy", "PolicyInputs", "open_policy"),
    "robotics.vla.ppo": ("RobotPpoConfig", "RobotPpoRecipe"),
    "robotics.vla.progress": ("progress_rewards",),
    "robotics.vla.progress_settings": ("ProgressSettings",),
    "robotics.vla.small": ("SmallVlaConfig", "SmallVlaPolicy"),
    "robotics.vla.srpo": ("SrpoConfig", "SrpoRecipe"),
    "robotics.vla.tasks": ("EpisodeSetConfig",),
    "robotics.vla.training": ("train_robot",),
    "robotics.vla.video_encoder": ("VideoEncoder", "train_video_encoder"),
    "robotics.vla.vlm_policy": ("VlmActionConfig", "VlmActionPolicy"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
